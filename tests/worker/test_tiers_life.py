"""A whole worker with cold tiers: server, engine process, bus, and a router's fleet behind it.

Whether it loads or computes is its own decision, by what it measures; what it answers and what it
announces must be right either way.
"""

from __future__ import annotations

import asyncio
import contextlib

import aiohttp
import msgspec
import pytest

from cluster.blocks import split_hashes
from cluster.follower import Follower
from cluster.protocol import BlockList, pool_token
from cluster.settings import WorkerSettings
from router.fleet import Fleet
from tests.cluster.bus_bench import QUICK
from tests.tiny_model import write_tiny_llama
from tests.worker.test_worker_life import SECRET, STEM, Worker, a_worker, answer_of
from worker import build
from worker.prefill_speed import Speed

TIERS = {"kv_blocks": 30, "block_size": 8, "cpu_tier_gb": 1e-3, "disk_tier_gb": 1e-2}
PROMPTS = [f"{number}: {STEM} and {number * 7} more" for number in range(6)]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return [str(write_tiny_llama(folder / f"seed{seed}", seed)) for seed in (1, 2)]


@contextlib.asynccontextmanager
async def a_fleet(redis_url, pool):
    fleet = Fleet()
    task = asyncio.create_task(Follower(redis_url, pool, fleet, QUICK, SECRET.encode()).run())
    try:
        yield fleet
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def listing(worker: Worker) -> tuple[set[bytes], ...]:
    """What the engine itself says that it holds: device, host memory, disk."""
    async with worker.session.get(f"{worker.server.url}/blocks") as answer:
        held = msgspec.msgpack.decode(await answer.read(), type=BlockList)
    return tuple(set(split_hashes(joined)) for joined in (held.blocks, held.cpu, held.disk))


async def announced_as_held(worker: Worker, fleet: Fleet) -> tuple[set[bytes], ...]:
    """Wait until a router has, tier by tier and hash by hash, what the engine holds."""
    async with asyncio.timeout(20):
        while True:
            held = await listing(worker)
            members = fleet.members()
            if members:
                slot = members[0].slot
                known = (fleet.index.blocks_of(slot), *fleet.cold.blocks_of(slot))
                if tuple(map(set, known)) == held:
                    fleet.check()
                    return held
            await asyncio.sleep(0.02)  # the worker is asked anew: nothing tells of its thoughts


async def test_the_announced_tiers_are_the_truth_across_restart_and_new_weights(
    redis_url, pool, models, tmp_path
):
    fields = {**TIERS, "disk_tier_dir": str(tmp_path / "kv"), "cache_dir": str(tmp_path / "cache")}
    async with a_worker(redis_url, pool, models[0], **fields) as worker:
        async with a_fleet(redis_url, pool) as fleet:
            for prompt in PROMPTS * 2:
                _, text = await worker.text_of(prompt)
                assert text == answer_of(models[0], prompt)
            device, cpu, disk = await announced_as_held(worker, fleet)
            assert cpu - device
            assert disk >= cpu
        async with a_fleet(redis_url, pool) as late:
            assert await announced_as_held(worker, late) == (device, cpu, disk)
        tiers = (await worker.stats()).tiers
        assert tiers is not None
        assert (tiers.cpu_blocks, tiers.disk_blocks) == (len(cpu), len(disk))
        metrics = await worker.metrics()
        held = f'{{model="tiny",tier="disk",worker="worker"}} {len(disk)}.0'
        assert f"\nstemroute_worker_tier_blocks{held}\n" in metrics

    async with (
        a_worker(redis_url, pool, models[0], **fields) as worker,
        a_fleet(redis_url, pool) as fleet,
    ):
        assert await announced_as_held(worker, fleet) == (set(), set(), disk | device)
        for prompt in PROMPTS:
            _, text = await worker.text_of(prompt)
            assert text == answer_of(models[0], prompt)
        assert (await worker.stats()).tiers.failed_loads == 0
        old = (await announced_as_held(worker, fleet))[2]
        assert (await worker.change(models[1]))[0] == 200
        assert await announced_as_held(worker, fleet) == (set(), set(), set())
        for prompt in PROMPTS:
            _, text = await worker.text_of(prompt)
            assert text == answer_of(models[1], prompt)
        held = await announced_as_held(worker, fleet)
        assert held[2]
        assert not held[2] & old
        assert (await worker.change(models[0]))[0] == 200
        assert await announced_as_held(worker, fleet) == (set(), set(), old)
        async with (
            aiohttp.ClientSession(
                headers={"Authorization": f"Bearer {pool_token(SECRET)}"}
            ) as http,
            http.post(f"{worker.server.url}/admin/flush") as answer,
        ):
            assert answer.status == 200
        assert await announced_as_held(worker, fleet) == (set(), set(), set())


