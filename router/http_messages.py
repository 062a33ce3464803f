"""Requests of clients, and their responses as bytes of HTTP/1.1: whole or streamed."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from email.utils import formatdate
from http import HTTPStatus
from typing import Protocol

from cluster.protocol import RequestError

END = b"0\r\n\r\n"

_REASONS = {status.value: status.phrase for status in HTTPStatus}


class ClientGone(Exception):
    """The client closed its connection while its response was being written."""


class Connection(Protocol):
    """Sends bytes to a client."""

    @property
    def remote(self) -> str:
        """The client's address."""

    def send(self, data: bytes) -> None:
        """Raises ClientGone."""

    async def drained(self) -> None:
        """Wait while the write buffer is full. Raises ClientGone."""


class Response:
    """A whole response."""

    __slots__ = ("body", "headers", "status")

    def __init__(
        self, body: bytes, status: int = 200, headers: Mapping[str, str] | None = None
    ) -> None:
        self.body = body
        self.status = status
        self.headers = headers or {}


class Request:
    """A request whose body is complete.

    path       without the query, decoded
    headers    names in lower case; repeated ones joined by commas
    endpoint   name of the endpoint, for metrics; set by the router of paths
    argument   the rest of the path, if the endpoint takes one
    response_headers   added to every response to it
    allowed    methods of the path, if it does not accept this one
    cut_off    the server has cancelled its handler, because it stops
    held_bytes   of its body, as counted by the server
    """

    __slots__ = (
        *("method", "path", "version", "keeps_alive", "headers", "body"),
        *("endpoint", "argument", "allowed", "handler", "refusal", "cut_off", "held_bytes"),
        *("stream", "response_headers", "_connection"),
    )

    def __init__(
        self,
        connection: Connection,
        headers: dict[str, str],
        method: str,
        path: str,
        version: str,
        keeps_alive: bool,
    ) -> None:
        self.method = method
        self.path = path
        self.version = version
        self.keeps_alive = keeps_alive
        self.headers = headers
        self.body = b""
        self.endpoint = "none"
        self.argument = ""
        self.allowed = ""
        self.handler: Handler | None = None
        self.refusal: RequestError | None = None
        self.cut_off = False
        self.held_bytes = 0
        self.stream: Stream | None = None
        self.response_headers: dict[str, str] = {}
        self._connection = connection

    @property
    def remote(self) -> str:
        """The client's address, "" if it is unknown."""
        return self._connection.remote

    def begin(self, headers: Mapping[str, str]) -> Stream:
        """Begin a streamed response with status 200. Its headers are sent with the first piece."""
        self.stream = Stream(self._connection, self, headers)
        return self.stream


Handler = Callable[[Request], Awaitable[Response | None]]
"""Returns the response to a request; None if it was streamed."""


class Stream:
    """A streamed response. Its methods raise ClientGone."""

    __slots__ = ("_chunked", "_connection", "_head", "ended")

    def __init__(
        self, connection: Connection, request: Request, headers: Mapping[str, str]
    ) -> None:
        self._connection = connection
        self._chunked = request.version != "1.0"
        if not self._chunked:
            request.keeps_alive = False  # the end of the connection ends the response
        framing = "Transfer-Encoding: chunked\r\n" if self._chunked else ""
        self._head = _head(200, headers, framing, request)
        self.ended = False

    @property
    def started(self) -> bool:
        """Whether anything was sent; then no other response is possible."""
        return not self._head

    async def write(self, data: bytes) -> None:
        """Send, and wait while the write buffer is full."""
        if data:
            self._send(self._framed(data))
            await self._connection.drained()

    def end(self, data: bytes = b"") -> None:
        """Send the last piece and the end of the response."""
        last = self._framed(data) if data else b""
        self.ended = True
        self._send(last + END if self._chunked else last)

    def _framed(self, data: bytes) -> bytes:
        return b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data

    def _send(self, data: bytes) -> None:
        if self._head:
            data, self._head = self._head + data, b""
        self._connection.send(data)


def whole(response: Response, request: Request) -> bytes:
    """A whole response as bytes; without its body for HEAD."""
    length = f"Content-Length: {len(response.body)}\r\n"
    head = _head(response.status, response.headers, length, request)
    return head if request.method == "HEAD" else head + response.body


def _head(status: int, headers: Mapping[str, str], framing: str, request: Request) -> bytes:
    if not request.keeps_alive:
        connection = "Connection: close\r\n"
    else:
        connection = "Connection: keep-alive\r\n" if request.version == "1.0" else ""
    if request.response_headers:
        headers = {**headers, **request.response_headers}
    lines = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
    return (
        f"HTTP/1.1 {status} {_REASONS.get(status, '')}\r\n{lines}{framing}{connection}"
        f"Date: {_date(int(time.time()))}\r\n\r\n"
    ).encode("utf-8", "surrogateescape")


_dates: tuple[int, str] = (0, "")


def _date(second: int) -> str:
    """Made once a second."""
    global _dates
    if _dates[0] != second:
        _dates = (second, formatdate(second, usegmt=True))
    return _dates[1]
