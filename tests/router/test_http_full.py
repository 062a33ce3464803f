"""What happens when as many connections are open as the server admits."""

import asyncio
import json

from router import http_server
from router.http_connection import ClientConnection
from tests.router.http_site import (
    GET,
    Site,
    answer,
    closed,
    post,
)
from tests.router.test_http_connections import LARGE_BYTES, LOOPS, large_answer, received


@LOOPS
def test_who_still_reads_a_last_answer_makes_no_way(run, monkeypatch):
    monkeypatch.setattr(http_server, "REPLACEABLE_S", 0.0)

    async def read_late():
        async with Site(max_connections=1) as site:
            reader = await large_answer(site)
            refused, _ = await site.connect()
            assert (await answer(refused))[0] == 503
            assert site.server.counts.refused == 1
            assert len(await reader.readexactly(LARGE_BYTES)) == LARGE_BYTES

    run(read_late())


@LOOPS
def test_beyond_the_bound_connections_are_turned_away_and_the_others_served(run):
    async def crowd():
        async with Site(max_connections=2) as site:
            first, second = await site.connect(), await site.connect()
            for reader, writer in (first, second):
                writer.write(GET)
                assert (await answer(reader))[0] == 200
            for refused in (1, 2):
                reader, writer = await site.connect()
                writer.write(post(b"x" * 500))  # it may come before and after the answer
                status, headers, body = await answer(reader)
                assert (status, headers["Connection"], headers["Retry-After"]) == (
                    503,
                    "close",
                    "1",
                )
                assert json.loads(body)["error"]["code"] == "too_many_connections"
                assert await closed(reader)
                assert (site.server.counts.refused, len(site.server.connections)) == (refused, 2)
            second[1].write(GET)
            assert (await answer(second[0]))[0] == 200
            first[1].write(GET.replace(b"Host", b"Connection: close\r\nHost"))
            assert (await answer(first[0]))[0] == 200
            assert await closed(first[0])
            reader, writer = await site.connect()
            writer.write(GET)
            assert (await answer(reader))[0] == 200

    run(crowd())


@LOOPS
def test_where_there_is_no_room_who_is_silent_makes_way_and_who_waits_for_an_answer_does_not(
    run, monkeypatch
):
    monkeypatch.setattr(http_server, "REPLACEABLE_S", 0.0)

    async def crowd():
        async with Site(max_connections=3) as site:
            busy, writer = await site.connect()
            writer.write(GET.replace(b"/echo", b"/wait"))
            await site.began.wait()
            (silent, _), (served, writer) = await site.connect(), await site.connect()
            writer.write(GET)
            assert (await answer(served))[0] == 200
            for passed in (silent, served):
                reader, writer = await site.connect()
                writer.write(GET.replace(b"/echo", b"/wait"))
                assert await closed(passed)
                while len(site.server.idle) != (passed is silent):  # noqa: ASYNC110
                    await asyncio.sleep(0)
            reader, _ = await site.connect()
            assert (await answer(reader))[0] == 503, "all wait for an answer"
            assert (site.server.counts.refused, len(site.server.connections)) == (1, 3)
            assert not busy.at_eof()
        assert not site.server.idle

    run(crowd())


@LOOPS
def test_of_those_turned_away_only_so_many_may_linger(run, monkeypatch):
    monkeypatch.setattr(http_server, "MAX_TURNED_AWAY", 2)

    async def crowd():
        async with Site(max_connections=1) as site:
            kept, writer = await site.connect()
            for _ in range(2):
                reader, _ = await site.connect()
                assert (await answer(reader))[0] == 503
            assert len(site.server.turned_away) == 2
            reader, _ = await site.connect()
            assert await closed(reader)
            writer.write(GET)
            assert (await answer(kept))[0] == 200

    run(crowd())


async def test_slow_uploads_do_not_keep_silent_connections_from_making_way(monkeypatch):
    monkeypatch.setattr(http_server, "MOST_LOOKED_AT", 2)
    async with Site(max_connections=4) as site:
        uploads = [await site.connect() for _ in range(2)]
        for _, writer in uploads:
            await received(monkeypatch, writer, post(b"body")[:-3])
        silent = [await site.connect() for _ in range(2)]
        for _, writer in silent:
            await received(monkeypatch, writer, GET)
        for reader, _ in silent:
            assert (await answer(reader))[0] == 200
        long_ago = asyncio.get_running_loop().time() - http_server.REPLACEABLE_S
        for connection in site.server.connections:
            connection.heard_at = long_ago
        for _, writer in uploads:
            await received(monkeypatch, writer, b"o")
        for reader, _ in silent:
            newcomer, writer = await site.connect()
            writer.write(GET)
            assert (await answer(newcomer))[0] == 200
            assert await closed(reader)
        newcomer, _ = await site.connect()
        assert (await answer(newcomer))[0] == 503, "all were heard of just now"
        for reader, writer in uploads:
            writer.write(b"dy")
            assert (await answer(reader))[0] == 200


@LOOPS
def test_who_is_cut_at_once_is_written_nothing(run, monkeypatch):
    monkeypatch.setattr(http_server, "MAX_TURNED_AWAY", 1)
    lingering = []
    linger = ClientConnection._close_later

    def noting(connection):
        lingering.append(connection)
        linger(connection)

    monkeypatch.setattr(ClientConnection, "_close_later", noting)

    async def crowd():
        async with Site(max_connections=1) as site:
            await site.connect()
            reader, _ = await site.connect()
            assert (await answer(reader))[0] == 503
            for _ in range(2):
                reader, _ = await site.connect()
                assert await closed(reader)
            assert (len(lingering), site.server.counts.refused) == (1, 3)

    run(crowd())
