"""`/admin`: policy, flush and fleet, and who may ask."""

import asyncio

import msgspec
import pytest

from cluster.protocol import HEADER_POLICY, HEADER_WORKER, Load
from router import edge
from router.policies import available
from tests.router.support import NAMESPACE, Rig, card, report


async def test_the_policy_can_be_seen_and_changed():
    async with Rig(workers=2) as rig:
        status, _, body = await rig.get("/admin/policy")
        assert (status, body["policy"]) == (200, "locality")
        assert body["available"] == available()
        status, _, body = await rig.post("/admin/policy", {"policy": "round_robin"})
        assert (status, body["policy"]) == (200, "round_robin")
        answers = [await rig.complete() for _ in range(4)]
        assert [headers[HEADER_WORKER] for _, headers, _ in answers] == ["w0", "w1", "w0", "w1"]
        assert answers[0][1][HEADER_POLICY] == "round_robin"
        await rig.post("/admin/policy", {"policy": "locality:tie=0.1"})
        assert (await rig.complete())[1][HEADER_POLICY] == "locality:tie=0.1"


@pytest.mark.parametrize(
    ("body", "code", "words"),
    [
        ({"policy": "best"}, "unknown_policy", "there is no policy 'best': use one of round_robin"),
        ({"policy": "locality:tie=x"}, "unknown_policy", "tie"),
        ({"policy": 5}, None, "must be of the form"),
        (b"round_robin", None, "must be of the form"),
        (b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", None, "nests"),
    ],
)
async def test_a_policy_that_cannot_be_had_changes_nothing(body, code, words):
    async with Rig() as rig:
        status, _, answer = await rig.post("/admin/policy", body)
        assert (status, answer["error"]["code"]) == (400, code)
        assert words in answer["error"]["message"]
        assert (await rig.get("/admin/policy"))[2]["policy"] == "locality"


async def test_flush_waits_until_the_index_knows_every_new_epoch():
    async with Rig(workers=2) as rig:
        flushed = asyncio.Semaphore(0)

        def flush():
            flushed.release()
            return 5

        for worker in rig.workers:
            worker.on_flush = flush
            rig.fleet.on_report(report(worker.name, stored=[b"x" * 16]))
        rig.fleet.on_card(card("unready", state="starting"))
        waiting = asyncio.create_task(rig.post("/admin/flush", {}))
        await asyncio.wait_for(flushed.acquire(), 10)
        await asyncio.wait_for(flushed.acquire(), 10)
        rig.fleet.on_card(rig.workers[0].card(epoch=5))
        assert (await rig.get("/health"))[0] == 200
        assert not waiting.done()
        rig.fleet.on_card(rig.workers[1].card(epoch=5))
        status, _, body = await waiting
        assert (status, body) == (200, {"workers": {"w0": 5, "w1": 5}})
        assert len(rig.fleet.index) == 0


async def test_a_flush_that_a_worker_does_not_report_is_a_504(monkeypatch):
    monkeypatch.setattr("router.admin.FLUSH_TIMEOUT_S", 0.2)
    async with Rig() as rig:
        status, _, body = await rig.post("/admin/flush", {})
        assert (status, body["error"]["code"]) == (504, "flush_timeout")


async def test_a_worker_that_cannot_be_flushed_is_named():
    async with Rig() as rig:
        rig.workers[0].on_flush = lambda: "soon"
        status, _, body = await rig.post("/admin/flush", {})
        assert (status, body["error"]["code"]) == (502, "flush_failed")
        assert "the worker w0 was not flushed" in body["error"]["message"]


async def test_the_fleet_is_shown_as_this_gateway_sees_it():
    async with Rig() as rig:
        load = Load(pending_prefill_tokens=9, running=2, waiting=1, free_blocks=50, cached_blocks=2)
        rig.fleet.on_report(report("w0", load=load, stored=[b"x" * 16, b"y" * 16]))
        wrong = msgspec.structs.replace(NAMESPACE, weights="w2")
        rig.fleet.on_card(card("b", namespace=wrong))
        rig.follower.status.refused = {"c": "it is too old"}
        await rig.complete()
        status, _, body = await rig.get("/admin/fleet")
        assert status == 200
        assert (body["pool"], body["policy"]) == ("default", "locality")
        assert (body["requests_total"], body["in_flight"]) == (1, 0)
        assert body["bus"] == {
            "connected": True,
            "stale": False,
            "reason": "",
            "warning": "",
            "reports": 7,
            "gaps": 1,
            "disagreements": 0,
            "repairs": 1,
        }
        assert set(body["refused"]) == {"b", "c"}
        assert body["disagreeing"] == {}
        assert body["workers"][1] == {
            "worker": "w0",
            "epoch": 1,
            "address": rig.workers[0].address,
            "model": "tiny",
            "state": "ready",
            "device": "fake",
            "suspect": False,
            "left_out": "",
            "pending_prefill_tokens": 9,
            "running": 2,
            "waiting": 1,
            "free_blocks": 50,
            "cached_blocks": 2,
            "capacity_blocks": 1000,
            "indexed_blocks": 2,
            "dropped_blocks": 0,
            "routed": 1,
            "block_size": 4,
            "report_age_s": None,
            "kept": False,
        }


@pytest.mark.parametrize("path", ["/admin/fleet", "/admin/policy"])
@pytest.mark.parametrize(
    ("header", "status"), [(None, 401), ("Bearer wrong", 401), ("Bearer admin", 200)]
)
async def test_the_admin_key_is_asked_for(path, header, status):
    async with Rig(admin_key="admin", api_key="api") as rig:
        headers = {} if header is None else {"Authorization": header}
        assert (await rig.get(path, headers=headers))[0] == status
        assert (await rig.get(path, headers={"Authorization": "Bearer api"}))[0] == 401


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"X-Forwarded-For": "10.1.2.3"}, 403),
        ({"Forwarded": "for=10.1.2.3"}, 403),
        ({"Via": "1.1 proxy"}, 403),
        ({"X-Real-IP": "10.1.2.3"}, 403),
        ({"Origin": "http://elsewhere.example"}, 403),
        ({"Origin": "http://["}, 403),
        ({"Host": "rebound.example", "Origin": "http://rebound.example"}, 403),
        ({"Host": "rebound.example:8000"}, 403),
        ({"Host": "localhost:8000"}, 200),
        ({"Host": "[::1]:8000"}, 200),
        ({"Host": "this-machine"}, 200),
    ],
)
async def test_without_an_admin_key_only_this_machine_is_admitted(headers, status):
    async with Rig() as rig:
        got, _, body = await rig.get("/admin/fleet", headers=headers)
        assert got == status
        if status == 403:
            assert "gateway.admin_key" in body["error"]["message"]
        own = {"Origin": rig.gateway.url}
        assert (await rig.get("/admin/fleet", headers=own))[0] == 200


@pytest.mark.parametrize(
    ("remote", "local"),
    [("127.0.0.1", True), ("127.8.0.1", True), ("::1", True), ("10.0.0.1", False), ("", False)],
)
def test_who_is_on_this_machine(remote, local):
    assert edge._is_local(remote) is local
