"""Gateways of several processes: whichever is asked answers for all.

Here the processes are gateways in one process, on a port of their own each, so that a test says
which one is asked. tests/ops/test_gateway_processes.py has real processes.
"""

import asyncio
import contextlib

import pytest
from prometheus_client.parser import text_string_to_metric_families

from cluster.protocol import HEADER_EXPLAIN, HEADER_REQUEST_ID, HEADER_WORKER, RequestError
from router.admin import Admin
from router.combined import labelled
from router.siblings import Siblings
from tests.router.support import Rig, card
from tests.router.test_worker_admin import changing


@contextlib.asynccontextmanager
async def processes(directory, count=2, **gateway):
    """Gateways that know each other, all with the two workers of the first."""
    async with contextlib.AsyncExitStack() as stack:
        rigs = []
        for number in range(count):
            siblings = Siblings(directory, number, count)
            rigs.append(Rig(2 if not number else 0, siblings=siblings, **gateway))
            await stack.enter_async_context(rigs[number])
            for worker in rigs[0].workers:
                rigs[number].fleet.on_card(worker.card())
        yield rigs


async def test_one_is_ready_when_all_are(tmp_path):
    async with processes(tmp_path) as rigs:
        for rig in rigs:
            status, _, body = await rig.get("/ready")
            assert (status, body["workers_ready"]) == (200, 2)
        rigs[1].follower.status.stale = True
        rigs[1].follower.status.reason = "no Redis"
        status, _, body = await rigs[0].get("/ready")
        assert (status, body["ready"], body["reasons"]) == (200, True, [])
        assert body["degraded"] == ["process 1: the index is stale: no Redis"]
        rigs[1].follower.status.connected = False
        status, _, body = await rigs[0].get("/ready")
        assert (status, body["ready"]) == (503, False)
        assert body["reasons"] == ["process 1: the index is stale: no Redis"]
        status, _, body = await rigs[1].get("/ready")
        assert (status, body["reasons"]) == (503, ["the index is stale: no Redis"])


async def test_a_process_that_does_not_answer_makes_the_gateway_unready(tmp_path):
    async with Rig(siblings=Siblings(tmp_path, 0, 2)) as rig:
        status, _, body = await rig.get("/ready")
        assert (status, body["error"]["code"]) == (503, "process_unreachable")
        assert "process 1 of this gateway does not answer" in body["error"]["message"]
        assert (await rig.get("/health"))[0] == 200


async def test_a_process_that_is_too_slow_is_named_with_the_time(tmp_path):
    siblings = Siblings(tmp_path, 0, 2)

    async def silent(reader, writer):
        with contextlib.suppress(ConnectionError):
            await reader.read()
        writer.close()

    async with await asyncio.start_unix_server(silent, tmp_path / "1"):
        with pytest.raises(RequestError, match=r"does not answer: no response within 0\.05 s"):
            await siblings.ask(1, "GET", "/process/ready", timeout_s=0.05)
        await siblings.close()


async def test_a_policy_reaches_every_process_and_a_wrong_one_none(tmp_path):
    async with processes(tmp_path, 3) as rigs:
        status, _, body = await rigs[2].post("/admin/policy", {"policy": "round_robin"})
        assert (status, body["policy"]) == (200, "round_robin")
        names = [(await rig.get("/admin/policy"))[2]["policy"] for rig in rigs]
        assert names == ["round_robin"] * 3
        status, _, body = await rigs[0].post("/admin/policy", {"policy": "best"})
        assert (status, body["error"]["code"]) == (400, "unknown_policy")
        assert {rig.gateway.dispatcher.policy.name for rig in rigs} == {"round_robin"}


async def test_a_decision_is_found_wherever_it_was_taken(tmp_path):
    async with processes(tmp_path) as rigs:
        _, headers, _ = await rigs[1].complete()
        _, explained, _ = await rigs[1].post(
            "/v1/completions", {"model": "tiny", "prompt": "x"}, headers={HEADER_EXPLAIN: "1"}
        )
        for rig in rigs:
            path = f"/admin/decisions/{explained[HEADER_REQUEST_ID]}"
            status, _, body = await rig.get(path)
            assert (status, body["chosen"]) == (200, explained[HEADER_WORKER])
            status, _, body = await rig.get(f"/admin/decisions/{headers[HEADER_REQUEST_ID]}")
            assert (status, body["error"]["code"]) == (404, "decision_not_kept")


async def test_requests_of_all_processes_are_counted_together(tmp_path):
    async with processes(tmp_path, policy="round_robin", shadow="least_requests") as rigs:
        for rig in (rigs[0], rigs[1], rigs[1]):
            await rig.complete()
        for rig in rigs:
            fleet = (await rig.get("/admin/fleet"))[2]
            assert fleet["requests_total"] == 3
            assert sum(worker["routed"] for worker in fleet["workers"]) == 3
            live, shadow = (await rig.get("/admin/shadow"))[2]["arms"]
            assert (live["policy"], shadow["policy"]) == ("live", "least_requests")
            assert live["requests"] == live["agreed"] == shadow["requests"] == 3
            assert sum(live["requests_to"].values()) == 3


