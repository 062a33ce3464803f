"""How long a connection of a client lives, and what holds it back."""

import asyncio
import json
import logging

import pytest
import uvloop

from router.http_connection import MAX_AHEAD, ClientConnection
from router.http_messages import Response
from router.http_server import IDLE_S
from tests.router.http_site import (
    CHUNKED_HEAD,
    GET,
    WRITE_TIMEOUT_S,
    Site,
    answer,
    closed,
    post,
    sweep_until,
)

LOOPS = pytest.mark.parametrize("run", [asyncio.run, uvloop.run])


@pytest.mark.parametrize(
    ("line", "kept"),
    [
        ("GET /echo HTTP/1.1\r\nConnection: close", False),
        ("GET /echo HTTP/1.0", False),
        ("GET /echo HTTP/1.0\r\nConnection: keep-alive", True),
        ("GET http://h/echo HTTP/1.1", True),
    ],
)
async def test_connections_are_kept_where_the_client_wants_it(line, kept):
    async with Site() as site:
        reader, writer = await site.connect()
        writer.write(line.encode() + b"\r\n\r\n")
        status, headers, _ = await answer(reader)
        assert status == 200
        if kept:
            writer.write(GET)
            assert (await answer(reader))[0] == 200
        else:
            assert headers["Connection"] == "close"
            assert await closed(reader)


async def test_who_sends_many_requests_ahead_is_read_from_when_their_turn_comes(monkeypatch):
    paused = []
    pause = ClientConnection._enqueue

    def noting(connection, request):
        pause(connection, request)
        paused.append(connection._paused)

    monkeypatch.setattr(ClientConnection, "_enqueue", noting)
    async with Site() as site:
        reader, writer = await site.connect()
        ahead = 3 * MAX_AHEAD
        writer.write(b"".join(post(b"%d" % number) for number in range(ahead)))
        told = [json.loads((await answer(reader))[2])["body"] for _ in range(ahead)]
        assert told == [str(number) for number in range(ahead)]
        assert any(paused)
        writer.write(GET)
        assert (await answer(reader))[0] == 200


@LOOPS
@pytest.mark.parametrize("ahead", [b"", GET, GET + b"no HTTP at all\r\n"])
@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
def test_a_client_that_leaves_cancels_its_handler(run, ahead, version):
    async def left():
        async with Site() as site:
            _, writer = await site.connect()
            writer.write(GET.replace(b"/echo", b"/wait").replace(b"1.1", version) + ahead)
            async with asyncio.timeout(10):
                await site.began.wait()
                writer.close()
                await site.cancelled.wait()

    run(left())


@LOOPS
@pytest.mark.parametrize(
    ("last", "body"),
    [
        (b"", b'{"path":"/echo","body":"a","x":null}'),
        (post(b"", "/stream"), b"onetwo"),
        (GET, b'{"path":"/echo","body":"","x":null}'),
    ],
)
def test_a_client_that_sends_no_more_gets_its_responses(run, last, body):
    async def served():
        async with Site() as site:
            answered, may_answer = site.answer, asyncio.Event()

            async def later(request):
                await may_answer.wait()
                return await answered(request)

            site.answer = later
            reader, writer = await site.connect()
            writer.write(post(b"a") + last)
            writer.write_eof()
            assert (await answer(reader))[0] == 100  # the server asks whether the client has left
            may_answer.set()
            answers = [await answer(reader) for _ in range(2 if last else 1)]
            assert [status for status, _, _ in answers] == [200] * len(answers)
            assert answers[-1][2] == body
            assert [headers.get("Connection") for _, headers, _ in answers][-1] == "close"
            assert await closed(reader)

    run(served())


async def test_a_client_of_the_old_version_that_sends_no_more_counts_as_having_left():
    async with Site() as site:
        reader, writer = await site.connect()
        writer.write(GET.replace(b"/echo", b"/wait").replace(b"1.1", b"1.0"))
        async with asyncio.timeout(10):
            await site.began.wait()
            writer.write_eof()
            await site.cancelled.wait()
        assert await closed(reader)


async def test_a_stream_that_has_begun_ends_when_its_client_sends_no_more():
    """Nothing can be sent between its pieces to find out whether the client has left."""
    async with Site() as site:
        _, writer = await site.connect()
        began, cancelled = asyncio.Event(), asyncio.Event()

        async def half(request):
            await request.begin({}).write(b"half")
            began.set()
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()

        site.answer = half
        writer.write(GET)
        async with asyncio.timeout(10):
            await began.wait()
            writer.write_eof()
            await cancelled.wait()


async def test_a_client_that_reads_slowly_holds_its_stream_back(held_back):
    async with Site() as site:
        site.pieces = [b"x" * 100_000] * 200
        reader, writer = await site.connect()
        writer.write(post(b"", "/stream"))
        await asyncio.wait_for(held_back.wait(), 10)
        assert site.sent < 200
        assert (await answer(reader))[2] == b"".join(site.pieces)
        assert site.sent == 200


async def test_silent_connections_are_closed_and_busy_ones_are_not():
    async with Site() as site:
        idle, _ = await site.connect()
        busy, writer = await site.connect()
        writer.write(GET.replace(b"/echo", b"/wait"))
        await site.began.wait()
        site.server.sweep(asyncio.get_running_loop().time() + IDLE_S + 1)
        assert await closed(idle)
        assert len(site.server.connections) == 1
        assert not busy.at_eof()


