"""The server to clients, byte by byte over real connections."""

import asyncio
import json
import tracemalloc

import pytest

from cluster.settings import GatewaySettings
from router import http_server
from router.edge import Edge, Route, body_too_large, json_response, malformed
from router.http_messages import Response
from router.http_server import HttpServer
from router.metrics import RequestCounts

MAX_BODY_BYTES = 1000


class Site:
    """A server with a few endpoints, and connections to it.

    /echo tells what it got; /stream sends what `pieces` gives; /wait never ends
    """

    def __init__(self) -> None:
        self.pieces: list[bytes] = [b"one", b"two"]
        self.began = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.sent = 0
        edge = Edge(GatewaySettings(), RequestCounts())
        edge.add(
            [
                Route("POST", "/echo", self._echo),
                Route("GET", "/echo", self._echo),
                Route("POST", "/stream", self._stream),
                Route("GET", "/wait", self._wait),
                Route("GET", "/broken", self._broken),
            ]
        )
        self.server = HttpServer(
            admit=edge.admit,
            answer=edge.answer,
            malformed=malformed,
            too_large=body_too_large(MAX_BODY_BYTES),
            max_body_bytes=MAX_BODY_BYTES,
        )
        self._writers: list[asyncio.StreamWriter] = []

    async def __aenter__(self) -> "Site":
        self._host, self._port = await self.server.start("127.0.0.1", 0)
        return self

    async def __aexit__(self, *_) -> None:
        for writer in self._writers:
            writer.transport.abort()
        await self.server.stop(0.1)
        assert not self.server.connections

    async def connect(self):
        reader, writer = await asyncio.open_connection(self._host, self._port)
        self._writers.append(writer)
        return reader, writer

    async def _echo(self, request):
        return json_response(
            {"path": request.path, "body": request.body.decode(), "x": request.headers.get("x-a")}
        )

    async def _stream(self, request):
        stream = request.begin({"X-B": "b"})
        for piece in self.pieces:
            await stream.write(piece)
            self.sent += 1
        stream.end()

    async def _wait(self, request):
        self.began.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise

    async def _broken(self, request):
        stream = request.begin({})
        await stream.write(b"half")
        raise RuntimeError("bug")


async def answer(reader, *, head_only=False):
    """Status, headers and body of one answer."""
    async with asyncio.timeout(30):
        lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = dict(line.split(": ", 1) for line in lines[1:-2])
        status = int(lines[0].split()[1])
        if head_only or status == 100:
            return status, headers, b""
        if "Content-Length" in headers:
            return status, headers, await reader.readexactly(int(headers["Content-Length"]))
        if "Transfer-Encoding" not in headers:
            return status, headers, await reader.read()
        body = b""
        while size := int(await reader.readuntil(b"\r\n"), 16):
            body += await reader.readexactly(size)
            await reader.readexactly(2)
        await reader.readexactly(2)
        return status, headers, body


