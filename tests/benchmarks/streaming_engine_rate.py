"""Does streaming hold the engine up? Its step rate with the HTTP server busy, over that alone.

The runner is emulated (`emulated:steady-25ms`): every step takes 25 ms, whatever it computes.
Alone, the engine decodes 256 sequences in this process and nobody reads along. Busy, a whole
worker (HTTP server and engine process, a real Valkey to publish to) streams 256 sequences to a
client process that reads every byte. Steps are counted by the engine itself, while all 256 run.
"""

from __future__ import annotations

import asyncio
import sys
import time

import aiohttp
import msgspec

from cluster.blocks import pack_tokens
from cluster.protocol import GenerateRequest, Sampling
from cluster.settings import Settings, WorkerSettings
from ops.keeper import start_valkey
from tests.benchmarks.decoding import ROOT
from worker.build import build_engine
from worker.messages import EngineRequest
from worker.server import WorkerServer

NAME = "streaming_engine_rate"
BAR = 0.9
SEQUENCES = 256
PROMPT_TOKENS = 64
MEASURED_S = 8.0
MAX_TOKENS = 4000
WORKER = WorkerSettings(
    model="emulated:steady-25ms", max_batch_size=SEQUENCES, token_budget=4096, kv_blocks=80_000
)
"""A pool that holds all sequences to their end: nobody is preempted."""


def run() -> int:
    """Exit code: 0 met, 1 missed."""
    alone = rate_alone()
    print(f"emulated, 25 ms a step, {SEQUENCES} sequences: alone {alone:.2f} steps/s", flush=True)
    busy, tokens = asyncio.run(rate_while_streaming())
    print(f"streaming over HTTP: {busy:.2f} steps/s, the client got {tokens:.0f} tokens/s")
    value = busy / alone
    print(f"{NAME}: {value:.3f} (bar {BAR})")
    return 0 if value >= BAR else 1


def rate_alone() -> float:
    """Steps a second of the engine with all sequences decoding."""
    core, _ = build_engine(WORKER)
    for index in range(SEQUENCES):
        core.add(
            EngineRequest(
                request_id=str(index),
                token_ids=pack_tokens(_prompt(index)),
                namespace_root=ROOT,
                sampling=Sampling(max_tokens=MAX_TOKENS, ignore_eos=True),
            )
        )
    while core.load().pending_prefill_tokens:
        core.step()
    start, before = time.perf_counter(), core.stats().steps
    while time.perf_counter() < start + MEASURED_S:
        core.step()
        core.take_changes()
    return (core.stats().steps - before) / (time.perf_counter() - start)


async def rate_while_streaming() -> tuple[float, float]:
    """Steps a second of the engine behind a busy server, tokens a second that its client got."""
    valkey = await asyncio.to_thread(start_valkey)
    settings = Settings(pool="benchmark", redis_url=valkey.connection_url, worker=WORKER)
    server = WorkerServer(settings, "w0")
    await server.start()
    client = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.benchmarks.streaming_engine_rate",
        server.url,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        engine = server.service.engine
        assert client.stdin is not None
        assert client.stdout is not None
        if await client.stdout.readline() != b"streaming\n":
            raise RuntimeError("the client did not get all its streams; its error is above")
        client.stdin.write(b"count\n")
        start, before = time.perf_counter(), (await engine.stats()).stats.steps
        await asyncio.sleep(MEASURED_S)  # the time that is measured
        steps, elapsed = (await engine.stats()).stats.steps - before, time.perf_counter() - start
        client.stdin.write(b"stop\n")
        tokens = float(await client.stdout.readline())
        load = server.service.publisher.load
        if load.running != SEQUENCES or load.pending_prefill_tokens:
            raise RuntimeError(f"not all sequences were decoding: {load}")
        return steps / elapsed, tokens
    finally:
        if client.returncode is None:
            client.kill()
        await client.wait()
        await server.stop()
        await asyncio.to_thread(valkey.stop)


async def read_streams(url: str) -> None:
    """The client: open all streams, say so, then count tokens between two lines of input."""
    events, opened, all_open = 0, 0, asyncio.Event()

    async def read(session: aiohttp.ClientSession, index: int) -> None:
        nonlocal events, opened
        request = GenerateRequest(
            request_id=f"r{index}",
            model=WORKER.model,
            kind="completion",
            token_ids=pack_tokens(_prompt(index)),
            sampling=Sampling(max_tokens=MAX_TOKENS, ignore_eos=True),
            stream=True,
        )
        async with session.post(f"{url}/generate", data=msgspec.msgpack.encode(request)) as answer:
            answer.raise_for_status()
            opened += 1
            if opened == SEQUENCES:
                all_open.set()
            async for chunk in answer.content.iter_any():
                events += chunk.count(b"data: ")

    async def count(session: aiohttp.ClientSession) -> None:
        await all_open.wait()
        print("streaming", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        start, before = time.perf_counter(), events
        await asyncio.to_thread(sys.stdin.readline)
        print((events - before) / (time.perf_counter() - start), flush=True)
        for reader in readers:
            reader.cancel()

    readers: list[asyncio.Task[None]] = []
    async with (
        aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
        ) as session,
        asyncio.TaskGroup() as group,
    ):  # a reader that fails ends the others, and this process, with its error
        readers += [group.create_task(read(session, index)) for index in range(SEQUENCES)]
        group.create_task(count(session))


def _prompt(index: int) -> list[int]:
    return [97 + (index * 7 + position) % 26 for position in range(PROMPT_TOKENS)]


if __name__ == "__main__":
    asyncio.run(read_streams(sys.argv[1]))
