"""A full worker is no candidate; a request waits in order of arrival, or is told to come back."""

import asyncio
import json

import pytest

from cluster.protocol import Load
from tests.router.support import Rig, report

FULL = Load(running=3, free_blocks=0)
PROMPT = "0123456789ab"  # 12 tokens, 3 blocks of 4


def free(blocks, **more):
    return Load(running=3, free_blocks=blocks, **more)


async def waits(rig, count=1):
    """Until so many requests wait at the gateway, which is announced to nobody."""
    while rig.gateway.admission.waiting != count:  # noqa: ASYNC110
        await asyncio.sleep(0)


async def test_a_full_worker_is_no_candidate():
    async with Rig(workers=2) as rig:
        rig.fleet.on_report(report("w0", load=FULL))
        rig.fleet.on_report(report("w1", load=free(100, pending_prefill_tokens=10_000)))
        for _ in range(4):
            _, headers, _ = await rig.complete(PROMPT)
            assert headers["x-stemroute-worker"] == "w1"


async def test_a_worker_without_room_for_this_prompt_is_none_where_another_has_room():
    async with Rig(workers=2) as rig:
        rig.fleet.on_report(report("w0", load=free(2)))
        rig.fleet.on_report(report("w1", load=free(3, pending_prefill_tokens=10_000)))
        _, headers, _ = await rig.complete(PROMPT)
        assert headers["x-stemroute-worker"] == "w1"
        _, headers, _ = await rig.complete("short")
        assert headers["x-stemroute-worker"] == "w0"


async def test_without_a_queue_a_request_waits_at_a_worker_while_one_has_any_block():
    async with Rig() as rig:
        rig.fleet.on_report(report("w0", load=free(1)))
        assert (await rig.complete(PROMPT))[0] == 200


async def test_where_all_are_full_the_client_is_told_when_to_come_back():
    async with Rig(workers=2) as rig:
        for worker in ("w0", "w1"):
            rig.fleet.on_report(report(worker, load=FULL))
        status, headers, body = await rig.complete(PROMPT)
        assert (status, headers["Retry-After"]) == (429, "1")
        assert body["error"]["code"] == "no_room"
        assert "no worker of the model `tiny` has a free KV block" in body["error"]["message"]
        rig.fleet.on_report(report("w1", load=free(50)))
        assert (await rig.complete(PROMPT))[0] == 200


async def test_draining_workers_are_none_and_a_full_one_does_not_take_their_place():
    async with Rig(workers=2) as rig:
        rig.fleet.on_report(report("w0", state="draining"))
        rig.fleet.on_report(report("w1", load=FULL))
        assert (await rig.complete(PROMPT))[0] == 429


async def test_the_queue_releases_in_order_of_arrival_as_room_comes():
    async with Rig(queue=10) as rig:
        await rig.complete(PROMPT)  # the tokenizer is there from now on
        rig.fleet.on_report(report("w0", load=FULL))
        order = []

        async def ask(number):
            status, _, _ = await rig.complete(f"{number}123456789ab")
            order.append((number, status))

        tasks = []
        for number in range(4):
            tasks.append(asyncio.create_task(ask(number)))
            await waits(rig, number + 1)
        arrived = len(rig.workers[0].requests)
        block = asyncio.Event()
        answer = rig.workers[0].answer

        async def held(request, generate):
            await block.wait()
            return await answer(request, generate)

        rig.workers[0].answer = held
        # room for two prompts of 3 blocks, not for three: what is on its way counts
        rig.fleet.on_report(report("w0", load=free(8)))
        await waits(rig, 2)
        for _ in range(arrived + 2):
            await rig.arrivals.get()
        sent = [generate.token_ids for generate in rig.workers[0].requests[arrived:]]
        assert sorted(token_ids[0] for token_ids in sent) == sorted(_first_tokens("01"))
        assert rig.gateway.admission.waiting == 2
        # nobody overtakes, though a short one would fit
        late = asyncio.create_task(rig.complete("x"))
        await waits(rig, 3)
        block.set()
        rig.fleet.on_report(report("w0", load=free(500)))
        await asyncio.gather(*tasks)
        assert (await late)[0] == 200
        assert {status for _, status in order} == {200}
        assert sorted(number for number, _ in order[:2]) == [0, 1]
        assert rig.gateway.admission.waiting == 0