async def test_one_scrape_has_the_metrics_of_every_process(tmp_path):
    async with processes(tmp_path) as rigs:
        for rig in (rigs[0], rigs[1], rigs[1]):
            await rig.complete()
        async with rigs[0].http.get("/metrics") as answer:
            assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
            text = await answer.text()
        families = list(text_string_to_metric_families(text))
        assert len({family.name for family in families}) == len(families)
        samples = [sample for family in families for sample in family.samples]
        assert {sample.labels["process"] for sample in samples} == {"0", "1"}
        (name,) = {s.name for s in samples if s.labels.get("endpoint") == "/v1/completions"}
        answered = {
            s.labels["process"]: s.value
            for s in samples
            if s.name == name and s.labels["endpoint"] == "/v1/completions"
        }
        assert answered == {"0": 1, "1": 2}


def test_a_label_changes_nothing_else_of_a_metric():
    text = (
        b'# HELP a_total With "quotes".\n# TYPE a_total counter\na_total{b="x\\"y"} 1.0\n'
        b"# HELP c_seconds Took.\n# TYPE c_seconds histogram\n"
        b'c_seconds_bucket{le="0.1"} 2.0\nc_seconds_bucket{le="+Inf"} 3.0\n'
        b"c_seconds_count 3.0\nc_seconds_sum 0.5\n"
    )
    lines = labelled({1: text, 0: text}).decode().splitlines()
    assert lines[:4] == [
        '# HELP a_total With "quotes".',
        "# TYPE a_total counter",
        'a_total{b="x\\"y",process="0"} 1.0',
        'a_total{b="x\\"y",process="1"} 1.0',
    ]
    assert lines.count("# TYPE c_seconds histogram") == 1
    assert 'c_seconds_bucket{le="+Inf",process="1"} 3.0' in lines
    assert 'c_seconds_sum{process="0"} 0.5' in lines


async def test_a_flush_waits_for_the_index_of_every_process(tmp_path, monkeypatch):
    async with processes(tmp_path) as rigs:
        flushed = asyncio.Semaphore(0)
        for worker in rigs[0].workers:
            worker.on_flush = lambda: flushed.release() or 5
        waiting = asyncio.create_task(rigs[0].post("/admin/flush", {}))
        for _ in range(2):
            await asyncio.wait_for(flushed.acquire(), 10)
        asked = asyncio.Event()
        know = Admin._know

        async def noting(admin, epochs):
            if admin._fleet is rigs[1].fleet:
                asked.set()
            await know(admin, epochs)

        monkeypatch.setattr(Admin, "_know", noting)
        for worker in rigs[0].workers:
            rigs[0].fleet.on_card(worker.card(epoch=5))
        await asyncio.wait_for(asked.wait(), 10)
        assert not waiting.done()
        for worker in rigs[0].workers:
            rigs[1].fleet.on_card(worker.card(epoch=5))
        status, _, body = await asyncio.wait_for(waiting, 10)
        assert (status, body) == (200, {"workers": {"w0": 5, "w1": 5}})


async def test_two_changes_of_weights_never_run_at_once_whichever_process_is_asked(tmp_path):
    async with processes(tmp_path) as rigs:
        order, begun, go_on = [], asyncio.Event(), asyncio.Event()
        for worker in rigs[0].workers:
            change = changing(order, worker)

            async def slow(request, change=change):
                begun.set()
                await go_on.wait()
                return await change(request)

            worker.others["POST /admin/weights"] = slow
        first = asyncio.create_task(rigs[1].post("/admin/weights", {"model": "/m/1"}))
        await asyncio.wait_for(begun.wait(), 10)
        for rig in rigs:
            asking = rig.post("/admin/weights", {"model": "/m/2"})
            status, _, body = await asyncio.wait_for(asking, 10)
            assert status == 409
            assert "another change of weights is running" in body["error"]["message"]
        go_on.set()
        status, _, body = await first
        assert (status, [each["worker"] for each in body["workers"]]) == (200, ["w0", "w1"])
        assert order == [("w0", "/m/1", True), ("w1", "/m/1", True)]


async def test_a_flush_that_another_process_does_not_see_is_a_504(tmp_path, monkeypatch):
    async with processes(tmp_path) as rigs:
        for worker in rigs[0].workers:
            worker.on_flush = lambda: 1  # the first process knows this epoch already
        rigs[1].fleet.on_gone("w0", "it left")
        rigs[1].fleet.on_card(card("w0", epoch=0))
        monkeypatch.setattr("router.admin.FLUSH_TIMEOUT_S", 0.2)
        status, _, body = await rigs[0].post("/admin/flush", {})
        assert (status, body["error"]["code"]) == (504, "flush_timeout")
        assert body["error"]["message"].startswith("process 1 of this gateway: ")


async def test_what_processes_ask_each_other_is_no_clients_concern(tmp_path):
    async with processes(tmp_path, admin_key="k") as rigs:
        assert (await rigs[0].get("/process/admin/fleet"))[0] == 404
        assert (await rigs[0].get("/admin/fleet"))[0] == 401
        key = {"Authorization": "Bearer k"}
        assert (await rigs[0].get("/admin/fleet", headers=key))[0] == 200


async def test_the_last_process_leaves_no_sockets(tmp_path):
    directory = tmp_path / "sockets"
    directory.mkdir()
    async with processes(directory):
        assert len(list(directory.iterdir())) == 2
    assert not directory.exists()
