"""A worker without an engine: a stream of 16 events at once, and reports as a real worker sends.

    python -m tests.benchmarks.gateways.mock_worker REDIS_URL POOL NAME [CONTEXT_TOKENS EVENT_GAP_S]

It speaks both tongues: `/generate` and `/model` to Stemroute's gateway, OpenAI's chat API to any
other. Each event goes out in a turn of the loop of its own, so that it is a packet of its own.
What a real worker must do for its cache (hash the prompt's blocks, report them) is done for
`/generate`; what it must do for OpenAI's API (tokenise the prompt) is not. With an EVENT_GAP_S,
`/generate` streams as many events as the request's `max_tokens`, one every so many seconds.
Prints its URL.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from typing import Any

import msgspec
import uvloop
from aiohttp import web

from cluster.blocks import Namespace, hash_blocks
from cluster.bus import Publisher
from cluster.protocol import (
    HEADER_HIT_TOKENS,
    HEADER_PROMPT_TOKENS,
    HEADER_REQUEST_ID,
    HEADER_WORKER,
    GenerateRequest,
    Load,
    ModelInfo,
    WorkerCard,
)
from cluster.settings import BusSettings
from tests.real_tokenizer import smollm2

MODEL = "mock"
EVENTS = 16
CAPACITY_BLOCKS = 50_000
CONTEXT_TOKENS = 65_536
NAMESPACE = Namespace(
    weights="mock", tokenizer="smollm2", kv_dtype="bfloat16", block_size=16, positions="rope:1"
)

_decode_generate = msgspec.msgpack.Decoder(GenerateRequest).decode
_decode_json = msgspec.json.Decoder().decode


class Cache:
    """The blocks of the last prompts. Parents are newer than their children: prefix-closed."""

    def __init__(self) -> None:
        self.blocks: dict[bytes, None] = {}

    def add(self, chain: list[bytes]) -> tuple[int, list[bytes], list[bytes]]:
        """Blocks that were there, those stored now, and those evicted for them."""
        blocks = self.blocks
        stored = [block for block in chain if block not in blocks]
        for block in reversed(chain):
            blocks.pop(block, None)
            blocks[block] = None
        surplus = len(blocks) - CAPACITY_BLOCKS
        evicted = [block for block, _ in zip(blocks, range(surplus), strict=False)]
        for block in evicted:
            del blocks[block]
        return len(chain) - len(stored), stored, evicted


class MockWorker:
    """One worker."""

    def __init__(
        self, redis_url: str, pool: str, name: str, context_tokens: int, event_gap_s: float
    ) -> None:
        self._name = name
        self._context_tokens = context_tokens
        self._event_gap_s = event_gap_s
        self._publisher = Publisher(redis_url, pool, BusSettings())
        self._cache = Cache()
        self._root = NAMESPACE.root()
        self._running = 0
        real = smollm2()
        self._model = msgspec.json.encode(
            ModelInfo(
                model=MODEL,
                namespace=NAMESPACE,
                tokenizer_json=real.tokenizer_json,
                chat_template=real.chat_template,
                special_tokens={"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"},
                context_tokens=context_tokens,
            )
        )

    def app(self) -> web.Application:
        """Both tongues, and what the peers ask a worker for."""
        app = web.Application(client_max_size=2**26)
        app.add_routes(
            [
                web.post("/generate", self._generate),
                web.get("/model", self._get_model),
                web.post("/v1/chat/completions", self._chat),
                web.get("/health", self._answer({})),
                web.get("/v1/models", self._answer({"object": "list", "data": [_listed()]})),
                web.get("/get_model_info", self._answer({"model_path": MODEL})),
                web.get("/get_server_info", self._answer({"model_path": MODEL})),
                web.get("/model_info", self._answer({"model_path": MODEL})),
                web.get("/server_info", self._answer({"model_path": MODEL})),
            ]
        )
        return app

    async def publish(self, address: str) -> None:
        """Card and reports, until cancelled."""
        self._publisher.begin(
            WorkerCard(
                worker=self._name,
                epoch=time.time_ns(),
                address=address,
                model=MODEL,
                namespace=NAMESPACE,
                namespace_check=NAMESPACE.check(),
                capacity_blocks=CAPACITY_BLOCKS,
                context_tokens=self._context_tokens,
                max_batch_size=64,
                token_budget=8192,
                device="mock",
                state="ready",
            )
        )
        self._publisher.update(load=self._load())
        await self._publisher.run()

    def _load(self) -> Load:
        return Load(
            running=self._running,
            free_blocks=CAPACITY_BLOCKS,
            cached_blocks=len(self._cache.blocks),
        )

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        wanted = _decode_generate(await request.read())
        chain = hash_blocks(self._root, wanted.token_ids, NAMESPACE.block_size)
        hit, stored, evicted = self._cache.add(chain)
        self._running += 1
        self._publisher.update(
            load=self._load(), stored=stored, evicted=evicted, received=[wanted.request_id]
        )
        headers = {
            HEADER_REQUEST_ID: wanted.request_id,
            HEADER_WORKER: self._name,
            HEADER_PROMPT_TOKENS: str(len(wanted.token_ids) // 4),
            HEADER_HIT_TOKENS: str(hit * NAMESPACE.block_size),
        }
        try:
            if self._event_gap_s:
                return await _slow_stream(
                    request, headers, wanted.sampling.max_tokens, self._event_gap_s
                )
            return await _stream(request, headers)
        finally:
            self._running -= 1
            self._publisher.update(load=self._load())

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        _decode_json(await request.read())
        return await _stream(request, {})

    async def _get_model(self, request: web.Request) -> web.Response:
        return web.Response(body=self._model, content_type="application/json")

    def _answer(self, value: dict[str, Any]) -> Any:
        body = msgspec.json.encode(value)

        async def handler(request: web.Request) -> web.Response:
            return web.Response(body=body, content_type="application/json")

        return handler


def _listed() -> dict[str, Any]:
    return {"id": MODEL, "object": "model", "created": 0, "owned_by": "mock"}


def _event(number: int) -> bytes:
    choice = {"index": 0, "delta": {"content": f" word{number}"}, "finish_reason": None}
    body = {
        "id": "chatcmpl-0123456789abcdef0123456789abcdef",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": MODEL,
        "choices": [choice],
    }
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


EVENT_BYTES = [_event(number) for number in range(EVENTS)]
EVENT_BYTES[-1] += b"data: [DONE]\n\n"


async def _stream(request: web.Request, headers: dict[str, str]) -> web.StreamResponse:
    response = web.StreamResponse(
        headers={**headers, "Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
    )
    await response.prepare(request)
    for event in EVENT_BYTES:
        await response.write(event)
        await asyncio.sleep(0)
    await response.write_eof()
    return response


async def _slow_stream(
    request: web.Request, headers: dict[str, str], events: int, gap_s: float
) -> web.StreamResponse:
    response = web.StreamResponse(headers={**headers, "Content-Type": "text/event-stream"})
    await response.prepare(request)
    for _ in range(events):
        await response.write(EVENT_BYTES[0])
        await asyncio.sleep(gap_s)
    await response.write_eof()
    return response


async def serve(
    redis_url: str, pool: str, name: str, context_tokens: str = "", event_gap_s: str = "0"
) -> None:
    """Until the process is ended."""
    logging.getLogger("aiohttp").setLevel(logging.CRITICAL)  # smg tries HTTP/2 first
    worker = MockWorker(
        redis_url, pool, name, int(context_tokens or CONTEXT_TOKENS), float(event_gap_s)
    )
    runner = web.AppRunner(worker.app(), access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=1024).start()
    address = f"http://127.0.0.1:{runner.addresses[0][1]}"
    publishing = asyncio.create_task(worker.publish(address))
    print(address, flush=True)
    await publishing


if __name__ == "__main__":
    uvloop.run(serve(*sys.argv[1:]))
