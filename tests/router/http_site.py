"""A small site on the server to clients, and its clients, byte by byte over real connections."""

import asyncio
import socket
from collections.abc import Callable

from cluster.settings import GatewaySettings
from router.counts import ConnectionCounts, RequestCounts
from router.edge import Edge, Route, json_response
from router.http_server import HttpServer

MAX_BODY_BYTES = 1000
WRITE_TIMEOUT_S = 60.0


class Site:
    """A server with a few endpoints, and connections to it.

    /echo tells what it got; /stream sends what `pieces` gives; /wait never ends

    answer   answers every request; a test may put another in its place
    """

    def __init__(
        self,
        max_connections: int = 100,
        max_body_bytes: int = MAX_BODY_BYTES,
        max_held_body_bytes: int = 1 << 20,
    ) -> None:
        self.pieces: list[bytes] = [b"one", b"two"]
        self.began = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.sent = 0
        settings = GatewaySettings(
            max_connections=max_connections,
            max_body_bytes=max_body_bytes,
            max_held_body_bytes=max_held_body_bytes,
        )
        edge = Edge(settings, RequestCounts())
        edge.add(
            [
                Route("POST", "/echo", self._echo),
                Route("GET", "/echo", self._echo),
                Route("POST", "/stream", self._stream),
                Route("GET", "/wait", self._wait),
                Route("POST", "/wait", self._wait),
                Route("GET", "/broken", self._broken),
            ]
        )
        self.answer = edge.answer
        self.server = HttpServer(
            edge.service()._replace(answer=lambda request: self.answer(request)),
            max_connections=max_connections,
            write_timeout_s=WRITE_TIMEOUT_S,
            max_held_bytes=settings.max_held_body_bytes,
            counts=ConnectionCounts(),
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
        assert not self.server.held_bytes

    async def connect(self, receive_bytes: int = 0):
        """`receive_bytes`: so much the client's system takes ahead of it; 0: as it likes."""
        client = socket.socket()
        client.setblocking(False)
        if receive_bytes:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        await asyncio.get_running_loop().sock_connect(client, (self._host, self._port))
        reader, writer = await asyncio.open_connection(sock=client)
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
CHUNKED_HEAD = b"POST /echo HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n"


async def sweep_until(server: HttpServer, timeout_s: float, is_cut: Callable[[], bool]) -> None:
    """Let time go by, `timeout_s` at once, until a client that takes nothing is cut off."""
    now = asyncio.get_running_loop().time()
    server.sweep(now)
    async with asyncio.timeout(30):
        while not is_cut():
            now += timeout_s
            server.sweep(now)
            await asyncio.sleep(0)  # the system may still have been taking some


async def closed(reader) -> bool:
    async with asyncio.timeout(10):
        try:
            return await reader.read() == b""
        except ConnectionError:
            return True