def _first_tokens(characters):
    from tests.router.support import TOKENIZER

    vocabulary = json.loads(TOKENIZER)["model"]["vocab"]
    return [vocabulary[character] for character in characters]


async def test_the_end_of_a_request_makes_room_without_a_report():
    async with Rig(queue=10) as rig:
        await rig.complete(PROMPT)
        block = asyncio.Event()
        answer = rig.workers[0].answer

        async def held(request, generate):
            await block.wait()
            return await answer(request, generate)

        rig.workers[0].answer = held
        rig.fleet.on_report(report("w0", load=free(4)))
        first = asyncio.create_task(rig.complete("abcdefghijkl"))
        await rig.workers[0].got_request.wait()
        second = asyncio.create_task(rig.complete("mnopqrstuvwx"))
        await waits(rig)
        block.set()
        assert [(await task)[0] for task in (first, second)] == [200, 200]


async def test_the_queue_is_bounded():
    async with Rig(queue=1) as rig:
        await rig.complete(PROMPT)
        rig.fleet.on_report(report("w0", load=FULL))
        first = asyncio.create_task(rig.complete("abcdefghijkl"))
        await waits(rig)
        status, headers, body = await rig.complete("mnopqrstuvwx")
        assert (status, headers["Retry-After"], body["error"]["code"]) == (429, "1", "no_room")
        assert "1 requests wait already" in body["error"]["message"]
        async with rig.http.get("/metrics") as metrics:
            assert "stemroute_gateway_queued_requests 1.0" in await metrics.text()
        rig.fleet.on_report(report("w0", load=free(100)))
        assert (await first)[0] == 200


async def test_a_client_that_goes_away_leaves_the_queue_and_those_behind_it_move_up():
    async with Rig(queue=5) as rig:
        await rig.complete(PROMPT)
        rig.fleet.on_report(report("w0", load=free(2)))
        first = asyncio.create_task(rig.complete("abcdefghijkl"))
        await waits(rig)
        second = asyncio.create_task(rig.complete("abcd"))
        await waits(rig, 2)
        first.cancel()
        assert (await second)[0] == 200
        assert rig.gateway.admission.waiting == 0


async def test_a_request_waits_no_longer_than_it_may():
    async with Rig(queue=5, queue_timeout_s=0.01) as rig:
        await rig.complete(PROMPT)
        rig.fleet.on_report(report("w0", load=FULL))
        status, _, body = await rig.complete(PROMPT)
        assert (status, body["error"]["code"]) == (429, "no_room")
        assert "within 0.01 s" in body["error"]["message"]
        assert rig.gateway.admission.waiting == 0


async def test_a_request_that_is_given_up_as_it_gets_its_place_leaves_no_booking():
    async with Rig(queue=5) as rig:
        await rig.complete(PROMPT)
        rig.fleet.on_report(report("w0", load=FULL))
        asked = asyncio.create_task(rig.gateway.admission.place("tiny", await _prompt(rig), "r1"))
        await waits(rig)
        rig.fleet.on_report(report("w0", load=free(100)))
        rig.gateway.admission._look()  # placed, but not yet awake
        assert rig.fleet.in_flight == 1
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        assert rig.fleet.in_flight == 0


async def _prompt(rig):
    from router.openai_api import parse_completion

    body = json.dumps({"model": "tiny", "prompt": PROMPT}).encode()
    return (await rig.gateway._prompt(parse_completion(body)))[0]


async def test_a_worker_that_becomes_ready_serves_who_waits():
    async with Rig(workers=2, queue=5) as rig:
        rig.fleet.on_report(report("w1", state="draining"))
        rig.fleet.on_report(report("w0", load=FULL))
        asked = asyncio.create_task(rig.complete(PROMPT))
        await waits(rig)
        rig.fleet.on_report(report("w1", state="ready", load=free(100)))
        assert (await asked)[1]["x-stemroute-worker"] == "w1"
