"""`/admin/cache` and `/admin/weights`: what workers say, and one worker after the other."""

import asyncio

import msgspec
from aiohttp import web

from cluster.protocol import CacheView
from tests.router.support import Rig, card

VIEW = CacheView(
    worker="w0",
    epoch=1,
    hits=3,
    partial_hits=2,
    misses=1,
    reused_tokens=640,
    computed_prompt_tokens=360,
    evictions_for_space=4,
    evictions_over_share=0,
    evictions_expired=0,
    flushed_blocks=0,
    mean_eviction_age_s=12.5,
    preemptions=0,
    collisions=0,
    capacity_blocks=100,
    free_blocks=75,
    cached_blocks=60,
    pinned_blocks=5,
    pool_use=0.25,
    kv_bytes_a_token=256,
    block_size=16,
    eviction="lru",
)


def telling(view):
    async def stats(request):
        return web.Response(body=msgspec.json.encode(view), content_type="application/json")

    return stats


def changing(order, worker, status=200):
    async def weights(request):
        wanted = await request.json()
        order.append((worker.name, wanted["model"], wanted["pool"]))
        if status != 200:
            error = {"message": "it has another architecture", "type": "x"}
            return web.json_response({"error": error}, status=status)
        return web.json_response({"worker": worker.name, "epoch": 7, "weights": "d1"})

    return weights


async def test_the_caches_of_all_workers_and_who_is_silent():
    async with Rig(workers=2) as rig:
        rig.workers[0].others["GET /stats"] = telling(VIEW)
        rig.fleet.on_card(card("unready", state="starting"))
        status, _, body = await rig.get("/admin/cache")
        assert status == 200
        assert body["workers"] == [msgspec.to_builtins(VIEW)]
        assert body["silent"] == {"w1": "status 404"}


async def test_weights_are_changed_one_worker_after_the_other():
    async with Rig(workers=3) as rig:
        order = []
        for worker in rig.workers:
            worker.others["POST /admin/weights"] = changing(order, worker)
        status, _, body = await rig.post("/admin/weights", {"model": "/m/next"})
        assert status == 200
        assert order == [(f"w{n}", "/m/next", True) for n in range(3)]
        assert body["workers"][0] == {"worker": "w0", "epoch": 7, "weights": "d1"}
        status, _, body = await rig.post("/admin/weights", {"model": "/m/next", "worker": "w1"})
        assert [each["worker"] for each in body["workers"]] == ["w1"]
        assert order[3:] == [("w1", "/m/next", False)], "the others will not get its weights"


async def test_the_first_worker_that_refuses_ends_the_change_and_is_named():
    async with Rig(workers=3) as rig:
        order = []
        for worker, code in zip(rig.workers, (200, 400, 200), strict=True):
            worker.others["POST /admin/weights"] = changing(order, worker, code)
        status, _, body = await rig.post("/admin/weights", {"model": "/m/next"})
        assert status == 400
        message = body["error"]["message"]
        assert "w1 did not change its weights: it has another architecture" in message
        assert "changed before it: w0" in message
        assert [name for name, *_ in order] == ["w0", "w1"]


async def test_what_cannot_be_asked_is_refused_in_words():
    async with Rig() as rig:
        status, _, body = await rig.post("/admin/weights", {"path": "x"})
        assert status == 400
        assert "must be of the form" in body["error"]["message"]
        status, _, body = await rig.post("/admin/weights", {"model": "x", "worker": "nobody"})
        assert status == 503
        assert "the worker nobody is not ready" in body["error"]["message"]


async def test_a_worker_that_sends_no_json_or_fails_is_told_with_its_own_words(monkeypatch):
    monkeypatch.setattr("router.worker_admin.STATS_TIMEOUT_S", 0.2)
    silent = asyncio.Event()

    async def hangs(request):
        await silent.wait()

    async def garbage(request):
        return web.Response(text="hello")

    async def fails(request):
        error = {"message": "the engine is dead", "type": "server_error"}
        return web.json_response({"error": error}, status=503)

    async with Rig(workers=3) as rig:
        for worker, stats in zip(rig.workers, (hangs, garbage, fails), strict=True):
            worker.others["GET /stats"] = stats
        _, _, body = await rig.get("/admin/cache")
        silent.set()
        assert body["workers"] == []
        assert body["silent"]["w0"] == "no response within 0.2 s"
        assert "malformed" in body["silent"]["w1"]
        assert body["silent"]["w2"] == "the engine is dead"
