"""The loop that owns a request: what each of its branches does, and what it leaves behind."""

import asyncio
import json
import time

import msgspec
import pytest

from cluster.protocol import HEADER_EXPLAIN, HEADER_WORKER, RequestError
from router.http_messages import Request
from router.openai_api import parse_completion
from tests.router.support import NAMESPACE, Rig, count, model_info, report
from tests.router.test_admission import FULL, PROMPT, free, waits

OTHER = msgspec.structs.replace(NAMESPACE, weights="w2")


def served(rig: Rig, prompt: str = PROMPT, **headers: str) -> asyncio.Task:
    """A task that serves a completion as the HTTP server would, which cancels it likewise."""
    asked = parse_completion(json.dumps({"model": "tiny", "prompt": prompt}).encode())
    client = Request(None, headers, "POST", "/v1/completions", "1.1", True)
    return asyncio.create_task(rig.gateway._serving.serve(client, asked, 0.0))


def replace_all(rig: Rig, number: int) -> None:
    """Other workers than before, with other weights, have taken over."""
    for member in rig.fleet.members():
        rig.fleet.on_gone(member.card.worker, "it has left")
    worker = rig.workers[number]
    worker.info = model_info(namespace=OTHER)
    rig.fleet.on_card(worker.card(namespace=OTHER))


async def cancelled(task: asyncio.Task) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_one_that_is_cancelled_in_the_queue_leaves_it():
    async with Rig(queue=5) as rig:
        rig.fleet.on_report(report("w0", load=FULL))
        task = served(rig, **{HEADER_EXPLAIN: "1"})
        await waits(rig)
        await cancelled(task)
        assert rig.gateway.admission.waiting == 0
        rig.fleet.on_report(report("w0", load=free(100)))
        await asyncio.sleep(0)
        assert rig.fleet.in_flight == 0
        assert not rig.gateway.dispatcher.recent.wanted


async def test_one_that_is_cancelled_as_it_is_placed_leaves_no_booking():
    async with Rig(queue=5, shadow="round_robin") as rig:
        await rig.complete(PROMPT)
        rig.fleet.on_report(report("w0", load=FULL))
        task = served(rig)
        await waits(rig)
        rig.fleet.on_report(report("w0", load=free(100)))
        rig.gateway.admission._look()  # placed, but not yet awake
        assert rig.fleet.in_flight == 1
        await cancelled(task)
        assert rig.fleet.in_flight == 0
        assert len(rig.workers[0].requests) == 1, "it was never sent"
        arms = rig.gateway.dispatcher.shadows.arms
        assert [arm._at for arm in arms] == [{}, {}]


async def test_one_that_is_placed_in_the_turn_in_which_it_is_cancelled_leaves_no_booking():
    async with Rig(queue=5) as rig:
        await rig.complete(PROMPT)
        rig.fleet.on_report(report("w0", load=FULL))
        task = served(rig)
        await waits(rig)
        task.cancel()
        rig.fleet.on_report(report("w0", load=free(100)))
        rig.gateway.admission._look()
        assert rig.fleet.in_flight == 1
        with pytest.raises(asyncio.CancelledError):
            await task
        assert rig.fleet.in_flight == 0


async def test_shadows_and_metrics_are_told_when_a_response_begins():
    async with Rig(shadow="round_robin") as rig:
        (worker,) = rig.workers
        worker.answer = worker.begin()
        before = time.perf_counter()
        response = await rig.http.post(
            "/v1/completions", json={"model": "tiny", "prompt": PROMPT, "stream": True}
        )
        await response.content.readany()
        first_byte_s = rig.gateway.metrics.answers.first_byte.sum_s
        assert 0 < first_byte_s < time.perf_counter() - before
        ghosts = [
            ghost for arm in rig.gateway.dispatcher.shadows.arms for ghost in arm._at.values()
        ]
        assert [(ghost.computing, ghost.pending_tokens) for ghost in ghosts] == [(0, 0), (0, 0)]
        response.close()
        await asyncio.wait_for(worker.cancelled.wait(), 10)