def post(body: bytes, path="/echo", *headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: h", f"Content-Length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


GET = b"GET /echo HTTP/1.1\r\nHost: h\r\n\r\n"


async def closed(reader) -> bool:
    async with asyncio.timeout(10):
        try:
            return await reader.read() == b""
        except ConnectionError:
            return True


async def test_a_connection_serves_one_request_after_the_other():
    async with Site() as site:
        reader, writer = await site.connect()
        for number in range(3):
            writer.write(post(b"%d" % number, "/echo?a=b", "X-A: 1", "x-a: 2"))
            status, headers, body = await answer(reader)
            assert (status, headers["Content-Type"]) == (200, "application/json")
            assert headers["Date"].endswith("GMT")
            assert "Connection" not in headers
            assert json.loads(body) == {"path": "/echo", "body": str(number), "x": "1, 2"}


async def test_requests_come_in_any_pieces():
    async with Site() as site:
        reader, writer = await site.connect()
        for byte in post(b"body"):
            writer.write(bytes([byte]))
            await writer.drain()
        assert json.loads((await answer(reader))[2])["body"] == "body"


async def test_a_body_may_come_in_chunks_and_with_trailers():
    async with Site() as site:
        reader, writer = await site.connect()
        head = b"POST /echo HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n"
        writer.write(head + b"2;a=b\r\nab\r\n3\r\ncde\r\n0\r\nX-A: late\r\n\r\n" + GET)
        told = json.loads((await answer(reader))[2])
        assert (told["body"], told["x"]) == ("abcde", None)
        assert (await answer(reader))[0] == 200


async def test_a_body_in_many_small_chunks_takes_no_more_memory_than_it_is_long():
    async with Site() as site:
        site.server.max_body_bytes = 200_000
        reader, writer = await site.connect()
        chunks = b"2\r\nab\r\n" * 100_000
        tracemalloc.start()
        try:
            writer.write(CHUNKED_HEAD + b"\r\n" + chunks + b"0\r\n\r\n")
            assert len((await answer(reader))[2]) > 200_000
            assert tracemalloc.get_traced_memory()[1] < 4_000_000  # whoever sends it included
        finally:
            tracemalloc.stop()


async def test_requests_sent_ahead_are_answered_in_their_order():
    async with Site() as site:
        reader, writer = await site.connect()
        stream = post(b"", "/stream")
        writer.write(post(b"a") + stream + post(b"b") + stream)
        bodies = [(await answer(reader))[2] for _ in range(4)]
        assert [b'"a"' in bodies[0], b'"b"' in bodies[2]] == [True, True]
        assert bodies[1] == bodies[3] == b"onetwo"
        writer.write(GET)
        assert (await answer(reader))[0] == 200


async def test_a_stream_to_an_old_client_ends_with_the_connection():
    async with Site() as site:
        reader, writer = await site.connect()
        writer.write(b"POST /stream HTTP/1.0\r\n\r\n")
        status, headers, body = await answer(reader)
        assert (status, headers["Connection"], body) == (200, "close", b"onetwo")


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


async def test_head_is_get_without_a_body():
    async with Site() as site:
        reader, writer = await site.connect()
        writer.write(GET.replace(b"GET", b"HEAD") + GET)
        status, headers, _ = await answer(reader, head_only=True)
        assert (status, int(headers["Content-Length"]) > 0) == (200, True)
        assert (await answer(reader))[0] == 200


async def test_a_client_that_asks_first_is_told_to_go_on():
    async with Site() as site:
        reader, writer = await site.connect()
        whole = post(b"body", "/echo", "Expect: 100-continue")
        writer.write(whole[:-4])
        assert (await answer(reader))[0] == 100
        writer.write(whole[-4:])
        assert json.loads((await answer(reader))[2])["body"] == "body"


async def test_offers_to_change_the_protocol_are_declined():
    async with Site() as site:
        reader, writer = await site.connect()
        offer = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AA")
        whole = post(b"a body", "/echo", *offer)
        writer.write(whole[:-3])
        await writer.drain()
        writer.write(whole[-3:] + GET)
        assert json.loads((await answer(reader))[2])["body"] == "a body"
        assert (await answer(reader))[0] == 200


@pytest.mark.parametrize("blank", [" ", "\t", "  "])
async def test_a_body_beside_such_an_offer_is_never_taken_for_a_request(blank):
    """Some proxies pass blanks after a length on; the parser lets them through too."""
    async with Site() as site:
        reader, writer = await site.connect()
        length = f"Content-Length: {len(GET)}{blank}"
        lines = ("POST /echo HTTP/1.1", "Connection: upgrade", "Upgrade: x", length, "", "")
        writer.write("\r\n".join(lines).encode() + GET + post(b"next"))
        assert json.loads((await answer(reader))[2])["body"] == GET.decode()
        assert json.loads((await answer(reader))[2])["body"] == "next"


CHUNKED_HEAD = b"POST /echo HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n"


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GET /echo\r\n\r\n", 505),
        (b"\x16\x03\x01 no HTTP at all\r\n\r\n", 400),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
        (b"GET /echo HTTP/1.1\r\nHost: h\r\n bad\r\nname\x00: x\r\n\r\n", 400),
        (b"POST /echo HTTP/1.1\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabcd", 400),
        (CHUNKED_HEAD + b"Content-Length: 3\r\n\r\nabc", 400),
        (CHUNKED_HEAD + b"\r\nxyz\r\n", 400),
        (CHUNKED_HEAD + b"Connection: upgrade\r\nUpgrade: h2c\r\n\r\n1\r\na\r\n0\r\n\r\n", 400),
        (b"GET /echo HTTP/1.1\r\nX-A: " + b"a" * 400_000, 431),
        (CHUNKED_HEAD + b"\r\n1;" + b"a" * 400_000, 431),
        (CHUNKED_HEAD.replace(b"1.1", b"1.0") + b"Connection: keep-alive\r\n\r\n0\r\n\r\n", 400),
        (b"GET http://[ HTTP/1.1\r\n\r\n", 400),
        (b"CONNECT h:80 HTTP/1.1\r\n\r\n", 400),
        (post(b"x" * (MAX_BODY_BYTES + 1)), 413),
        (post(b"")[:-4].replace(b"Length: 0", b"Length: 99999999999") + b"\r\n\r\n", 413),
        (CHUNKED_HEAD + b"\r\n" + b"1f4\r\n" + b"x" * 500 + b"\r\n1f5\r\n" + b"x" * 501, 413),
    ],
)
async def test_what_cannot_be_read_is_refused_and_ends_the_connection(sent, status):
    async with Site() as site:
        reader, writer = await site.connect()
        writer.write(GET + sent)
        assert (await answer(reader))[0] == 200
        got, headers, body = await answer(reader)
        assert (got, headers["Connection"]) == (status, "close")
        message = json.loads(body)["error"]["message"]
        assert message
        assert "callback" not in message  # of the parser: that is no client's concern
        writer.write(b"x" * 100_000)  # it is still coming: nobody minds
        assert await closed(reader)


async def test_a_refused_body_is_read_over_and_the_connection_kept():
    async with Site() as site:
        reader, writer = await site.connect()
        writer.write(post(b"body", "/nowhere") + post(b"body", "/wait"))
        assert (await answer(reader))[0] == 404
        status, headers, _ = await answer(reader)
        assert (status, headers["Allow"]) == (405, "GET")
        writer.write(post(b"zip", "/echo", "Content-Encoding: gzip"))
        assert (await answer(reader))[0] == 415
        writer.write(GET)
        assert (await answer(reader))[0] == 200


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


async def test_a_stream_that_fails_is_not_taken_for_a_whole_one(caplog):
    async with Site() as site:
        reader, writer = await site.connect()
        writer.write(GET.replace(b"/echo", b"/broken"))
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await answer(reader)
        assert "bug" in caplog.text


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


async def test_an_answer_that_cannot_be_sent_ends_its_connection_and_is_logged(caplog):
    async with Site() as site:

        async def odd(request):
            return Response(b"", headers={"X-A": "\ud800"})

        site.server.answer = odd
        reader, writer = await site.connect()
        writer.write(GET)
        assert await closed(reader)
        assert "cannot be sent" in caplog.text


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
