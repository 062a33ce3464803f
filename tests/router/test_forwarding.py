"""From the gateway to workers and back, over real HTTP."""

import asyncio
import json
import socket

import aiohttp
import pytest
from aiohttp import web
from tokenizers import Tokenizer

from cluster.blocks import hash_blocks, pack_tokens
from cluster.protocol import (
    HEADER_HIT_TOKENS,
    HEADER_POLICY,
    HEADER_PREDICTED_HIT_TOKENS,
    HEADER_PROMPT_TOKENS,
    HEADER_REQUEST_ID,
    HEADER_WORKER,
    Load,
)
from router.delivery import EventReader
from tests.router.support import BLOCK_SIZE, NAMESPACE, TOKENIZER, Rig, card, count, event, report

BODY = {"model": "tiny", "prompt": "some prompt"}
STREAM = {**BODY, "stream": True}


def chain_of_text(text: str) -> list[bytes]:
    """The hashes of a text under the byte-level tokenizer, which numbers bytes by its alphabet."""
    ids = Tokenizer.from_str(TOKENIZER).encode(text).ids
    return hash_blocks(NAMESPACE.root(), pack_tokens(ids), BLOCK_SIZE)


def refused_address() -> str:
    """An address on which nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"


async def test_an_answer_comes_back_with_what_was_predicted_and_what_was_reused():
    async with Rig() as rig:
        rig.fleet.on_report(report("w0", stored=chain_of_text("some prompt")))
        rig.workers[0].answer = rig.workers[0].say("hello", hit=4)
        status, headers, body = await rig.complete("some prompt", max_tokens=5, seed=1)
        assert (status, body["choices"]) == (200, [{"text": "hello"}])
        (generate,) = rig.workers[0].requests
        assert headers[HEADER_WORKER] == "w0"
        assert headers[HEADER_POLICY] == "locality"
        assert headers[HEADER_PROMPT_TOKENS] == "11"
        assert headers[HEADER_PREDICTED_HIT_TOKENS] == "8"
        assert headers[HEADER_HIT_TOKENS] == "4"
        assert headers[HEADER_REQUEST_ID] == generate.request_id == body["id"]
        assert (generate.kind, generate.model, generate.stream) == ("completion", "tiny", False)
        assert (generate.sampling.max_tokens, generate.sampling.seed) == (5, 1)
        assert count(rig, "predicted_hit_tokens") == 8
        assert count(rig, "hit_tokens") == 4
        assert count(rig, "prompt_tokens") == 11
        assert count(rig, "decisions", policy="locality", reason="only") == 1
        assert count(rig, "requests", endpoint="/v1/completions", status="200") == 1


async def test_a_request_goes_where_its_prefix_is():
    async with Rig(workers=3) as rig:
        for number, worker in enumerate(rig.workers):
            rig.fleet.on_report(
                report(worker.name, stored=chain_of_text(f"prefix {number} of all"))
            )
        for number in (2, 0, 1, 1, 2):
            _, headers, _ = await rig.complete(f"prefix {number} of all and more")
            assert headers[HEADER_WORKER] == f"w{number}"


async def test_chunks_reach_the_client_one_by_one_and_unchanged():
    async with Rig() as rig:
        (worker,) = rig.workers
        sent, go_on = [event("grüß"), event("dich"), b": a comment\n\n"], asyncio.Semaphore(0)

        async def answer(request, generate):
            response = web.StreamResponse(
                headers={**worker.headers(generate), "Content-Type": "text/event-stream"}
            )
            await response.prepare(request)
            for chunk in [*sent, b"data: [DONE]\n\n"]:
                await response.write(chunk)
                await go_on.acquire()  # the next one only when the client has this one
            return response

        worker.answer = answer
        async with rig.http.post("/v1/completions", json=STREAM) as response:
            assert response.status == 200
            assert response.headers["Content-Type"] == "text/event-stream"
            assert response.headers["Cache-Control"] == "no-cache"
            assert response.headers[HEADER_WORKER] == "w0"
            for chunk in [*sent, b"data: [DONE]\n\n"]:
                assert await response.content.readany() == chunk
                go_on.release()
            assert await response.content.readany() == b""


async def test_regret_is_what_another_worker_would_have_spared():
    async with Rig(workers=2, policy="round_robin") as rig:
        for worker in rig.workers:
            worker.answer = worker.say("hello", hit=4)
        rig.fleet.on_report(report("w1", stored=chain_of_text("some prompt")))
        _, headers, _ = await rig.complete("some prompt")
        assert headers[HEADER_WORKER] == "w0"
        assert count(rig, "decisions", policy="round_robin", reason="load") == 1
        assert count(rig, "regret_tokens") == 8 - 4
        assert count(rig, "overestimated_tokens") == 0
        _, headers, _ = await rig.complete("some prompt")
        assert headers[HEADER_WORKER] == "w1"
        assert count(rig, "decisions", policy="round_robin", reason="hit") == 1
        assert count(rig, "regret_tokens") == 2 * (8 - 4)
        assert count(rig, "overestimated_tokens") == 8 - 4
        await rig.complete("another one")
        assert count(rig, "decisions", policy="round_robin", reason="cold") == 1
        assert count(rig, "regret_tokens") == 8


async def test_both_hops_send_small_chunks_at_once():
    async with Rig() as rig:
        (worker,) = rig.workers
        options = []

        async def answer(request, generate):
            response = web.StreamResponse(headers=worker.headers(generate))
            await response.prepare(request)
            await response.write(event("x"))
            options.extend(
                protocol.transport.get_extra_info("socket").getsockopt(level, option)
                for protocol, level, option in (
                    (to_worker(), socket.IPPROTO_TCP, socket.TCP_NODELAY),
                    (to_worker(), socket.SOL_SOCKET, socket.SO_KEEPALIVE),
                    (to_client(), socket.IPPROTO_TCP, socket.TCP_NODELAY),
                )
            )
            return response

        def to_worker():
            (connection,) = rig.gateway._workers._connections()
            return connection

        def to_client():
            (protocol,) = rig.gateway._server.connections
            return protocol

        worker.answer = answer
        async with rig.http.post("/v1/completions", json=STREAM) as response:
            assert await response.read() == event("x")
        assert len(options) == 3
        assert all(options)


async def test_a_worker_that_cannot_be_reached_is_left_out_until_its_next_report():
    async with Rig() as rig:
        dead = "dead"
        rig.fleet.on_card(card(dead, address=refused_address()))
        rig.fleet.on_report(report(dead, stored=chain_of_text("some prompt")))
        status, headers, _ = await rig.complete()
        assert (status, headers[HEADER_WORKER]) == (200, "w0")
        assert count(rig, "failed_attempts", reason="connect") == 1
        assert (await rig.complete())[0] == 200
        assert count(rig, "failed_attempts", reason="connect") == 1
        rig.fleet.on_report(report(dead))
        assert [m.usable for m in rig.fleet.members()] == [True, True]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (lambda worker: worker.refuse(503), "unavailable"),
        (lambda worker: worker.refuse(429), "full"),
        (lambda worker: worker.refuse(500), "failed"),
        (lambda worker: worker.drop(), "dropped"),
    ],
)
async def test_a_fault_before_the_first_byte_is_mended_at_another_worker(fault, reason, stream):
    async with Rig(workers=2) as rig:
        bad, good = rig.workers
        bad.answer = fault(bad)
        rig.fleet.on_report(report("w0", stored=chain_of_text("some prompt")))
        async with rig.http.post("/v1/completions", json={**BODY, "stream": stream}) as answer:
            text = await answer.text()
            assert answer.status == 200
            assert answer.headers[HEADER_WORKER] == "w1"
        assert "hello" in text
        assert len(bad.requests) == len(good.requests) == 1
        assert bad.requests[0] == good.requests[0]
        assert count(rig, "failed_attempts", reason=reason) == 1
        # no status opens a circuit breaker: the next request goes to the holder again
        bad.answer = bad.say("again")
        assert (await rig.complete())[1][HEADER_WORKER] == "w0"


async def test_a_whole_answer_that_breaks_off_is_tried_elsewhere_since_nothing_was_sent():
    async with Rig(workers=2) as rig:
        bad, _ = rig.workers
        bad.answer = bad.drop(after=b'{"id": "half')
        rig.fleet.on_report(report("w0", stored=chain_of_text("some prompt")))
        status, headers, body = await rig.complete()
        assert (status, headers[HEADER_WORKER]) == (200, "w1")
        assert body["choices"] == [{"text": "hello"}]


async def test_a_whole_answer_that_breaks_off_everywhere_is_a_502():
    async with Rig(workers=2) as rig:
        for worker in rig.workers:
            worker.answer = worker.drop(after=b'{"id": "half')
        status, _, body = await rig.complete()
        assert (status, body["error"]["code"]) == (502, "worker_lost")
        assert "closed the connection before its response was complete" in body["error"]["message"]


async def test_a_stream_that_breaks_off_ends_with_an_error_event_and_no_done():
    async with Rig(workers=2) as rig:
        for worker in rig.workers:
            worker.answer = worker.drop(after=event("one") + b'data: {"half')
        async with rig.http.post("/v1/completions", json=STREAM) as answer:
            assert answer.status == 200
            text = await answer.read()
        first, last, rest = text.split(b"\n\n")
        assert (first + b"\n\n", rest) == (event("one"), b"")
        error = json.loads(last.removeprefix(b"data: "))["error"]
        assert (error["type"], error["code"]) == ("server_error", "worker_lost")
        assert sum(len(worker.requests) for worker in rig.workers) == 1
        assert count(rig, "broken_streams") == 1


async def test_a_stream_that_breaks_off_before_its_first_event_is_tried_elsewhere():
    async with Rig(workers=2) as rig:
        bad, _ = rig.workers

        async def answer(request, generate):
            response = web.StreamResponse(headers=bad.headers(generate))
            await response.prepare(request)
            request.transport.abort()
            raise asyncio.CancelledError

        bad.answer = answer
        rig.fleet.on_report(report("w0", stored=chain_of_text("some prompt")))
        async with rig.http.post("/v1/completions", json=STREAM) as response:
            assert response.headers[HEADER_WORKER] == "w1"
            assert (await response.text()).endswith("data: [DONE]\n\n")


async def test_errors_of_the_request_pass_through_and_are_not_retried():
    async with Rig(workers=2) as rig:
        for worker in rig.workers:
            worker.answer = worker.refuse(400, "that seed is odd", "odd_seed")
        status, _, body = await rig.complete()
        assert status == 400
        assert body["error"]["message"] == "that seed is odd"
        assert body["error"]["code"] == "odd_seed"
        assert sum(len(worker.requests) for worker in rig.workers) == 1


@pytest.mark.parametrize("status", [401, 404, 405])
async def test_a_server_that_does_not_serve_this_pool_does_not_answer_for_it(status):
    """Another process may have taken the port of a worker that was killed."""
    async with Rig(workers=2, attempts=2) as rig:
        for worker in rig.workers:
            worker.answer = worker.refuse(status, "who are you?")
        got, _, body = await rig.complete()
        assert (got, body["error"]["message"]) == (502, "who are you?")
        assert all(worker.requests for worker in rig.workers)


@pytest.mark.parametrize("status", [204, 206, 302])
async def test_what_is_neither_an_answer_nor_a_refusal_is_a_502(status):
    async with Rig(workers=2, attempts=2) as rig:
        for worker in rig.workers:
            worker.answer = worker.refuse(status)
        got, _, body = await rig.complete()
        assert got == 502
        assert body["error"]["message"]
        assert all(worker.requests for worker in rig.workers)


@pytest.mark.parametrize(("status", "retry_after"), [(429, "1"), (503, "1")])
async def test_when_all_attempts_fail_the_last_answer_counts(status, retry_after):
    async with Rig(workers=4, attempts=3) as rig:
        for worker in rig.workers:
            worker.answer = worker.refuse(status, "the queue is full")
        got, headers, body = await rig.complete()
        assert got == status
        assert headers.get("Retry-After") == retry_after
        assert body["error"]["message"] == "the queue is full"
        tried = [worker for worker in rig.workers if worker.requests]
        assert len(tried) == 3
        assert all(len(worker.requests) == 1 for worker in tried)


async def test_no_reachable_worker_is_a_503_with_retry_after():
    async with Rig() as rig:
        assert (await rig.complete())[0] == 200  # the tokenizer is known from now on
        rig.fleet.on_card(rig.workers[0].card(address=refused_address()))
        status, headers, body = await rig.complete()
        assert (status, headers["Retry-After"]) == (503, "1")
        assert body["error"]["code"] == "worker_unreachable"
        status, headers, body = await rig.complete()
        assert (status, headers["Retry-After"]) == (503, "1")
        assert body["error"]["code"] == "no_ready_worker"


async def test_a_worker_that_never_begins_is_a_504():
    async with Rig(first_byte_timeout_s=0.2) as rig:
        (worker,) = rig.workers

        async def answer(request, generate):
            await asyncio.Event().wait()

        worker.answer = answer
        status, _, body = await rig.complete()
        assert (status, body["error"]["code"]) == (504, "first_byte_timeout")
        await asyncio.wait_for(worker.cancelled.wait(), 10)


async def test_equal_workers_get_equal_shares_even_of_single_requests():
    async with Rig(workers=3) as rig:
        for number in range(60):
            assert (await rig.complete(f"{number} is another prompt"))[0] == 200
        shares = [len(worker.requests) for worker in rig.workers]
        assert sum(shares) == 60
        assert min(shares) >= 8


async def test_a_burst_of_one_new_prefix_gathers_before_any_block_is_announced():
    async with Rig(workers=2) as rig:
        hold = asyncio.Event()
        for worker in rig.workers:

            async def answer(request, generate, worker=worker):
                await hold.wait()
                return await worker.say("x")(request, generate)

            worker.answer = answer
        # (500 + 145) × 2 at w1, against (145 + a few) × 2 and × 3 at w0 where the prefix is on
        # its way; were it not counted, the third would cost (2 × 145 + 145) × 3 there
        rig.fleet.on_report(report("w1", load=Load(pending_prefill_tokens=500, running=1)))
        burst = []
        for number in range(3):
            text = "one long prefix that all share" * 5 + str(number)
            burst.append(asyncio.create_task(rig.complete(text)))
            await asyncio.wait_for(rig.arrivals.get(), 10)
        assert [len(worker.requests) for worker in rig.workers] == [3, 0]
        hold.set()
        assert [status for status, _, _ in await asyncio.gather(*burst)] == [200] * 3


async def test_stopping_ends_streams_and_leaves_no_task():
    before = asyncio.all_tasks()
    rig = Rig()
    async with rig:
        (worker,) = rig.workers

        worker.answer = worker.begin()
        response = await rig.http.post("/v1/completions", json=STREAM)
        assert await response.content.readany() == event("first")
        await rig.gateway.stop()
        await asyncio.wait_for(worker.cancelled.wait(), 10)
        assert rig.follower.ended
        assert b"gateway_stopping" in await response.content.read()
        with pytest.raises(aiohttp.ClientError):
            await rig.complete()
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == before


def test_a_body_without_frames_passes_whole_events_only():
    buffer = EventReader()
    assert buffer.feed(b"data: 1\n\n") == b"data: 1\n\n"
    assert buffer.feed(b"data: 2\n\ndata:") == b"data: 2\n\n"
    assert buffer.feed(b" 3\n") == b""
    assert buffer.feed(b"\ndata: 4") == b"data: 3\n\n"
    assert buffer.rest() == b"data: 4"
    assert buffer.feed(b"\n\n") == b"data: 4\n\n"
    assert buffer.rest() == b""
