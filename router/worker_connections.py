"""HTTP/1.1 to workers: kept connections, answers that can be read while they come.

It does what the way to a worker needs and nothing else: `POST` with a body that is at hand. An
answer's head is parsed once, its body is only freed from its framing, and whoever reads a
stream is woken at most once every `GATHER_S` while pieces come in quick succession.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections import defaultdict
from collections.abc import Mapping
from typing import cast
from urllib.parse import urlsplit

from router.http_bodies import ChunkedBody, MalformedBody, SizedBody

IDLE_S = 15.0
"""Idle connections are given up before workers close them."""

GATHER_S = 0.001
"""Pieces that come within so long of those read last are read together. Tokens of one sequence
are several times as far apart; it spares wake-ups and packets where a worker sends in bursts."""

MAX_HEAD_BYTES = 65_536
HIGH_WATER_BYTES = 262_144
"""A worker is not read from while so much of its answer waits for the client."""


class WorkerUnreachable(OSError):
    """No connection to the worker could be made."""


class WorkerLost(OSError):
    """The connection ended before the answer was complete, or what came is no HTTP."""


class WorkerAnswer:
    """One answer: `status` and `headers` (names in lower case) first, the body as it comes."""

    def __init__(self, connection: _Connection) -> None:
        self._connection = connection
        self.status = connection.status
        self.headers = connection.headers

    @property
    def ended(self) -> bool:
        """Whether all has been read."""
        return self._connection.read_to_end

    async def some(self) -> bytes:
        """What has come since, b"" at the end. Raises WorkerLost."""
        return await self._connection.some()

    async def read(self) -> bytes:
        """The whole body. Raises WorkerLost."""
        parts = []
        while part := await self._connection.some():
            parts.append(part)
        return b"".join(parts)

    def close(self) -> None:
        """Keep the connection where the answer was read to its end, else cut it: that cancels
        the request at the worker."""
        self._connection.give_back()


class WorkerConnections:
    """Connections to workers, by address. Use it in the event loop only.

    headers             sent with every request
    connect_timeout_s   for a worker to accept a connection
    """

    def __init__(self, headers: Mapping[str, str], connect_timeout_s: float) -> None:
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self._connect_timeout_s = connect_timeout_s
        self._idle: dict[str, list[_Connection]] = defaultdict(list)
        self._all: set[_Connection] = set()

    async def post(
        self, address: str, path: str, body: bytes, first_byte_timeout_s: float
    ) -> WorkerAnswer:
        """Send, and wait for the answer's head.

        address   base URL, such as "http://10.0.0.7:41235"

        Raises WorkerUnreachable, WorkerLost, and TimeoutError where the head is not there in time.
        """
        connection = self._kept(address) or await self._connect(address)
        head = (
            f"POST {path} HTTP/1.1\r\nHost: {connection.host}\r\n{self._headers}"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        try:
            await connection.send(head.encode(), body, first_byte_timeout_s)
        except BaseException:
            connection.give_back()
            raise
        return WorkerAnswer(connection)

    def close(self) -> None:
        """Cut every connection."""
        for connection in list(self._all):
            connection.cut()

    def _kept(self, address: str) -> _Connection | None:
        idle = self._idle.get(address)
        oldest = time.monotonic() - IDLE_S
        while idle:
            connection = idle.pop()  # the one that was used last
            if connection.idle_since >= oldest and connection.usable:
                return connection
            connection.cut()
        return None

    async def _connect(self, address: str) -> _Connection:
        url = urlsplit(address)
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                _, connection = await loop.create_connection(
                    lambda: _Connection(self, address, url.netloc),
                    url.hostname or "",
                    url.port or 80,
                )
        except (OSError, TimeoutError, ValueError) as error:
            raise WorkerUnreachable(f"{address}: {error or 'no answer in time'}") from error
        return connection

    def _made(self, connection: _Connection) -> None:
        self._all.add(connection)

    def _keep(self, connection: _Connection) -> None:
        self._idle[connection.address].append(connection)

    def _lost(self, connection: _Connection) -> None:
        self._all.discard(connection)
        idle = self._idle.get(connection.address)
        if idle and connection in idle:
            idle.remove(connection)
            if not idle:
                del self._idle[connection.address]


class _Connection(asyncio.Protocol):
    """One connection, with at most one request under way.

    host   for the header of that name
    """

    def __init__(self, owner: WorkerConnections, address: str, host: str) -> None:
        self.address = address
        self.host = host
        self.idle_since = 0.0
        self.status = 0
        self.headers: dict[str, str] = {}
        self._owner = owner
        self._loop = asyncio.get_running_loop()
        self.transport: asyncio.Transport
        self._head = b""
        self._body: ChunkedBody | SizedBody | None = None
        self._keeps_alive = True
        self._parts: list[bytes] = []
        self._waiting_bytes = 0
        self._paused = False
        self._waiter: asyncio.Future[None] | None = None
        self._wake_later: asyncio.TimerHandle | None = None
        self._read_at = 0.0
        self._trouble: WorkerLost | TimeoutError | None = None
        self._in_use = False
        self._lost = False

    # What the owner does

    @property
    def usable(self) -> bool:
        """Whether another request can be sent."""
        return not self._lost and not self.transport.is_closing()

    @property
    def read_to_end(self) -> bool:
        """Whether the answer is complete and all of it was read."""
        return self._body is not None and self._body.ended and not self._parts

    async def send(self, head: bytes, body: bytes, timeout_s: float) -> None:
        """Send a request and wait until the head of its answer is there, for `timeout_s`."""
        self._in_use = True
        self.status = 0
        self.headers = {}
        self._head = b""
        self._body = None
        self._keeps_alive = True
        if len(body) < 16_384:
            self.transport.write(head + body)
        else:
            self.transport.writelines((head, body))
        too_late = self._loop.call_later(timeout_s, self._be_too_late)
        try:
            while not self.status:
                await self._wait()
        finally:
            too_late.cancel()

    async def some(self) -> bytes:
        """What has come, b"" at the end."""
        while not self._parts:
            if self._body is not None and self._body.ended:
                return b""
            await self._wait()
        parts, self._parts = self._parts, []
        self._waiting_bytes = 0
        self._read_at = time.monotonic()
        if self._paused and not self._lost:
            self._paused = False
            self.transport.resume_reading()
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def give_back(self) -> None:
        """Keep the connection if its answer is complete, else cut it. Once a request."""
        if not self._in_use:
            return
        self._in_use = False
        if self._wake_later is not None:
            self._wake_later.cancel()
            self._wake_later = None
        if self.read_to_end and self._keeps_alive and self.usable:
            self.idle_since = time.monotonic()
            self._owner._keep(self)
        else:
            self.cut()

    def cut(self) -> None:
        """Close the connection at once."""
        if not self._lost:
            self.transport.abort()

    async def _wait(self) -> None:
        if self._trouble is not None:
            raise self._trouble
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    # What the event loop says

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self._owner._made(self)
        sock: socket.socket | None = transport.get_extra_info("socket")
        if sock is not None:
            notice_dead_peers(sock)

    def data_received(self, data: bytes) -> None:
        try:
            if self._body is None:
                data = self._take_head(data)
            if self._body is not None and data:
                self._take_body(data)
        except (MalformedBody, UnicodeDecodeError, ValueError) as error:
            self._fail(WorkerLost(f"what came is no HTTP answer: {error}"))
            self.transport.abort()

    def _take_body(self, data: bytes) -> None:
        body = self._body
        assert body is not None
        if body.ended:
            raise MalformedBody("bytes follow the answer's end")
        content = body.feed(data)
        if content:
            self._parts.append(content)
            self._waiting_bytes += len(content)
            if self._waiting_bytes > HIGH_WATER_BYTES and not self._paused:
                self._paused = True
                self.transport.pause_reading()
        if content or body.ended:
            self._wake(at_once=body.ended or self._paused)

    def eof_received(self) -> None:
        return None

    def connection_lost(self, error: Exception | None) -> None:
        self._lost = True
        self._owner._lost(self)
        body = self._body
        if isinstance(body, SizedBody) and body.until_closed:
            body.ended = True
            self._wake(at_once=True)
        elif body is None or not body.ended:
            self._fail(WorkerLost(f"the connection ended: {error or 'closed by the worker'}"))

    def _take_head(self, data: bytes) -> bytes:
        """Parse the head once it is whole; returns what follows it."""
        self._head += data
        end = self._head.find(b"\r\n\r\n")
        if end < 0:
            if len(self._head) > MAX_HEAD_BYTES:
                raise MalformedBody("the head is too long")
            return b""
        head, rest, self._head = self._head[:end], self._head[end + 4 :], b""
        lines = head.decode("latin-1").split("\r\n")
        if not head.count(b"\r") == head.count(b"\n") == len(lines) - 1:
            raise MalformedBody("a line break stands alone in the head")  # clients get headers
        version, _, after = lines[0].partition(" ")
        if not version.startswith("HTTP/1."):
            raise MalformedBody(f"not a status line: {lines[0][:40]!r}")
        status = int(after[:3])
        if 100 <= status < 200:
            return self._take_head(rest) if rest else b""
        headers = {}
        for line in lines[1:]:
            name, colon, value = line.partition(":")
            if not colon:
                raise MalformedBody(f"not a header: {line[:40]!r}")
            headers[name.lower()] = value.strip()
        self.headers = headers
        length, coding = headers.get("content-length"), headers.get("transfer-encoding")
        if coding is not None:
            if coding.lower() != "chunked":
                raise MalformedBody(f"the transfer coding {coding!r} was not asked for")
            self._body = ChunkedBody()
        elif status in (204, 304):
            self._body = SizedBody(0)
        else:
            if length is not None and not length.isdecimal():
                raise MalformedBody(f"not a length: {length!r}")
            self._body = SizedBody(None if length is None else int(length))
        connection = headers.get("connection", "").lower()
        self._keeps_alive = connection != "close" and version != "HTTP/1.0"
        self.status = status
        self._wake(at_once=True)
        return rest

    def _be_too_late(self) -> None:
        if not self.status:  # the head may have come in this very turn of the loop
            self._fail(TimeoutError())

    def _fail(self, trouble: WorkerLost | TimeoutError) -> None:
        self._trouble = self._trouble or trouble
        self._wake(at_once=True)

    def _wake(self, *, at_once: bool) -> None:
        """Wake the reader, now or when `GATHER_S` have passed since it read last."""
        if self._waiter is None or self._waiter.done():
            return
        if not at_once:
            if self._wake_later is not None:
                return
            soon = self._read_at + GATHER_S - time.monotonic()
            if soon > 0:
                self._wake_later = self._loop.call_later(soon, self._wake_now)
                return
        self._wake_now()

    def _wake_now(self) -> None:
        if self._wake_later is not None:
            self._wake_later.cancel()
            self._wake_later = None
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def notice_dead_peers(sock: socket.socket) -> None:
    """Have the system notice within some 12 s when the worker's machine is gone."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_KEEPIDLE"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 6)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
