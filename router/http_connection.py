"""One client's connection: it parses requests, sends their responses in order, and tracks the bytes
that the client has not received yet."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, Protocol, cast
from urllib.parse import unquote

import httptools

from cluster.protocol import RequestError
from router.http_messages import ClientGone, Handler, Request, Response, whole
from router.socket_state import in_flight_bytes, was_reset

log = logging.getLogger(__name__)

MAX_HEAD_BYTES = 65_536
"""Longest request line and headers together."""

FRAMING_PER_BYTE = 8
"""Bytes of chunk framing allowed in addition for each byte of a body."""

MAX_AHEAD = 8
"""While this many requests of a connection wait for their turn, the connection is not read, and its
end is not noticed."""

LINGER_S = 2.0
"""After a response that was sent before its request was complete, the rest of the request is
discarded for this time: closing at once would make the kernel drop the response."""

FIRST_CHECK_S = 0.05
LAST_CHECK_S = 5.0
"""Times between checks whether a client that sends no more has left; each is twice the former."""

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class Service(NamedTuple):
    """Handles requests; shared by all connections.

    admit            checks a request when its headers are complete: sets `handler` or `refusal`
    answer           responds to a complete request. Must not raise except when cancelled
    malformed        makes the refusal of a request that cannot be parsed, of a reason and a status
    too_large        the refusal of a body over max_body_bytes
    too_much         the refusal of a body that the owner does not hold
    full             the response to a connection that the owner does not accept
    """

    admit: Callable[[Request], None]
    answer: Handler
    malformed: Callable[[str, int], RequestError]
    too_large: RequestError
    max_body_bytes: int
    too_much: RequestError
    full: Response


class Owner(Protocol):
    """Tracks the connections, and is notified of their changes."""

    @property
    def closing(self) -> bool:
        """Whether connections are closed after their next response."""

    def opened(self, connection: ClientConnection) -> bool:
        """The connection is open. Returns whether its requests will be served."""

    def busy(self, connection: ClientConnection) -> None:
        """The connection has requests to respond to."""

    def idle_since_now(self, connection: ClientConnection) -> None:
        """The connection has responded to all its requests."""

    def heard(self, connection: ClientConnection) -> None:
        """`heard_at` has changed."""

    def lost(self, connection: ClientConnection) -> None:
        """The connection has ended."""

    def hold(self, count: int) -> bool:
        """Count the bytes of a body, if there is room for them. Returns whether there is."""

    def release(self, count: int) -> None:
        """Bytes that were counted are not held any more."""


class ClientConnection(asyncio.Protocol):
    """One client's connection.

    headers    headers of the request that is arriving
    task       responds to the requests that have arrived; None while there are none
    heard_at   time of the last progress (`_loop.time()`): a request began, its headers were
               complete, bytes of a body arrived, or a response ended
    """

    def __init__(self, service: Service, owner: Owner) -> None:
        self.transport: asyncio.Transport
        self.headers: dict[str, str] = {}
        self.task: asyncio.Task[None] | None = None
        self.heard_at = 0.0
        self._service = service
        self._owner = owner
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpRequestParser(self)
        self._url = b""
        self._framing_bytes = 0  # of the arriving request: all but its body
        self._coming: Request | None = None  # its headers are complete, its body is not
        self._body = bytearray()  # a list of many small chunks would take many times as much
        self._body_bytes = 0  # of the body, stored or discarded
        self._unframed = 0  # bytes of a body that the parser does not handle
        self._waiting: deque[Request] = deque()
        self._answering: Request | None = None  # its response is not complete
        self._may_write: asyncio.Future[None] | None = None
        self._written_bytes = 0
        self._taken_bytes = -1  # those that the client had received at the last check; -1: all
        self._moved_at = 0.0  # when `_taken_bytes` last changed
        self._paused = False
        self._throws_away = False
        self._lost = False

    # Called by responses

    @property
    def remote(self) -> str:
        """The client's address, "" if it is unknown."""
        peer = self.transport.get_extra_info("peername")
        return str(peer[0]) if isinstance(peer, tuple) else ""

    def send(self, data: bytes) -> None:
        """Raises ClientGone."""
        if self._lost or self.transport.is_closing():
            raise ClientGone
        self._written_bytes += len(data)
        self.transport.write(data)

    async def drained(self) -> None:
        """Wait while the write buffer is full. Raises ClientGone."""
        if self._may_write is not None:
            await self._may_write
        if self._lost:
            raise ClientGone

    # Called by the owner

    @property
    def has_request(self) -> bool:
        """Whether a request has arrived, or its body is arriving, that is not answered yet."""
        return self.task is not None or self._coming is not None

    def cut_off(self) -> None:
        """The owner stops: the request being answered ends with an error."""
        if self.task is not None and self._answering is not None:
            self._answering.cut_off = True
            self.task.cancel()

    def stalled_s(self, now: float) -> float:
        """Time since the client last received any of the pending bytes; 0 if none is pending."""
        unsent = self.unsent_bytes
        if not unsent:
            self._taken_bytes = -1
            return 0.0
        taken = self._written_bytes - unsent - in_flight_bytes(self.transport)
        if taken != self._taken_bytes:
            self._taken_bytes = taken
            self._moved_at = now
        return now - self._moved_at

    @property
    def unsent_bytes(self) -> int:
        """Bytes of responses that are not in the kernel's socket buffer yet."""
        return self.transport.get_write_buffer_size()

    # Called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self._hear()
        if not self._owner.opened(self):
            self._throws_away = True
            if not self.transport.is_closing():
                nothing_asked = Request(self, {}, "", "", "1.1", False)
                self.transport.write(whole(self._service.full, nothing_asked))
                self._close_later()

    def connection_lost(self, error: Exception | None) -> None:
        self._lost = True
        self._owner.lost(self)
        for request in (self._coming, *self._waiting):
            self._release(request)
        self._waiting.clear()
        self.resume_writing()
        if self.task is not None:
            self.task.cancel()

    def pause_writing(self) -> None:
        self._may_write = self._loop.create_future()

    def resume_writing(self) -> None:
        if self._may_write is not None and not self._may_write.done():
            self._may_write.set_result(None)
        self._may_write = None

    def data_received(self, data: bytes) -> None:
        while data and not self._throws_away:
            if self._unframed:
                data = self._take_unframed(data)
                continue
            body_bytes = self._body_bytes
            self._framing_bytes += len(data)
            try:
                self._parser.feed_data(data)
                data = b""
            except httptools.HttpParserUpgrade as upgrade:
                # a server may ignore an upgrade: respond as if it had not been requested
                self._parser = httptools.HttpRequestParser(self)
                data = data[upgrade.args[0] :]
            except httptools.HttpParserError as error:
                if isinstance(error, httptools.HttpParserCallbackError):
                    log.warning("failed to handle a request: %r", error.__context__)
                if not self._throws_away:
                    self._give_up(str(error) or "it is not HTTP/1.1", 400)
                return
            self._framing_bytes -= max(0, self._body_bytes - body_bytes)
            if self._framing_bytes > MAX_HEAD_BYTES + FRAMING_PER_BYTE * self._body_bytes:
                self._give_up(f"its headers or chunk framing exceed {MAX_HEAD_BYTES} bytes", 431)

    def eof_received(self) -> bool:
        """The client sends no more. Returns whether the connection stays open.

        The client has left, or waits for responses. It tells by its reply to an interim response:
        if it has left, it resets the connection. Neither HTTP/1.0 nor a stream that has begun
        allows an interim response; then it counts as having left.
        """
        pending = [each for each in (self._answering, *self._waiting) if each is not None]
        if not pending or pending[0].version == "1.0":
            return False
        if (stream := pending[0].stream) is not None and stream.started:
            return False
        pending[-1].keeps_alive = False
        self.transport.write(CONTINUE)
        self._loop.call_later(FIRST_CHECK_S, self._check_left, FIRST_CHECK_S)
        return True

    # Called by the parser

    def on_message_begin(self) -> None:
        self._hear()
        self.headers = {}
        self._url = b""

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._coming is not None:
            return  # a trailer
        key = name.decode("latin-1").lower()
        text = value.decode("utf-8", "surrogateescape")
        self.headers[key] = f"{self.headers[key]}, {text}" if key in self.headers else text

    def on_headers_complete(self) -> None:
        if self._throws_away:
            return
        parser = self._parser
        self._hear()
        self._framing_bytes = 0
        try:
            path = _path(self._url)
        except httptools.HttpParserInvalidURLError:
            self._give_up("its target is not a valid URL", 400)
            return
        request = self._coming = Request(
            self,
            self.headers,
            parser.get_method().decode("latin-1"),
            path,
            parser.get_http_version(),
            parser.should_keep_alive(),
        )
        if request.version not in ("1.0", "1.1"):
            self._give_up(f"it is HTTP/{request.version}, not HTTP/1.1", 505)
            return
        if request.version == "1.0" and "transfer-encoding" in self.headers:
            self._give_up("HTTP/1.0 has no chunked bodies", 400)  # a proxy may see no body here
            return
        length = int(self.headers.get("content-length", 0))  # the parser allows trailing spaces
        self._service.admit(request)
        if length > self._service.max_body_bytes:
            self._refuse_body(self._service.too_large)
        elif request.refusal is None and not self._hold(request, length):
            self._refuse_body(self._service.too_much)
        elif parser.should_upgrade():
            if "transfer-encoding" in self.headers or request.method == "CONNECT":
                self._give_up("it asks for another protocol", 400)
            self._unframed = length
        elif self.headers.get("expect", "").lower() == "100-continue" and self.task is None:
            self.transport.write(CONTINUE)

    def on_body(self, body: bytes) -> None:
        if self._coming is None or self._throws_away:
            return
        self._hear()
        self._body_bytes += len(body)
        if self._body_bytes > self._service.max_body_bytes:
            self._refuse_body(self._service.too_large)
        elif self._coming.refusal is None:
            more = self._body_bytes - self._coming.held_bytes
            if more > 0 and not self._hold(self._coming, more):
                self._refuse_body(self._service.too_much)
            else:
                self._body += body

    def on_message_complete(self) -> None:
        request = self._coming
        if self._throws_away or request is None or self._unframed:
            return
        request.body = bytes(self._body)
        self._body.clear()
        self._coming = None
        self._body_bytes = self._framing_bytes = 0
        self._enqueue(request)

    def _hold(self, request: Request, count: int) -> bool:
        if not self._owner.hold(count):
            return False
        request.held_bytes += count
        return True

    def _release(self, request: Request | None) -> None:
        if request is not None and request.held_bytes:
            self._owner.release(request.held_bytes)
            request.held_bytes = 0

    def _hear(self) -> None:
        """Record progress of the connection."""
        self.heard_at = self._loop.time()
        self._owner.heard(self)

    def _enqueue(self, request: Request) -> None:
        self._waiting.append(request)
        if self.task is None:
            self._owner.busy(self)
            self.task = self._loop.create_task(self._answer_waiting())
        elif len(self._waiting) >= MAX_AHEAD and not self._paused:
            self._paused = True
            self.transport.pause_reading()  # until their turn has come

    def _check_left(self, after_s: float) -> None:
        if self._lost or self.transport.is_closing():
            return
        if was_reset(self.transport):
            self.transport.abort()
            return
        next_s = min(2 * after_s, LAST_CHECK_S)
        self._loop.call_later(next_s, self._check_left, next_s)

    def _take_unframed(self, data: bytes) -> bytes:
        body, rest = data[: self._unframed], data[self._unframed :]
        self._unframed -= len(body)
        self.on_body(body)
        if not self._unframed:
            self.on_message_complete()
        return rest

    # Answers

    async def _answer_waiting(self) -> None:
        waiting = self._waiting
        try:
            while waiting:
                request = self._answering = waiting.popleft()
                request.keeps_alive &= not self._owner.closing
                try:
                    response = await self._service.answer(request)
                finally:
                    self._release(request)
                if response is not None:
                    self.send(whole(response, request))
                elif request.stream is None or not request.stream.ended:
                    self.transport.abort()  # the client must not take it for a complete response
                    return
                self._answering = None
                if self._may_write is not None:
                    await self.drained()  # before the next response
                if not request.keeps_alive or self._owner.closing:
                    break
        except ClientGone:
            return
        except Exception:
            log.exception("failed to send a response")
            self.transport.abort()
            return
        finally:
            self.task = self._answering = None
            if not self._lost:
                self._owner.idle_since_now(self)
            self._hear()
        if self._throws_away:
            self._close_later()
        elif not request.keeps_alive or self._owner.closing:
            self.transport.close()
        elif self._paused:
            self._paused = False
            self.transport.resume_reading()

    def _refuse_body(self, error: RequestError) -> None:
        """Refuse a request before its body has arrived."""
        request = self._coming
        assert request is not None
        request.refusal = request.refusal or error
        request.keeps_alive = False
        self._throws_away = True
        self._body.clear()
        self._enqueue(request)

    def _give_up(self, reason: str, status: int) -> None:
        """The input cannot be parsed: refuse it after the pending responses, and close."""
        refusal = Request(self, {}, "", "", "1.1", keeps_alive=False)
        refusal.refusal = self._service.malformed(reason, status)
        self._throws_away = True
        self._enqueue(refusal)

    def _close_later(self) -> None:
        if not self._lost:
            if self._paused:
                self.transport.resume_reading()
            if self.transport.can_write_eof():
                self.transport.write_eof()
            self._loop.call_later(LINGER_S, self.transport.close)


def _path(url: bytes) -> str:
    raw = url.partition(b"?")[0] if url[:1] == b"/" else httptools.parse_url(url).path or b"/"
    path = raw.decode("latin-1")
    return unquote(path) if "%" in path else path
