"""How long a connection of a client lives, and what holds it back."""

import asyncio
import json

import pytest

from router import http_server
from router.http_messages import Response
from tests.router.http_site import CHUNKED_HEAD, GET, Site, answer, closed, post


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
    pause = http_server._Connection._enqueue

    def noting(connection, request):
        pause(connection, request)
        paused.append(connection._paused)

    monkeypatch.setattr(http_server._Connection, "_enqueue", noting)
    async with Site() as site:
        reader, writer = await site.connect()
        ahead = 3 * http_server.MAX_AHEAD
        writer.write(b"".join(post(b"%d" % number) for number in range(ahead)))
        told = [json.loads((await answer(reader))[2])["body"] for _ in range(ahead)]
        assert told == [str(number) for number in range(ahead)]
        assert any(paused)
        writer.write(GET)
        assert (await answer(reader))[0] == 200


@pytest.mark.parametrize("ahead", [b"", GET, GET + b"no HTTP at all\r\n"])
async def test_a_client_that_leaves_cancels_its_handler(ahead):
    async with Site() as site:
        _, writer = await site.connect()
        writer.write(GET.replace(b"/echo", b"/wait") + ahead)
        async with asyncio.timeout(10):
            await site.began.wait()
            writer.close()
            await site.cancelled.wait()


async def test_a_client_that_reads_slowly_holds_its_stream_back(monkeypatch):
    held_back = asyncio.Event()
    pause = http_server._Connection.pause_writing

    def noting(connection):
        pause(connection)
        held_back.set()

    monkeypatch.setattr(http_server._Connection, "pause_writing", noting)
    async with Site() as site:
        site.pieces = [b"x" * 100_000] * 200
        reader, writer = await site.connect()
        writer.write(post(b"", "/stream"))
        await asyncio.wait_for(held_back.wait(), 10)
        assert site.sent < 200
        assert (await answer(reader))[2] == b"".join(site.pieces)
        assert site.sent == 200


async def test_silent_connections_are_closed_and_busy_ones_are_not(monkeypatch):
    async with Site() as site:
        idle, _ = await site.connect()
        busy, writer = await site.connect()
        writer.write(GET.replace(b"/echo", b"/wait"))
        await site.began.wait()
        monkeypatch.setattr(http_server, "IDLE_S", -1.0)
        site.server._sweep()
        assert await closed(idle)
        assert len(site.server.connections) == 1
        assert not busy.at_eof()


async def received(monkeypatch, writer, data):
    """Send, and wait until the server has it."""
    got = asyncio.Event()
    take = http_server._Connection.data_received

    def noting(connection, came):
        take(connection, came)
        got.set()

    with monkeypatch.context() as patch:
        patch.setattr(http_server._Connection, "data_received", noting)
        writer.write(data)
        await asyncio.wait_for(got.wait(), 10)


async def test_heads_must_come_in_time_and_bodies_as_long_as_they_move(monkeypatch):
    async with Site() as site:
        long_ago = asyncio.get_running_loop().time() - 2 * http_server.IDLE_S
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
            site.server._sweep()
            assert connection.transport.is_closing() != stays
            writer.close()
            connection.transport.abort()
            assert await closed(reader)


async def test_stopping_lets_answers_be_read_to_their_end(monkeypatch):
    async with Site() as site:
        large = b"x" * 20_000_000

        async def at_once(request):
            return Response(large)

        site.server.answer = at_once
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

        site.server.answer = slow
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
