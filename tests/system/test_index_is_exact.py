"""Two real workers, real Valkey, real gateways: the index equals the workers' own sets."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import aiohttp
import msgspec
import pytest

from cluster.blocks import split_hashes
from cluster.protocol import HEADER_HIT_TOKENS, HEADER_PREDICTED_HIT_TOKENS, BlockList
from cluster.settings import BusSettings, GatewaySettings, Settings, WorkerSettings
from router.gateway import Gateway
from tests.router.support import QUICK_STOP
from tests.tiny_model import write_tiny_llama
from tests.watching import Heard
from worker.server import WorkerServer

QUICK = BusSettings(lease_s=1.5, heartbeat_s=0.1, min_report_gap_s=0.002)
KV_BLOCKS = 60
"""So few that the requests below evict one another's blocks."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")


def settings(redis_url: str, pool: str, model: Path) -> Settings:
    return Settings(
        pool=pool,
        redis_url=redis_url,
        secret="a secret",
        bus=QUICK,
        gateway=GatewaySettings(port=0, **QUICK_STOP),
        worker=WorkerSettings(
            model=str(model),
            device="cpu",
            dtype="float32",
            kv_blocks=KV_BLOCKS,
            cache_dir=str(model.parent / "cache"),
        ),
    )


async def own_set(worker: WorkerServer) -> tuple[int, set[bytes]]:
    """What the engine itself says that it holds, over HTTP."""
    from cluster.protocol import pool_token

    headers = {"Authorization": f"Bearer {pool_token('a secret')}"}
    async with (
        aiohttp.ClientSession(headers=headers) as http,
        http.get(worker.url + "/blocks") as answer,
    ):
        listing = msgspec.msgpack.decode(await answer.read(), type=BlockList)
    return listing.epoch, set(split_hashes(listing.blocks))


async def agree(gateway: Gateway, heard: Heard, workers: list[WorkerServer]) -> None:
    """The gateway's index becomes equal to the workers' sets, hash by hash."""
    for worker in workers:
        epoch, blocks = await own_set(worker)

        def equal(name: str = worker.service.name, epoch=epoch, blocks=blocks) -> bool:
            members = {m.card.worker: m for m in gateway.fleet.members()}
            return (
                name in members
                and members[name].card.epoch == epoch
                and gateway.fleet.index.blocks_of(members[name].slot) == blocks
            )

        await heard.until(equal)
    gateway.fleet.check()


async def send_mix(url: str, rng: random.Random, count: int) -> list[tuple[int, int]]:
    """Requests with shared prefixes, some cut short; (predicted, actual) hits of whole ones."""
    stems = [f"You are helper number {i}. " * 12 for i in range(8)]
    hits: list[tuple[int, int]] = []

    async def one(http: aiohttp.ClientSession, number: int) -> None:
        stem = rng.choice(stems)
        body = {
            "model": "tiny",
            "prompt": stem + f"Question {number}?" * rng.randint(1, 4),
            "max_tokens": rng.randint(1, 30),
            "temperature": 0,
            "stream": True,
        }
        async with http.post("/v1/completions", json=body) as answer:
            assert answer.status == 200, await answer.text()
            if number % 5 == 0:
                await answer.content.readany()
                return  # leaves in the middle
            await answer.read()
            hits.append(
                (
                    int(answer.headers[HEADER_PREDICTED_HIT_TOKENS]),
                    int(answer.headers[HEADER_HIT_TOKENS]),
                )
            )

    async with aiohttp.ClientSession(url) as http:
        for start in range(0, count, 6):
            await asyncio.gather(*(one(http, n) for n in range(start, min(count, start + 6))))
    return hits


async def test_any_mix_evictions_and_a_restart_leave_every_index_exact(
    redis_url: str, pool: str, model: Path
) -> None:
    parts = settings(redis_url, pool, model)
    workers = [WorkerServer(parts, name) for name in ("w0", "w1")]
    gateway = Gateway(parts)
    heard = Heard(gateway)
    late: Gateway | None = None
    try:
        await asyncio.gather(*(worker.start() for worker in workers))
        await gateway.start()
        await heard.until(lambda: len(gateway.fleet.members()) == 2)
        rng = random.Random(3)
        hits = await send_mix(gateway.url, rng, 60)
        await agree(gateway, heard, workers)
        stats = [(await worker.service.engine.stats()).stats for worker in workers]
        assert sum(s.evictions for s in stats) > 0, "the pools are too large to evict"
        assert sum(actual for _, actual in hits) > 0, "nothing was ever reused"

        old_epoch, old_blocks = await own_set(workers[0])
        await workers[0].stop()
        workers[0] = WorkerServer(parts, "w0")
        await workers[0].start()
        await agree(gateway, heard, workers)
        new_epoch, new_blocks = await own_set(workers[0])
        assert new_epoch > old_epoch
        assert old_blocks
        assert new_blocks == set()

        await send_mix(gateway.url, rng, 40)
        await agree(gateway, heard, workers)
        late = Gateway(parts)
        late_heard = Heard(late)
        await late.start()
        await agree(late, late_heard, workers)
        await agree(gateway, heard, workers)

        def quiet() -> bool:
            loads = [gateway.fleet.load_of(member) for member in gateway.fleet.members()]
            return all(x.batch == 0 and x.pending_prefill_tokens == 0 for x in loads)

        await heard.until(quiet)
        assert gateway.fleet.in_flight == 0
    finally:
        for part in (late, gateway):
            if part is not None:
                await part.stop()
        for worker in workers:
            await worker.stop()