async def test_a_worker_that_ends_in_good_order_leaves_its_device_s_blocks_to_the_next(
    redis_url, pool, models, tmp_path
):
    fields = {
        **TIERS,
        "kv_blocks": 400,
        "disk_tier_dir": str(tmp_path / "kv"),
        "cache_dir": str(tmp_path / "cache"),
    }
    async with (
        a_worker(redis_url, pool, models[0], **fields) as worker,
        a_fleet(redis_url, pool) as fleet,
    ):
        for prompt in PROMPTS:
            await worker.text_of(prompt)
        device, cpu, disk = await announced_as_held(worker, fleet)
        assert device
        assert not cpu | disk  # nothing had to leave the device
    async with (
        a_worker(redis_url, pool, models[0], **fields) as worker,
        a_fleet(redis_url, pool) as fleet,
    ):
        assert await announced_as_held(worker, fleet) == (set(), set(), device)
        for prompt in PROMPTS:
            _, text = await worker.text_of(prompt)
            assert text == answer_of(models[0], prompt)
        tiers = (await worker.stats()).tiers
        assert tiers.loads + tiers.declined_loads > 0
        assert tiers.failed_loads == 0
    async with a_worker(redis_url, pool, models[0], **fields, save_timeout_s=0.0) as worker:
        await worker.text_of("what nobody has asked before, in more than two blocks")
        found = (await listing(worker))[2]
    async with a_worker(redis_url, pool, models[0], **fields) as worker:
        assert (await listing(worker))[2] == found  # no time, nothing saved


async def test_who_still_runs_at_the_end_fails_clearly_and_the_rest_is_saved(
    redis_url, pool, models, tmp_path
):
    fields = {**TIERS, "kv_blocks": 400, "disk_tier_dir": str(tmp_path / "kv")}
    fields["cache_dir"] = str(tmp_path / "cache")
    async with a_worker(redis_url, pool, models[0], **fields, drain_timeout_s=0.01) as worker:
        await worker.text_of(PROMPTS[0])
        endless = asyncio.create_task(worker.ask(STEM, max_tokens=1900))
        while not worker.server.service.publisher.load.running:
            await worker.stats()
        held = (await listing(worker))[0]
        await worker.server.stop()
        status, _, body = await endless
        assert status == 500
        assert "stopped" in body["error"]["message"]
    async with a_worker(redis_url, pool, models[0], **fields) as worker:
        assert held <= (await listing(worker))[2]


async def test_a_disk_tier_without_host_memory_is_refused(redis_url, pool, models):
    with pytest.raises(Exception, match=r"worker\.cpu_tier_gb"):
        async with a_worker(redis_url, pool, models[0], disk_tier_gb=1.0):
            pass


def test_tiers_know_the_whole_first_speed_before_a_step_has_run(models, tmp_path, monkeypatch):
    monkeypatch.setattr(build, "first_speed", lambda *_: Speed(1e-3, 1e-6))
    fields = {**TIERS, "disk_tier_gb": 0.0, "cache_dir": str(tmp_path)}
    core, info = build.build_engine(WorkerSettings(model=models[0], **fields))
    assert info.prefill == (1e-3, 1e-6)
    assert (core.tiers._s_per_token, core.tiers._s_per_pair) == info.prefill