async def received(monkeypatch, writer, data):
    """Send, and wait until the server has it."""
    got = asyncio.Event()
    take = ClientConnection.data_received

    def noting(connection, came):
        take(connection, came)
        got.set()

    with monkeypatch.context() as patch:
        patch.setattr(ClientConnection, "data_received", noting)
        writer.write(data)
        await asyncio.wait_for(got.wait(), 10)


async def test_heads_must_come_in_time_and_bodies_as_long_as_they_move(monkeypatch):
    async with Site() as site:
        long_ago = asyncio.get_running_loop().time() - 2 * IDLE_S
        for begun, more, stays in (
            (b"GET /echo HTTP/1.1\r\n", b"X-A: 1\r\n", False),
            (GET + b"\r\n", b"\r\n", False),
            (post(b"body")[:-3], b"o", True),
            (CHUNKED_HEAD + b"\r\n1\r\na\r\n0\r\n", b"X-A: 1\r\n", False),
        ):
            reader, writer = await site.connect()
            await received(monkeypatch, writer, begun)
            if begun.startswith(GET):
                await answer(reader)
            (connection,) = site.server.connections
            connection.heard_at = long_ago
            await received(monkeypatch, writer, more)
            site.server.sweep(asyncio.get_running_loop().time())
            assert connection.transport.is_closing() != stays
            writer.close()
            connection.transport.abort()
            assert await closed(reader)


@LOOPS
def test_a_client_that_stops_reading_is_cut_off_and_its_handler_cancelled(run, caplog):
    caplog.set_level(logging.INFO)

    async def stall():
        async with Site() as site:
            cancelled = asyncio.Event()

            async def endless(request):
                stream = request.begin({})
                try:
                    while True:
                        await stream.write(b"x" * 100_000)
                except asyncio.CancelledError:
                    cancelled.set()
                    raise

            site.answer = endless
            reader, writer = await site.connect()
            writer.write(GET)
            await reader.readuntil(b"\r\n\r\n")
            await sweep_until(site.server, WRITE_TIMEOUT_S, lambda: not site.server.connections)
            await asyncio.wait_for(cancelled.wait(), 10)
            assert (site.server.counts.stalled, len(site.server.connections)) == (1, 0)

    run(stall())
    assert "disconnected the client" in caplog.text


@LOOPS
def test_a_whole_answer_is_read_as_slowly_as_the_client_likes_but_not_left(run):
    """Far less is read between two looks than the server's system keeps for the client."""

    async def read_slowly():
        async with Site() as site:

            async def at_once(request):
                return Response(b"x" * 20_000_000)

            site.answer = at_once
            reader, writer = await site.connect(receive_bytes=65_536)
            writer.write(GET)
            await reader.readuntil(b"\r\n\r\n")
            now = asyncio.get_running_loop().time()
            for _ in range(10):
                await reader.readexactly(500_000)
                now += WRITE_TIMEOUT_S - 1
                site.server.sweep(now)
                assert len(site.server.connections) == 1
            assert site.server.counts.stalled == 0
            await sweep_until(site.server, WRITE_TIMEOUT_S, lambda: not site.server.connections)
            assert site.server.counts.stalled == 1

    run(read_slowly())


LARGE_BYTES = 20_000_000


async def large_answer(site):
    """The head of an answer that is written, of which its client has yet to read the body."""

    async def at_once(request):
        request._connection.transport.set_write_buffer_limits(high=LARGE_BYTES + 10_000_000)
        return Response(b"x" * LARGE_BYTES)

    site.answer = at_once
    reader, writer = await site.connect(receive_bytes=65_536)
    writer.write(GET)
    await reader.readuntil(b"\r\n\r\n")
    (connection,) = site.server.connections
    assert connection.task is None
    return reader


@LOOPS
def test_a_silent_connection_is_not_closed_before_its_last_answer_is_read(run):
    async def read_late():
        async with Site() as site:
            reader = await large_answer(site)
            site.server.sweep(asyncio.get_running_loop().time() + IDLE_S + 1)
            await reader.readexactly(LARGE_BYTES)
            assert await closed(reader)

    run(read_late())


@pytest.mark.parametrize("streams", [False, True])
async def test_requests_sent_ahead_are_not_answered_before_the_client_reads(streams):
    async with Site() as site:
        answered = 0

        async def handler(request):
            nonlocal answered
            answered += 1
            if not streams:
                return Response(b"x" * 100_000)
            request.begin({}).end(b"x" * 100_000)
            return None

        site.answer = handler
        reader, writer = await site.connect()
        writer.write(GET * 1000)
        await answer(reader)
        await sweep_until(site.server, WRITE_TIMEOUT_S, lambda: not site.server.connections)
        assert answered < 1000


async def test_stopping_lets_answers_be_read_to_their_end():
    async with Site() as site:
        large = b"x" * 20_000_000

        async def at_once(request):
            return Response(large)

        site.answer = at_once
        reader, writer = await site.connect()
        writer.write(GET)
        await reader.readuntil(b"\r\n\r\n")
        stopping = asyncio.create_task(site.server.stop(30))
        assert len(await reader.readexactly(len(large))) == len(large)
        await stopping


async def test_stopping_lets_answers_end_and_closes_idle_connections():
    site = Site()
    async with site:
        go_on = asyncio.Event()

        async def slow(request):
            site.began.set()
            await go_on.wait()
            return Response(b"done")

        site.answer = slow
        idle, _ = await site.connect()
        reader, writer = await site.connect()
        writer.write(GET)
        await site.began.wait()
        stopping = asyncio.create_task(site.server.stop(10))
        assert await closed(idle)
        go_on.set()
        assert (await answer(reader))[2] == b"done"
        assert await closed(reader)
        await stopping
