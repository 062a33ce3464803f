"""Responses with which another worker goes on after theirs has failed."""

from __future__ import annotations

import asyncio
import json

import msgspec
import pytest
from aiohttp import web

from cluster.blocks import unpack_tokens
from cluster.protocol import HEADER_HIT_TOKENS, HEADER_MIGRATIONS, HEADER_PROGRESS, HEADER_WORKER
from tests.router.support import NAMESPACE, Rig, count, event, report
from tests.router.test_forwarding import STREAM, chain_of_text, refused_address

PROMPT = "some prompt"
WHOLE = [event(str(number)) for number in range(1, 7)]


def favour(rig: Rig, worker: str = "w0") -> None:
    """The first attempt goes to this worker, which has the prompt."""
    rig.fleet.on_report(report(worker, stored=chain_of_text(PROMPT)))


async def streamed(rig: Rig, **fields: object) -> tuple[dict[str, str], bytes]:
    async with rig.http.post("/v1/completions", json={**STREAM, **fields}) as answer:
        assert answer.status == 200
        return dict(answer.headers), await answer.read()


@pytest.mark.parametrize("cut", [1, 3, 5])
async def test_a_stream_goes_on_at_another_worker_without_a_gap(cut: int) -> None:
    async with Rig(workers=2) as rig:
        bad, good = rig.workers
        bad.answer, rest = bad.generate(6, cut_after=cut), good.generate(6, hit=4)
        booked = []

        async def answer(request, generate):
            booked.append(rig.fleet.load_of(rig.fleet.members()[1]).pending_prefill_tokens)
            return await rest(request, generate)

        good.answer = answer
        favour(rig)
        headers, body = await streamed(rig, temperature=1.0)
        assert body == b"".join(WHOLE) + b"data: [DONE]\n\n"
        assert (headers[HEADER_WORKER], headers[HEADER_HIT_TOKENS]) == ("w0", "16")
        assert HEADER_MIGRATIONS not in headers  # it was sent before
        (first,), (second,) = bad.requests, good.requests
        assert (first.output_ids, first.hit_tokens, first.progress) == (b"", 0, True)
        assert unpack_tokens(second.output_ids) == list(range(1, cut + 1))
        assert second == msgspec.structs.replace(first, output_ids=second.output_ids, hit_tokens=16)
        assert first.sampling.seed is not None  # so that both draw the same
        assert first.created
        assert booked == [11 + cut]  # prompt and output
        assert count(rig, "migrations") == 1
        assert count(rig, "broken_streams") == 0
        assert count(rig, "failed_attempts", reason="dropped") == 1
        assert count(rig, "hit_tokens") == 16  # of one request


async def test_a_response_that_is_not_a_stream_goes_on_and_says_so() -> None:
    async with Rig(workers=2) as rig:
        bad, good = rig.workers
        bad.answer, good.answer = bad.generate(6, cut_after=4), good.generate(6, hit=4)
        favour(rig)
        status, headers, body = await rig.complete(PROMPT)
        assert (status, body) == (200, [1, 2, 3, 4, 5, 6])
        assert (headers[HEADER_WORKER], headers[HEADER_MIGRATIONS]) == ("w1", "1")
        assert headers["Content-Length"] == str(len(json.dumps(body)))
        assert headers[HEADER_HIT_TOKENS] == "16"  # of the first worker
        (second,) = good.requests
        assert unpack_tokens(second.output_ids) == [1, 2, 3, 4]


