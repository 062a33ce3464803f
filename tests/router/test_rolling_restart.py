"""While no worker of a model is ready, requests wait in the queue, where there is one."""

import asyncio

import msgspec
import pytest

from cluster.blocks import unpack_tokens
from tests.router.support import NAMESPACE, Rig, card, model_info, report
from tests.router.test_admission import FULL, PROMPT, free, waits


def drain(rig):
    for worker in rig.workers:
        rig.fleet.on_report(report(worker.name, state="draining"))


def ready(rig, worker="w0", load=None):
    rig.fleet.on_report(report(worker, state="ready", load=load))


async def test_without_a_queue_the_answer_comes_at_once():
    async with Rig(workers=2) as rig:
        drain(rig)
        status, headers, body = await rig.complete(PROMPT)
        assert (status, headers["Retry-After"]) == (503, "1")
        assert body["error"]["code"] == "no_ready_worker"


@pytest.mark.parametrize("state", ["draining", "starting", "failed"])
async def test_a_request_waits_until_a_worker_is_ready(state):
    async with Rig(workers=2, queue=5) as rig:
        for worker in ("w0", "w1"):
            rig.fleet.on_report(report(worker, state=state))
        asked = asyncio.create_task(rig.complete(PROMPT))
        await waits(rig)
        rig.fleet.on_report(report("w0", state=state))
        ready(rig, "w1")
        status, headers, _ = await asked
        assert (status, headers["x-stemroute-worker"]) == (200, "w1")
        assert rig.gateway.admission.waiting == 0


async def test_they_wait_for_the_next_worker_too_where_the_last_has_left():
    async with Rig(queue=5) as rig:
        rig.fleet.on_gone("w0", "it has left")
        asked = asyncio.create_task(rig.complete(PROMPT))
        await waits(rig)
        rig.fleet.on_card(card("its-successor", address=rig.workers[0].address))
        assert (await asked)[0] == 200


async def test_a_worker_out_of_reach_is_waited_for_too():
    async with Rig(queue=5) as rig:
        rig.fleet.trust.suspect("w0", "it refused a connection")
        asked = asyncio.create_task(rig.complete(PROMPT))
        await waits(rig)
        ready(rig)
        assert (await asked)[0] == 200


async def test_a_worker_that_is_tried_again_without_a_report_ends_the_wait():
    async with Rig(queue=5) as rig:
        now = rig.fleet.clock()
        rig.fleet.clock = lambda: now
        rig.fleet.trust._suspects._for_s = 0.01
        rig.fleet.trust.suspect("w0", "it refused a connection")
        asked = asyncio.create_task(rig.complete(PROMPT))
        while rig.gateway.admission._looking_later is None:  # noqa: ASYNC110
            await asyncio.sleep(0)
        rig.fleet.clock = lambda: now + 0.01
        assert (await asked)[0] == 200


async def test_they_are_placed_in_order_of_arrival_and_nobody_overtakes(monkeypatch):
    async with Rig(queue=10) as rig:
        drain(rig)
        tokenise, place = rig.gateway._tokenization.prompt, rig.gateway.dispatcher.place
        tokenising, go_on, names, placed = asyncio.Event(), asyncio.Event(), {}, []

        async def tokenised(asked, *rest):
            if asked.text.startswith("0"):  # the first is the last to be tokenised
                tokenising.set()
                await go_on.wait()
            prompt = await tokenise(asked, *rest)
            names[prompt.token_ids] = asked.text[0]
            return prompt

        def noted(model, prompt, request_id, excluded=(), **bounds):
            placed.append(names[prompt.token_ids])
            return place(model, prompt, request_id, excluded, **bounds)

        monkeypatch.setattr(rig.gateway._tokenization, "prompt", tokenised)
        monkeypatch.setattr(rig.gateway.dispatcher, "place", noted)
        tasks = []
        for number in range(4):
            tasks.append(asyncio.create_task(rig.complete(f"{number}123456789ab")))
            await waits(rig, number + 1)
        ready(rig)
        await tokenising.wait()
        tasks.append(asyncio.create_task(rig.complete("4 came when a worker was ready again")))
        await waits(rig, 5)
        assert placed == []
        go_on.set()
        assert [(await task)[0] for task in tasks] == [200] * 5
        assert placed == ["0", "1", "2", "3", "4"]


async def test_time_runs_from_the_arrival_and_ends_with_503():
    async with Rig(queue=5, queue_timeout_s=0.01) as rig:
        drain(rig)
        status, headers, body = await rig.complete(PROMPT)
        assert (status, headers["Retry-After"]) == (503, "1")
        assert body["error"]["code"] == "no_ready_worker"
        assert "became ready within 0.01 s" in body["error"]["message"]
        assert rig.gateway.admission.waiting == 0