async def test_one_that_is_cancelled_at_its_worker_leaves_nothing():
    async with Rig(shadow="round_robin") as rig:
        (worker,) = rig.workers
        worker.answer = worker.begin()
        task = served(rig, **{HEADER_EXPLAIN: "1"})
        await worker.got_request.wait()
        assert rig.fleet.in_flight == 1
        await cancelled(task)
        await asyncio.wait_for(worker.cancelled.wait(), 10)
        dispatcher = rig.gateway.dispatcher
        assert rig.fleet.in_flight == 0
        assert not dispatcher.recent.wanted
        assert [arm._at for arm in dispatcher.shadows.arms] == [{}, {}]


async def test_a_repeated_attempt_does_not_wait_for_room_elsewhere():
    async with Rig(workers=2, queue=5) as rig:
        bad, _ = rig.workers
        bad.answer = bad.refuse(503, "it is closing")
        rig.fleet.on_report(report("w1", load=FULL))
        status, headers, _ = await rig.complete(PROMPT)
        assert (status, headers[HEADER_WORKER]) == (200, "w1")
        assert rig.gateway.admission.waiting == 0


async def test_a_repeated_attempt_does_not_wait_for_a_worker_that_is_ready():
    async with Rig(workers=2, queue=5) as rig:
        bad, _ = rig.workers
        rig.fleet.on_report(report("w1", state="draining"))
        refuse = bad.refuse(503, "it is closing")

        async def closes(request, generate):
            rig.fleet.on_report(report("w0", state="draining"))
            return await refuse(request, generate)

        bad.answer = closes
        status, _, body = await rig.complete(PROMPT)
        assert (status, body["error"]["message"]) == (503, "it is closing")
        assert rig.gateway.admission.waiting == 0


@pytest.mark.parametrize("queue", [0, 5])
async def test_workers_that_are_replaced_while_a_prompt_is_tokenised_get_it_hashed_anew(
    queue, monkeypatch
):
    async with Rig(workers=2, queue=queue) as rig:
        rig.fleet.on_gone("w1", "not yet")
        tokenise, namespaces = rig.gateway._tokenization.prompt, []

        async def replacing(asked, encoder, namespace, context_tokens):
            prompt = await tokenise(asked, encoder, namespace, context_tokens)
            if not namespaces:
                replace_all(rig, 1)
            namespaces.append(namespace)
            return prompt

        monkeypatch.setattr(rig.gateway._tokenization, "prompt", replacing)
        status, headers, _ = await rig.complete(PROMPT)
        assert (status, headers[HEADER_WORKER]) == (200, "w1")
        assert namespaces == [NAMESPACE, OTHER]


async def test_workers_that_are_replaced_during_an_attempt_get_the_next_one_hashed_anew():
    async with Rig(workers=2) as rig:
        old, new = rig.workers
        rig.fleet.on_gone("w1", "not yet")
        refuse = old.refuse(503)

        async def replaced(request, generate):
            replace_all(rig, 1)
            return await refuse(request, generate)

        old.answer = replaced
        status, headers, _ = await rig.complete(PROMPT)
        assert (status, headers[HEADER_WORKER]) == (200, "w1")
        assert len(new.requests) == 1
        assert count(rig, "failed_attempts", reason="unavailable") == 1


async def test_workers_that_go_while_a_prompt_is_tokenised_are_none(monkeypatch):
    async with Rig() as rig:
        tokenise = rig.gateway._tokenization.prompt

        async def drained(*arguments):
            rig.fleet.on_report(report("w0", state="draining"))
            return await tokenise(*arguments)

        monkeypatch.setattr(rig.gateway._tokenization, "prompt", drained)
        with pytest.raises(RequestError) as refused:
            await served(rig)
        assert (refused.value.status, refused.value.code) == (503, "no_ready_worker")


async def test_a_timeout_is_final():
    async with Rig(workers=2, first_byte_timeout_s=0.1) as rig:
        for worker in rig.workers:
            worker.answer = hang
        status, _, body = await rig.complete(PROMPT)
        assert (status, body["error"]["code"]) == (504, "first_byte_timeout")
        assert sum(len(worker.requests) for worker in rig.workers) == 1
        assert count(rig, "failed_attempts", reason="timeout") == 1


async def hang(request, generate):
    await asyncio.Event().wait()
