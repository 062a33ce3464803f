"""More is asked than the workers can serve: refused at once, with a time to come back; urgent and
timed requests."""

import asyncio

import msgspec
import pytest

from cluster.protocol import HEADER_TIMEOUT, Load
from router.waits import LONGEST_RETRY_S
from tests.router.support import Rig, report
from tests.router.test_admission import FULL, PROMPT, waits


def waiting(count, interval_s=1.0, **more):
    """A worker with a full batch, whose waiting requests start once in `interval_s`."""
    fields = {"running": 8, "waiting": count, "free_blocks": 500, "start_interval_s": interval_s}
    return Load(**fields | more)


async def refused(rig, headers=None, **fields):
    status, answer_headers, body = await rig.complete(PROMPT, headers=headers, **fields)
    assert status == 429
    return body["error"], int(answer_headers["Retry-After"])


async def test_a_request_that_would_wait_too_long_is_refused_with_a_time_to_come_back():
    async with Rig() as rig:
        rig.fleet.on_report(report("w0", load=waiting(30)))
        assert (await rig.complete(PROMPT))[0] == 200
        rig.fleet.on_report(report("w0", load=waiting(35)))
        error, after_s = await refused(rig)
        assert error["code"] == "overloaded"
        assert "would wait about 35.0 s before it starts, 30.0 s are accepted" in error["message"]
        assert after_s == 5
        assert f"retry in {after_s} s" in error["message"]
        assert rig.gateway.admission.refused == {"overloaded": 1}
        assert rig.fleet.in_flight == 0


async def test_what_is_refused_is_not_tokenised(monkeypatch):
    async with Rig() as rig:
        await rig.complete(PROMPT)
        rig.fleet.on_report(report("w0", load=waiting(100)))
        monkeypatch.setattr(rig.gateway._tokenization, "prompt", None)
        await refused(rig)


async def test_refused_requests_get_turns_one_after_the_other():
    async with Rig() as rig:
        rig.fleet.on_report(report("w0", load=waiting(62, 0.5)))
        times = [(await refused(rig))[1] for _ in range(6)]
        assert times == sorted(times)
        assert times[0] == 1
        assert times[-1] in (3, 4)
        rig.fleet.on_report(report("w0", load=waiting(10**6)))
        assert (await refused(rig))[1] == LONGEST_RETRY_S


async def test_the_limit_is_a_setting_and_0_is_none():
    async with Rig(max_wait_s=5.0) as rig:
        rig.fleet.on_report(report("w0", load=waiting(6)))
        await refused(rig)
    async with Rig(max_wait_s=0.0) as rig:
        rig.fleet.on_report(report("w0", load=waiting(10**6)))
        assert (await rig.complete(PROMPT))[0] == 200


async def test_pending_prefill_counts_by_its_measured_speed():
    load = Load(running=1, free_blocks=500, pending_prefill_tokens=50_000, prefill_s_per_token=1e-3)
    async with Rig() as rig:
        rig.fleet.on_report(report("w0", load=load))
        error, _ = await refused(rig)
        assert "about 50.0 s" in error["message"]


async def test_one_worker_in_time_is_enough_and_gets_the_request():
    async with Rig(workers=3, policy="random") as rig:
        for worker, count in (("w0", 100), ("w1", 3), ("w2", 31)):
            rig.fleet.on_report(report(worker, load=waiting(count)))
        for _ in range(6):
            _, headers, _ = await rig.complete(PROMPT)
            assert headers["x-stemroute-worker"] == "w1"
        _, headers, _ = await rig.complete(PROMPT, headers={"x-stemroute-explain": "1"})
        path = f"/admin/decisions/{headers['x-stemroute-request-id']}"
        _, _, explained = await rig.get(path)
        rows = {row["worker"]: row for row in explained["workers"]}
        assert rows["w0"]["left_out"] == "its expected wait of 100.0 s is too long"
        assert rows["w0"]["wait_s"] == 100.0


async def test_a_burst_fills_the_free_places_of_a_batch_without_a_wait():
    async with Rig() as rig:
        idle = waiting(0, 10.0)
        rig.fleet.on_report(report("w0", load=msgspec.structs.replace(idle, running=2)))
        member = rig.fleet.members()[0]
        bookings = []
        for number in range(6):
            assert rig.fleet.wait_of(member) == 0.0
            bookings.append(rig.fleet.book(member.slot, f"r{number}", [], 4, 0))
        bookings.append(rig.fleet.book(member.slot, "r6", [], 4, 0))
        assert rig.fleet.wait_of(member) == 10.0
        rig.fleet.check()
        for booking in bookings:
            rig.fleet.release(booking)
        assert rig.fleet.wait_of(member) == 0.0


async def test_a_request_with_a_lower_priority_number_is_not_kept_out_by_the_others():
    async with Rig() as rig:
        rig.fleet.on_report(report("w0", load=waiting(100)))
        await refused(rig)
        await refused(rig, priority=1)
        assert (await rig.complete(PROMPT, priority=-1))[0] == 200
        assert rig.workers[0].requests[-1].priority == -1
        mixed = waiting(100, waiting_by_priority=((-5, 40), (0, 60)))
        rig.fleet.on_report(report("w0", load=mixed))
        await refused(rig, priority=-1)
        assert (await rig.complete(PROMPT, priority=-6))[0] == 200