async def test_one_that_waited_for_room_is_told_that_no_worker_is_ready_any_more(monkeypatch):
    async with Rig(queue=5, queue_timeout_s=30.0) as rig:
        await rig.complete(PROMPT)
        rig.fleet.on_report(report("w0", load=FULL))
        asked = asyncio.create_task(rig.complete(PROMPT))
        await waits(rig)
        drain(rig)
        loop = asyncio.get_running_loop()
        time = loop.time
        monkeypatch.setattr(loop, "time", lambda: time() + 30.0)
        status, _, body = await asked
        assert (status, body["error"]["code"]) == (503, "no_ready_worker")


async def test_the_queue_is_bounded_for_them_too():
    async with Rig(queue=1) as rig:
        drain(rig)
        first = asyncio.create_task(rig.complete(PROMPT))
        await waits(rig)
        status, headers, body = await rig.complete(PROMPT)
        assert (status, headers["Retry-After"]) == (503, "1")
        assert body["error"]["code"] == "no_ready_worker"
        assert "1 requests are waiting already" in body["error"]["message"]
        ready(rig)
        assert (await first)[0] == 200


async def test_a_client_that_goes_away_leaves_the_queue():
    async with Rig(queue=2) as rig:
        drain(rig)
        first = asyncio.create_task(rig.complete("abcdefghijkl"))
        await waits(rig)
        second = asyncio.create_task(rig.complete("mnopqrstuvwx"))
        await waits(rig, 2)
        first.cancel()
        await waits(rig, 1)
        ready(rig)
        assert (await second)[0] == 200
        assert len(rig.workers[0].requests) == 1


async def test_one_that_cannot_be_served_makes_way_for_those_behind_it():
    async with Rig(queue=5) as rig:
        drain(rig)
        asked = []
        for prompt in ("x" * 200, PROMPT):  # the first is longer than the context
            asked.append(asyncio.create_task(rig.complete(prompt)))
            await waits(rig, len(asked))
        ready(rig)
        assert [(await task)[0] for task in asked] == [400, 200]
        assert rig.gateway.admission.waiting == 0


async def test_one_that_has_no_room_when_its_worker_is_ready_waits_on():
    async with Rig(queue=5) as rig:
        drain(rig)
        asked = asyncio.create_task(rig.complete(PROMPT))
        await waits(rig)
        ready(rig, load=FULL)
        (ticket,) = rig.gateway.admission._queues["tiny"]
        while ticket._prompt is None:  # noqa: ASYNC110
            await asyncio.sleep(0)
        drain(rig)
        ready(rig, load=free(100))
        assert (await asked)[0] == 200


async def test_what_was_never_seen_is_refused_at_once():
    async with Rig(queue=5) as rig:
        drain(rig)
        status, _, body = await rig.post("/v1/completions", {"model": "none", "prompt": PROMPT})
        assert (status, body["error"]["code"]) == (404, "model_not_found")
        assert rig.gateway.admission.waiting == 0
    async with Rig(workers=0, queue=5) as rig:
        status, _, body = await rig.complete(PROMPT)
        assert (status, body["error"]["code"]) == (503, "no_ready_worker")


async def test_a_model_that_left_longer_ago_than_anybody_waits_is_none_any_more():
    async with Rig(workers=2, queue=5, queue_timeout_s=30.0) as rig:
        rig.fleet.on_card(rig.workers[1].card(model="other"))
        rig.fleet.on_gone("w0", "it has left")
        left_at = rig.fleet.groups._left_at["tiny"]
        rig.fleet.groups._clock = lambda: left_at + 30.0
        assert (await rig.complete(PROMPT))[0] == 404


async def test_explaining_and_listing_do_not_wait():
    async with Rig(queue=5) as rig:
        drain(rig)
        body = {"model": "tiny", "prompt": PROMPT}
        assert (await rig.post("/admin/explain", body))[0] == 503
        assert (await rig.get("/v1/models/tiny"))[0] == 503


async def test_one_hashed_for_workers_that_others_have_replaced_is_hashed_anew_in_its_place():
    async with Rig(queue=5) as rig:
        await rig.complete(PROMPT)  # the tokenizer is there from now on
        rig.fleet.on_report(report("w0", load=FULL))
        tasks = []
        for number in range(2):
            tasks.append(asyncio.create_task(rig.complete(f"{number}123456789ab")))
            await waits(rig, number + 1)
        rig.fleet.on_gone("w0", "it has left")
        other = msgspec.structs.replace(NAMESPACE, weights="w2")
        rig.workers[0].info = model_info(namespace=other)
        rig.fleet.on_card(card("w1", address=rig.workers[0].address, namespace=other))
        assert [(await task)[0] for task in tasks] == [200, 200]
        first, second = (unpack_tokens(one.token_ids)[0] for one in rig.workers[0].requests[1:])
        assert first < second, "in order of arrival"
        assert rig.gateway.admission.waiting == 0
