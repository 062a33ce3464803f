import asyncio
import socket

import pytest
from aiohttp import web

from loadgen.client import Client
from tests.loadgen.fake_gateway import FakeGateway, chunk, serving
from tests.loadgen.test_requests import BODY, line

USAGE = {"prompt_tokens": 10, "prompt_tokens_details": {"cached_tokens": 4}}
DONE = b"data: [DONE]\n\n"


async def replay(behave, requests=None, timeout_s=20.0, api_key=""):
    gateway = FakeGateway()
    gateway.behave = behave
    async with serving(gateway) as url:
        client = Client(url, api_key, timeout_s)
        outcomes = await client.replay(requests or [line()], "arm")
    return gateway, outcomes


def streaming(*pieces):
    """Each piece is written apart; an event in between is awaited."""

    async def behave(gateway, request, body):
        response = await gateway.begin(request)
        for piece in pieces:
            if isinstance(piece, asyncio.Event):
                await piece.wait()
            else:
                await response.write(piece)
        return response

    return behave


async def test_an_answer_is_read_with_its_tokens_and_headers():
    pieces = [chunk("Good ", 1, **USAGE), chunk("day.", 2, finish="stop", **USAGE), DONE]
    gateway, (outcome,) = await replay(streaming(*pieces), api_key="secret")
    assert (outcome.status, outcome.error, outcome.http_status) == ("ok", "", 200)
    assert (outcome.text, outcome.finish_reason) == ("Good day.", "stop")
    assert (outcome.prompt_tokens, outcome.cached_tokens, outcome.completion_tokens) == (10, 4, 2)
    assert (outcome.worker, outcome.policy) == ("w0", "locality")
    assert (outcome.predicted_hit_tokens, outcome.hit_tokens) == (0, 0)
    assert outcome.intended_s <= outcome.sent_s <= outcome.first_token_s <= outcome.end_s
    assert gateway.keys == ["Bearer secret"]
    assert [body for _, body in gateway.bodies] == [BODY]


async def test_chunks_may_be_cut_anywhere():
    stream = chunk("naïve 茶", 2, **USAGE) + DONE
    pieces = [stream[i : i + 1] for i in range(len(stream))]
    _, (outcome,) = await replay(streaming(*pieces))
    assert outcome.status == "ok"
    assert outcome.text == "naïve 茶"


async def test_an_error_event_fails_the_request():
    error = b'data: {"error": {"message": "the engine died", "type": "server_error"}}\n\n'
    _, (outcome,) = await replay(streaming(chunk("a", 1), error, DONE))
    assert (outcome.status, outcome.error) == ("failed", "the engine died")
    assert outcome.text == "a"


async def test_a_stream_without_done_is_unfinished():
    _, (outcome,) = await replay(streaming(chunk("a", 1, finish="stop", **USAGE)))
    assert (outcome.status, outcome.error) == ("unfinished", "the stream ended without [DONE]")


async def test_a_broken_connection_is_unfinished():
    async def behave(gateway, request, body):
        response = await gateway.begin(request)
        await response.write(chunk("a", 1))
        request.transport.abort()
        return response

    _, (outcome,) = await replay(behave)
    assert outcome.status == "unfinished"
    assert "connection broke" in outcome.error


async def test_a_connection_closed_before_any_answer_fails():
    async def behave(gateway, request, body):
        request.transport.abort()
        return web.Response()

    _, (outcome,) = await replay(behave)
    assert outcome.status == "failed"
    assert "ServerDisconnectedError" in outcome.error or "ClientOSError" in outcome.error


async def test_a_gateway_that_is_not_there_fails_the_request():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        (outcome,) = await Client(url).replay([line()], "arm")
    assert outcome.status == "failed"
    assert "Connect" in outcome.error


async def test_a_refusal_is_told_with_status_and_reason():
    async def behave(gateway, request, body):
        return web.json_response({"error": {"message": "queue full"}}, status=429)

    _, (outcome,) = await replay(behave)
    assert (outcome.status, outcome.http_status) == ("failed", 429)
    assert outcome.error == "HTTP 429: queue full"


async def test_events_that_are_no_chunks_fail_the_request():
    _, (outcome,) = await replay(streaming(b"data: nonsense\n\n"))
    assert outcome.status == "failed"
    assert "no chunk" in outcome.error


async def test_a_silent_server_is_cut_off_and_told_as_unfinished():
    never = asyncio.Event()
    _, (outcome,) = await replay(streaming(chunk("a", 1), never), timeout_s=0.2)
    assert outcome.status == "unfinished"
    assert outcome.error == "not finished after 0.2 s"
    assert outcome.text == "a"


async def test_no_request_waits_for_the_answer_to_another():
    everyone = asyncio.Barrier(3)

    async def behave(gateway, request, body):
        await everyone.wait()
        return await streaming(chunk("a", 1, **USAGE), DONE)(gateway, request, body)

    requests = [line(id=str(i), turn=i, intended_at_s=i / 100) for i in range(3)]
    _, outcomes = await replay(behave, requests)
    assert [(o.id, o.status) for o in outcomes] == [("0", "ok"), ("1", "ok"), ("2", "ok")]
    assert all(o.sent_s >= o.intended_s for o in outcomes)


async def test_waiting_in_the_client_counts_against_the_first_token():
    requests = [line(), line(id="b", turn=1)]

    async def behave(gateway, request, body):
        return await streaming(chunk("a", 1, **USAGE), DONE)(gateway, request, body)

    _, outcomes = await replay(behave, requests)
    for outcome in outcomes:
        assert outcome.intended_s == 0.0
        assert outcome.ttft_ms == pytest.approx(outcome.first_token_s * 1e3)
        assert outcome.ttft_ms >= outcome.lag_ms


async def test_a_cancelled_replay_closes_its_requests():
    begun, closed = asyncio.Event(), asyncio.Event()

    async def behave(gateway, request, body):
        response = await gateway.begin(request)
        begun.set()
        try:
            while not request.transport.is_closing():
                await response.write(b": still here\n\n")
                await asyncio.sleep(0)
        finally:
            closed.set()
        return response

    gateway = FakeGateway()
    gateway.behave = behave
    async with serving(gateway) as url:
        task = asyncio.create_task(Client(url).replay([line()], "arm"))
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await closed.wait()


async def test_connections_do_not_wait_to_fill_packets():
    # Nagle's algorithm with delayed acknowledgements would add tens of milliseconds.
    gateway, held = FakeGateway(), asyncio.Event()
    gateway.behave = streaming(chunk("a", 1), held)
    async with (
        serving(gateway) as url,
        Client(url)._session() as session,
        session.post(url + "/v1/chat/completions", data=BODY) as response,
    ):
        held_socket = response.connection.transport.get_extra_info("socket")
        assert held_socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        held.set()
        await response.read()
