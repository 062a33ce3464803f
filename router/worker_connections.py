"""HTTP/1.1 client for workers, with keep-alive connections and streamed responses.

It supports only what a gateway sends to workers: `POST` with a complete body. `httptools` (llhttp)
parses the responses. While pieces arrive in quick succession, the reader of a stream is woken at
most once per `GATHER_S`.
"""

from __future__ import annotations

import asyncio
import math
import socket
import time
from collections import defaultdict
from collections.abc import Mapping
from typing import cast
from urllib.parse import urlsplit

import httptools

IDLE_S = 15.0
"""Connections that were idle for longer are not used again: workers are about to close them."""

GATHER_S = 0.001
"""Pieces that arrive within this time after the last read are read together. Tokens of one sequence
are several times as far apart; it saves wake-ups and packets when a worker sends in bursts."""

MAX_FRAMING_BYTES = 65_536
"""Most bytes of headers, and of chunk sizes or trailers without content between them."""

HIGH_WATER_BYTES = 262_144
"""Reading from a worker pauses while more bytes of its response wait for the client."""


class WorkerUnreachable(OSError):
    """No connection to the worker could be made."""


class WorkerLost(OSError):
    """The connection ended before the response was complete, or the response is not valid HTTP."""


class WorkerStalled(WorkerLost):
    """The worker gives no sign of life, or its response stands still."""


class WorkerAnswer:
    """One response: `status` and `headers` (names in lower case) first, the body as it arrives."""

    def __init__(self, connection: _Connection) -> None:
        self._connection = connection
        self.status = connection.status
        self.headers = connection.headers

    @property
    def ended(self) -> bool:
        """Whether the whole body has been read."""
        return self._connection.read_to_end

    async def some(self) -> bytes:
        """The bytes received since the last read, b"" at the end. Raises WorkerLost."""
        return await self._connection.some()

    async def read(self) -> bytes:
        """The whole body. Raises WorkerLost."""
        parts = []
        while part := await self._connection.some():
            parts.append(part)
        return b"".join(parts)

    def close(self) -> None:
        """Keep the connection if the response was read to its end. Otherwise cut it, which cancels
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
        self._all: defaultdict[str, set[_Connection]] = defaultdict(set)
        self._heard_at: dict[str, float] = {}

    async def post(
        self, address: str, path: str, body: bytes, first_byte_timeout_s: float
    ) -> WorkerAnswer:
        """Send a request, and wait for the headers of the response.

        address   base URL, such as "http://10.0.0.7:41235"

        Raises WorkerUnreachable, WorkerLost, and TimeoutError if the headers do not arrive in time.
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

    def heard_at(self, address: str) -> float:
        """When the last byte came from the worker (`time.monotonic()`); 0 without connections."""
        return self._heard_at.get(address, 0.0)

    def fail(self, address: str, error: WorkerLost) -> None:
        """Fail all requests under way at the worker, and close its connections."""
        for connection in list(self._all.get(address, ())):
            connection.fail(error)

    def fail_quiet(self, longest_s: float) -> None:
        """Fail responses that have begun and then sent nothing for longer, while someone waits."""
        oldest = time.monotonic() - longest_s
        for connection in self._connections():
            if connection.waits_since < oldest:
                connection.fail(WorkerStalled(f"the response stood still for {longest_s:g} s"))

    def close(self) -> None:
        """Cut every connection."""
        for connection in self._connections():
            connection.cut()

    def _connections(self) -> list[_Connection]:
        return [connection for each in self._all.values() for connection in each]

    def _kept(self, address: str) -> _Connection | None:
        idle = self._idle.get(address)
        oldest = time.monotonic() - IDLE_S
        while idle:
            connection = idle.pop()  # the most recently used one
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
            raise WorkerUnreachable(f"{address}: {str(error) or 'no response in time'}") from error
        return connection

    def _made(self, connection: _Connection) -> None:
        self._all[connection.address].add(connection)

    def _hears(self, address: str, now: float) -> None:
        self._heard_at[address] = now

    def _keep(self, connection: _Connection) -> None:
        self._idle[connection.address].append(connection)

    def _lost(self, connection: _Connection) -> None:
        address = connection.address
        there = self._all[address]
        there.discard(connection)
        if not there:
            del self._all[address]
            self._heard_at.pop(address, None)
        idle = self._idle[address]
        if connection in idle:
            idle.remove(connection)
        if not idle:
            del self._idle[address]


class _Malformed(Exception):
    """Valid HTTP, but not a response that a worker may send."""


