"""Whose fault a failure is: a request that fails everywhere harms no third worker."""

from __future__ import annotations

import pytest
from aiohttp import web

from cluster.protocol import HEADER_WORKER
from tests.router.support import FakeWorker, Rig, card, report

BAD = "the bad prompt"


def fails_on(worker: FakeWorker, status: int | None) -> None:
    """The worker fails each request as long as `BAD`, by a status or by ending the connection."""
    well, ill = worker.say("well"), worker.refuse(status or 0, "it cannot be computed")

    async def answer(request: web.Request, generate) -> web.StreamResponse:
        if len(generate.token_ids) // 4 != len(BAD):
            return await well(request, generate)
        return await (ill if status else worker.drop())(request, generate)

    worker.answer = answer


def bad_requests(rig: Rig) -> int:
    sent = [request for worker in rig.workers for request in worker.requests]
    return sum(len(request.token_ids) // 4 == len(BAD) for request in sent)


@pytest.mark.parametrize("status", [500, None], ids=["error", "connection ends"])
async def test_a_request_that_fails_alike_at_two_workers_is_not_carried_to_a_third(status):
    async with Rig(workers=4, attempts=4, policy="round_robin") as rig:
        for worker in rig.workers:
            fails_on(worker, status)
        for number in range(1, 9):
            got, _, body = await rig.complete(BAD)
            assert got == (status or 502)
            assert "failed in the same way at w" in body["error"]["message"]
            assert bad_requests(rig) == 2 * number
        # nor is it held against them
        assert [member.left_out for member in rig.fleet.members()] == [""] * 4
        assert (await rig.complete("another"))[0] == 200


async def test_workers_that_fail_everything_are_not_the_requests_fault():
    async with Rig(workers=4, attempts=2, policy="round_robin") as rig:
        for worker in rig.workers[:3]:
            worker.answer = worker.refuse(500)
        for number in range(8):
            got, headers, _ = await rig.complete(f"number {number}")
            assert (got, headers[HEADER_WORKER]) == (200, "w3")
        tried = [len(worker.requests) for worker in rig.workers[:3]]
        assert max(tried) <= 6, tried
        _, _, ready = await rig.get("/ready")
        assert ready["ready"]
        assert "avoided (it failed" in ready["degraded"][0]


async def test_where_all_workers_fail_each_is_tried_and_the_last_error_counts():
    async with Rig(workers=4, attempts=3) as rig:
        for worker in rig.workers:
            worker.answer = worker.refuse(500, "it is broken")
        got, headers, body = await rig.complete()
        assert (got, body["error"]["message"]) == (500, "it is broken")
        assert "Retry-After" not in headers
        assert all(worker.requests for worker in rig.workers)
        _, _, ready = await rig.get("/ready")
        assert "because all others fail as well" in " ".join(ready["degraded"])
        for worker in rig.workers:
            worker.answer = worker.say("well again")
        assert (await rig.complete())[0] == 200


async def test_an_avoided_worker_is_named_in_status_explain_and_metrics():
    async with Rig(workers=2, policy="round_robin") as rig:
        rig.workers[0].answer = rig.workers[0].refuse(500)
        for number in range(8):
            assert (await rig.complete(f"{number}"))[0] == 200
        why = "it failed 4 of its last 4 requests"
        _, _, fleet = await rig.get("/admin/fleet")
        assert {w["worker"]: w["left_out"] for w in fleet["workers"]} == {"w0": why, "w1": ""}
        _, _, told = await rig.post("/admin/explain", {"model": "tiny", "prompt": "x"})
        assert {w["worker"]: w["left_out"] for w in told["workers"]} == {"w0": why, "w1": ""}
        async with rig.http.get("/metrics") as answer:
            assert "stemroute_gateway_avoided_workers 1.0" in await answer.text()


@pytest.mark.parametrize("status", [400, 429])
async def test_refusals_are_no_failures(status):
    async with Rig(workers=2, attempts=2, policy="round_robin") as rig:
        for worker in rig.workers:
            worker.answer = worker.refuse(status)
        for number in range(8):
            assert (await rig.complete(f"{number}"))[0] == status
        assert not rig.fleet.trust.failures
        rig.fleet.on_card(card("w0", epoch=2, address=rig.workers[0].address))
        rig.fleet.on_report(report("w1"))