async def test_a_stream_goes_on_again_and_again_up_to_the_limit() -> None:
    async with Rig(workers=5, attempts=1, migrations=3) as rig:
        for worker in rig.workers:
            worker.answer = worker.generate(6, cut_after=1)
        _, body = await streamed(rig)
        assert body.startswith(b"".join(WHOLE[:4]))
        last = body.removeprefix(b"".join(WHOLE[:4]))
        assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "worker_lost"
        asked = sorted(len(w.requests[0].output_ids) // 4 for w in rig.workers if w.requests)
        assert asked == [0, 1, 2, 3]
        assert count(rig, "migrations") == 3
        assert count(rig, "broken_streams") == 1


async def test_a_worker_that_cannot_be_reached_does_not_end_the_stream() -> None:
    async with Rig(workers=3) as rig:
        bad, away, good = rig.workers
        assert (await rig.complete("x"))[0] == 200  # the tokenizer is known from now on
        bad.answer, good.answer = bad.generate(6, cut_after=2), good.generate(6)
        favour(rig)
        rig.fleet.on_card(away.card(address=refused_address()))
        rig.fleet.on_report(report("w1", stored=chain_of_text(PROMPT)[:1]))  # second, after w0
        _, body = await streamed(rig)
        assert body == b"".join(WHOLE) + b"data: [DONE]\n\n"
        assert count(rig, "failed_attempts", reason="connect") == 1
        assert count(rig, "migrations") == 2


async def test_without_another_worker_the_stream_ends_with_an_error_at_once() -> None:
    async with Rig(workers=1) as rig:
        (worker,) = rig.workers
        worker.answer = worker.generate(6, cut_after=2)
        _, body = await streamed(rig)
        last = body.removeprefix(b"".join(WHOLE[:2]))
        assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "worker_lost"
        assert len(worker.requests) == 1


def replaced_meanwhile(rig: Rig, **card: object) -> None:
    """The only worker generates two tokens and dies; its successor has other weights."""
    bad, other = rig.workers
    rig.fleet.on_gone("w1", "not yet")
    cut = bad.generate(6, cut_after=2)

    async def answer(request, generate):
        rig.fleet.on_gone("w0", "replaced")
        weights = msgspec.structs.replace(NAMESPACE, weights="new")
        rig.fleet.on_card(other.card(namespace=weights, **card))
        return await cut(request, generate)

    bad.answer, other.answer = answer, other.generate(6)


async def test_other_weights_do_not_go_on_with_a_stream() -> None:
    async with Rig(workers=2) as rig:
        replaced_meanwhile(rig, context_tokens=4)  # for which the prompt is too long
        _, body = await streamed(rig)
        last = body.removeprefix(b"".join(WHOLE[:2]))
        assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "worker_lost"
        assert not rig.workers[1].requests


async def test_other_weights_begin_again_with_what_is_not_a_stream() -> None:
    async with Rig(workers=2) as rig:
        replaced_meanwhile(rig)
        status, headers, body = await rig.complete(PROMPT)
        assert (status, headers[HEADER_WORKER], body) == (200, "w1", [1, 2, 3, 4, 5, 6])
        assert rig.workers[1].requests[0].output_ids == b""


async def test_a_body_that_ends_before_its_last_frame_is_gone_on_with() -> None:
    async with Rig(workers=2) as rig:
        short, good = rig.workers

        async def answer(request, generate):
            response = web.StreamResponse(headers={HEADER_PROGRESS: "1"})
            await response.prepare(request)
            await response.write(event("1") + b":01000000\n")
            return response

        short.answer, good.answer = answer, good.generate(6)
        favour(rig)
        _, body = await streamed(rig)
        assert body == b"".join(WHOLE) + b"data: [DONE]\n\n"


async def test_what_a_lost_worker_sent_of_a_whole_response_without_frames_is_dropped() -> None:
    async with Rig(workers=2) as rig:
        bad, _ = rig.workers
        bad.answer = bad.drop(after=b'{"id":\n\n"half')
        favour(rig)
        status, headers, body = await rig.complete(PROMPT)
        assert (status, headers[HEADER_WORKER]) == (200, "w1")
        assert body["choices"] == [{"text": "hello"}]


async def test_the_connection_is_kept_if_its_end_comes_after_the_last_frame() -> None:
    async with Rig(workers=1) as rig:
        (worker,) = rig.workers
        ports, read = [], asyncio.Event()

        async def answer(request, generate):
            ports.append(request.transport.get_extra_info("peername")[1])
            response = web.StreamResponse(headers={HEADER_PROGRESS: "1"})
            await response.prepare(request)
            await response.write(WHOLE[0] + b":01000000.\n")
            await read.wait()
            await response.write_eof()
            return response

        worker.answer = answer
        _, body = await streamed(rig)
        assert body == WHOLE[0]
        read.set()
        async with asyncio.timeout(10):
            while rig.fleet.in_flight:  # noqa: ASYNC110
                await asyncio.sleep(0)
        assert (await streamed(rig))[1] == WHOLE[0]
        assert ports == [ports[0]] * 2


async def test_an_error_of_the_engine_is_tried_elsewhere_and_then_told() -> None:
    error = json.dumps({"error": {"message": "NaN", "type": "server_error"}}).encode()
    async with Rig(workers=2) as rig:
        bad, good = rig.workers
        bad.answer, good.answer = bad.generate(4, error=error), good.generate(6)
        favour(rig)
        _, body = await streamed(rig)
        assert body == b"".join(WHOLE) + b"data: [DONE]\n\n"
        assert count(rig, "failed_attempts", reason="failed") == 1
        good.answer = good.generate(5, error=error)
        _, body = await streamed(rig)
        assert body.startswith(b"".join(WHOLE[:4]))
        assert body.endswith(b"\n\n")
        assert b"NaN" in body.split(b"\n\n")[-2]
        assert b"[DONE]" not in body


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("kind", ["dropped", "failed"])
async def test_a_request_that_ends_two_workers_after_the_same_token_is_not_sent_to_a_third(
    kind: str, stream: bool
) -> None:
    error = json.dumps({"error": {"message": "NaN", "type": "server_error"}}).encode()
    async with Rig(workers=3) as rig:
        for worker in rig.workers:
            ends = {"error": error} if kind == "failed" else {"cut_after": 3}
            then = worker.generate(4, **ends)
            at_once = worker.generate(
                4, **(ends | ({"cut_after": 0} if "cut_after" in ends else {}))
            )

            async def answer(request, generate, then=then, at_once=at_once):
                if generate.kind == "completion" and len(generate.token_ids) == 4:
                    return web.json_response({})  # the gateway's own request
                return await (at_once if generate.output_ids else then)(request, generate)

            worker.answer = answer
        if stream:
            _, body = await streamed(rig)
            assert body.startswith(b"".join(WHOLE[:3]) + b"data: ")
            told = body.split(b"\n\n")[-2]
        else:
            status, _, answered = await rig.complete(PROMPT)
            assert status >= 500
            told = json.dumps(answered).encode()
        assert b"failed in the same way at" in told
        asked = [r for w in rig.workers for r in w.requests if len(r.token_ids) > 4]
        assert len(asked) == 2


async def test_a_refusal_of_the_rest_is_an_error_event() -> None:
    async with Rig(workers=2) as rig:
        bad, good = rig.workers
        bad.answer, good.answer = bad.generate(6, cut_after=2), good.refuse(400, "too long")
        favour(rig)
        _, body = await streamed(rig)
        assert body.startswith(b"".join(WHOLE[:2]))
        assert b"too long" in body.split(b"\n\n")[-2]


async def test_a_mark_that_is_none_ends_in_an_error_and_leaks_nothing() -> None:
    async with Rig(workers=1) as rig:
        (worker,) = rig.workers

        async def answer(request, generate):
            response = web.StreamResponse(headers={HEADER_PROGRESS: "1"})
            await response.prepare(request)
            await response.write(event("1") + b":01000000\n" + event("2") + b":zz\n")
            request.transport.abort()
            return response

        worker.answer = answer
        _, body = await streamed(rig)
        assert body.startswith(event("1") + b"data: ")
        assert b"worker_failed" in body.split(b"\n\n")[-2]