@pytest.mark.parametrize("priority", [10**6 + 1, -(10**9)])
async def test_a_priority_out_of_bounds_is_refused(priority):
    async with Rig() as rig:
        status, _, body = await rig.complete(PROMPT, priority=priority)
        assert (status, body["error"]["param"]) == (400, "priority")


async def test_the_queue_is_in_order_of_priority():
    async with Rig(queue=10) as rig:
        await rig.complete(PROMPT)
        rig.fleet.on_report(report("w0", load=FULL))
        order, tasks = [], []

        async def ask(priority):
            await rig.complete(f"{priority}".rjust(12), priority=priority)

        for number, priority in enumerate((0, 3, -1, 0, -1)):
            tasks.append(asyncio.create_task(ask(priority)))
            await waits(rig, number + 1)
        arrived = len(rig.workers[0].requests)
        for room in range(5):
            rig.fleet.on_report(report("w0", load=Load(running=3, free_blocks=3)))
            await waits(rig, 4 - room)
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            tasks = [task for task in tasks if not task.done()]
        order = [generate.priority for generate in rig.workers[0].requests[arrived:]]
        assert order == [-1, -1, 0, 0, 3]


async def test_with_a_queue_those_ahead_in_it_count():
    async with Rig(queue=10, max_wait_s=2.5) as rig:
        await rig.complete(PROMPT)
        rig.fleet.on_report(report("w0", load=Load(running=3, free_blocks=0, start_interval_s=1.0)))
        tasks = []
        for number in range(3):
            tasks.append(asyncio.create_task(rig.complete(f"{number}23456789abc")))
            await waits(rig, number + 1)
        error, after_s = await refused(rig)
        assert (error["code"], after_s) == ("overloaded", 1)
        assert "about 3.0 s" in error["message"]
        urgent = asyncio.create_task(rig.complete(PROMPT, priority=-1))
        await waits(rig, 4)
        rig.fleet.on_report(report("w0", load=Load(running=3, free_blocks=500)))
        assert [(await task)[0] for task in (*tasks, urgent)] == [200] * 4


@pytest.mark.parametrize("text", ["", "0", "1.5", "-1", "1e3", "soon", "1" * 11, "²"])
async def test_a_timeout_that_is_no_number_of_milliseconds_is_refused(text):
    async with Rig() as rig:
        status, _, body = await rig.complete(PROMPT, headers={HEADER_TIMEOUT: text})
        assert status == 400
        assert HEADER_TIMEOUT in body["error"]["message"]


async def test_a_deadline_that_cannot_be_met_is_refused_at_once():
    async with Rig() as rig:
        rig.fleet.on_report(report("w0", load=waiting(7)))
        assert (await rig.complete(PROMPT, headers={HEADER_TIMEOUT: "60000"}))[0] == 200
        error, after_s = await refused(rig, {HEADER_TIMEOUT: "5000"})
        assert error["code"] == "deadline_unreachable"
        assert "the first token is expected in 7.00 s" in error["message"]
        assert after_s in (2, 3)
        assert rig.gateway.admission.refused == {"deadline_unreachable": 1}


async def test_a_prompt_that_alone_takes_longer_need_not_come_back():
    async with Rig() as rig:
        slow = Load(running=1, free_blocks=500, prefill_s_per_token=1.0)
        rig.fleet.on_report(report("w0", load=slow))
        status, _, body = await rig.complete(PROMPT, headers={HEADER_TIMEOUT: "5000"})
        assert (status, body["error"]["code"]) == (400, "deadline_too_short")
        assert "the prompt alone takes 12.00 s" in body["error"]["message"]


async def test_a_worker_that_can_meet_the_deadline_is_preferred():
    async with Rig(workers=2, policy="random") as rig:
        rig.fleet.on_report(report("w0", load=waiting(7)))
        rig.fleet.on_report(report("w1", load=waiting(3)))
        for _ in range(5):
            _, headers, _ = await rig.complete(PROMPT, headers={HEADER_TIMEOUT: "5000"})
            assert headers["x-stemroute-worker"] == "w1"


@pytest.mark.parametrize("queue", [0, 5])
async def test_a_request_whose_time_is_up_ends_with_504_and_is_cancelled(queue):
    async with Rig(queue=queue) as rig:
        await rig.complete(PROMPT)
        worker = rig.workers[0]

        async def never(request, generate):
            await asyncio.Event().wait()

        worker.answer = never
        if queue:
            rig.fleet.on_report(report("w0", load=FULL))
        status, _, body = await rig.complete(PROMPT, headers={HEADER_TIMEOUT: "150"})
        assert (status, body["error"]["code"]) == (504, "deadline_exceeded")
        if not queue:
            await worker.cancelled.wait()
        assert rig.fleet.in_flight == rig.gateway.admission.waiting == 0
        assert not rig.fleet.trust.failures


async def test_a_stream_whose_time_is_up_ends_with_an_error_event():
    async with Rig() as rig:
        rig.workers[0].answer = rig.workers[0].begin()
        body = {"model": "tiny", "prompt": PROMPT, "stream": True}
        headers = {HEADER_TIMEOUT: "300"}
        async with rig.http.post("/v1/completions", json=body, headers=headers) as answer:
            assert answer.status == 200
            text = await answer.text()
        assert "first" in text
        assert '"code":"deadline_exceeded"' in text.replace(" ", "")
        await rig.workers[0].cancelled.wait()