class _Connection(asyncio.Protocol):
    """One connection, with at most one request under way. `httptools` calls the `on_` methods.

    host         value of the `Host` header
    status       status of the response, 0 until its headers are complete
    headers      headers of the response
    read_to_end  whether the response is complete and was read to its end
    """

    def __init__(self, owner: WorkerConnections, address: str, host: str) -> None:
        self.address = address
        self.host = host
        self.idle_since = 0.0
        self.status = 0
        self.headers: dict[str, str] = {}
        self.transport: asyncio.Transport
        self._owner = owner
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpResponseParser(self)
        self._in_use = False
        self._complete = True  # no response is expected before a request
        self._until_closed = False
        self._keeps_alive = True
        self._parts: list[bytes] = []
        self._waiting_bytes = 0
        self._framing_bytes = 0  # received since the last byte of content
        self._paused = False
        self._waiter: asyncio.Future[None] | None = None
        self._waits_since = 0.0
        self._wake_later: asyncio.TimerHandle | None = None
        self._read_at = 0.0
        self._failure: WorkerLost | TimeoutError | None = None
        self._lost = False

    # Called by the owner and by WorkerAnswer

    @property
    def usable(self) -> bool:
        """Whether another request can be sent."""
        return not self._lost and not self.transport.is_closing()

    @property
    def read_to_end(self) -> bool:
        return self._complete and not self._parts

    async def send(self, head: bytes, body: bytes, timeout_s: float) -> None:
        """Send a request and wait up to `timeout_s` for the headers of its response."""
        self._in_use = True
        self.status = self._framing_bytes = 0
        self._complete = False
        if len(body) < 16_384:
            self.transport.write(head + body)
        else:
            self.transport.writelines((head, body))
        too_late = self._loop.call_later(timeout_s, self._time_out)
        try:
            while not self.status:
                await self._wait()
        finally:
            too_late.cancel()

    async def some(self) -> bytes:
        """The bytes received since the last read, b"" at the end."""
        while not self._parts:
            if self._complete:
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
        """Keep the connection if its response is complete and read, otherwise cut it."""
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

    @property
    def waits_since(self) -> float:
        """Since when a reader waits for the next piece of a response that has begun; else inf."""
        return self._waits_since if self._waiter is not None and self.status else math.inf

    def fail(self, error: WorkerLost) -> None:
        """Close the connection; the request under way fails with `error`."""
        if self._in_use and not self._complete:
            self._fail(error)
        self.cut()

    def cut(self) -> None:
        """Close the connection at once."""
        if not self._lost:
            self.transport.abort()

    async def _wait(self) -> None:
        if self._failure is not None:
            raise self._failure
        self._waiter = self._loop.create_future()
        self._waits_since = time.monotonic()
        try:
            await self._waiter
        finally:
            self._waiter = None

    # Called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self._owner._made(self)
        sock: socket.socket | None = transport.get_extra_info("socket")
        if sock is not None:
            notice_dead_peers(sock)

    def data_received(self, data: bytes) -> None:
        self._owner._hears(self.address, time.monotonic())
        had_status, waiting_bytes = self.status, self._waiting_bytes
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._refuse(str(error.__context__ or error))
            return
        if self._waiting_bytes != waiting_bytes:
            self._framing_bytes = 0
            if self._waiting_bytes > HIGH_WATER_BYTES and not self._paused:
                self._paused = True
                self.transport.pause_reading()
        elif not self._complete:
            self._framing_bytes += len(data)
            if self._framing_bytes > MAX_FRAMING_BYTES:
                self._refuse("its headers or the framing of its body are too long")
                return
            if self.status == had_status:
                return  # nothing to read yet
        self._wake(at_once=self._complete or self._paused or not had_status)

    def connection_lost(self, error: Exception | None) -> None:
        self._lost = True
        self._owner._lost(self)
        if self._until_closed and self.status and not error:
            self._complete = True
        if not self._complete:
            self._fail(WorkerLost(f"the connection ended: {error or 'closed by the worker'}"))
        self._wake(at_once=True)

    # Called by the parser

    def on_message_begin(self) -> None:
        if self._complete:
            raise _Malformed("extra bytes after the end of the response")
        self.headers = {}

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.status:  # else it is a trailer
            self.headers[name.decode("latin-1").lower()] = value.decode("latin-1").rstrip()

    def on_headers_complete(self) -> None:
        parser, headers = self._parser, self.headers
        status = parser.get_status_code()
        if 100 <= status < 200:
            return  # the final response follows
        version = parser.get_http_version()
        if status < 100 or version not in ("1.0", "1.1"):
            raise _Malformed(f"status {status} of HTTP/{version}")
        coding = headers.get("transfer-encoding")
        if coding is not None and coding.lower() != "chunked":
            raise _Malformed(f"the transfer coding {coding!r} was not requested")
        sized = coding is not None or "content-length" in headers or status in (204, 304)
        self._until_closed = not sized
        self._keeps_alive = parser.should_keep_alive()
        self.status = status

    def on_body(self, body: bytes) -> None:
        self._parts.append(body)
        self._waiting_bytes += len(body)

    def on_message_complete(self) -> None:
        if self.status:  # otherwise the message was an interim response
            self._complete = True

    # Waking the reader

    def _time_out(self) -> None:
        if not self.status:  # the headers may have arrived in this turn of the loop
            self._fail(TimeoutError())

    def _refuse(self, reason: str) -> None:
        self._fail(WorkerLost(f"not a valid HTTP response: {reason}"))
        self.transport.abort()

    def _fail(self, failure: WorkerLost | TimeoutError) -> None:
        self._failure = self._failure or failure
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
    """Make the system notice within some 12 s that the peer's machine is gone."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_KEEPIDLE"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 6)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
