"""Requests of clients, and their answers as bytes of HTTP/1.1: whole, or piece by piece."""

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
    """The client closed its connection while its answer was being written."""


class Connection(Protocol):
    """The way to a client."""

    @property
    def remote(self) -> str:
        """The client's address."""

    def send(self, data: bytes) -> None:
        """Raises ClientGone."""

    async def drained(self) -> None:
        """Wait while the client has much to read. Raises ClientGone."""


class Response:
    """A whole answer."""

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
    endpoint   what answers it, for those who count; set by who finds it
    argument   the rest of the path where an endpoint takes one
    response_headers   for every answer to it, beside the answer's own
    allowed    methods that the path takes, where it does not take this one
    """

    __slots__ = (
        *(
            "allowed",
            "argument",
            "body",
            "endpoint",
            "handler",
            "headers",
            "keeps_alive",
            "method",
            "path",
            "response_headers",
        ),
        *("refusal", "stream", "version", "_connection"),
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
        self.stream: Stream | None = None
        self.response_headers: dict[str, str] = {}
        self._connection = connection

    @property
    def remote(self) -> str:
        """The client's address, "" where the system does not tell."""
        return self._connection.remote

    def begin(self, headers: Mapping[str, str]) -> Stream:
        """Answer 200 piece by piece. The head goes out with the first piece."""
        self.stream = Stream(self._connection, self, headers)
        return self.stream


Handler = Callable[[Request], Awaitable[Response | None]]
"""Answers a request, or has answered it with a stream."""


class Stream:
    """An answer that goes out piece by piece. Its methods raise ClientGone."""

    __slots__ = ("_chunked", "_connection", "_head", "ended")

    def __init__(
        self, connection: Connection, request: Request, headers: Mapping[str, str]
    ) -> None:
        self._connection = connection
        self._chunked = request.version != "1.0"
        if not self._chunked:
            request.keeps_alive = False  # the end of the connection is the end of the answer
        framing = "Transfer-Encoding: chunked\r\n" if self._chunked else ""
        self._head = _head(200, headers, framing, request)
        self.ended = False

    @property
    def started(self) -> bool:
        """Whether anything was sent: from here on no other answer can be given."""
        return not self._head

    async def write(self, data: bytes) -> None:
        """Send, and wait while the client has much to read already."""
        if data:
            self._send(self._framed(data))
            await self._connection.drained()

    def end(self, data: bytes = b"") -> None:
        """Send the last piece and the end of the answer."""
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
    """A whole answer as bytes; to HEAD without its body."""
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
