"""The request file: what is sent when, written once and replayed byte for byte by every arm.

One JSON object a line:
`{"id", "intended_at_s", "session", "turn", "group", "kind", "body"}`. `body` is the body of the
HTTP request as it goes over the wire; the client sends these very bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

Kind = Literal["chat", "completion"]
PATHS: dict[Kind, str] = {"chat": "/v1/chat/completions", "completion": "/v1/completions"}


class RequestFileError(ValueError):
    """An invalid request file. The message names the line and what to change."""


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One request.

    intended_at_s   when it is to be sent, in seconds after the replay's begin
    session         the user or conversation; turns of one session are in order of time
    turn            0, 1, 2, … within the session
    group           requests of one group share a prefix
    kind            which endpoint it is for
    body            JSON bytes of the HTTP body
    """

    id: str
    intended_at_s: float
    session: str
    turn: int
    group: str
    body: msgspec.Raw
    kind: Kind = "chat"


class Message(msgspec.Struct, frozen=True):
    """A chat message as JSON carries it; the content stays raw."""

    role: str
    content: msgspec.Raw = msgspec.Raw(b"null")


class Body(msgspec.Struct, frozen=True):
    """The fields of a body that the load generator looks at."""

    stream: bool = False
    messages: list[Message] = msgspec.field(default_factory=list)
    prompt: msgspec.Raw = msgspec.Raw(b"null")


def encode_requests(requests: Sequence[Request]) -> bytes:
    """The request file's bytes."""
    return b"".join(msgspec.json.encode(request) + b"\n" for request in requests)


def decode_requests(data: bytes) -> list[Request]:
    """Parse and check a request file.

    Raises RequestFileError for a line that is no request, an id that occurs twice, times that
    run backwards (of the file or of a session's turns), or a body that does not stream.
    """
    requests: list[Request] = []
    ids: set[str] = set()
    last_turn: dict[str, int] = {}
    clock = 0.0
    for number, line in enumerate(data.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            request = msgspec.json.decode(line, type=Request)
            body = msgspec.json.decode(request.body, type=Body)
        except msgspec.DecodeError as error:
            raise RequestFileError(f"line {number} is not a request: {error}") from error
        if request.id in ids:
            raise RequestFileError(f"line {number}: id {request.id!r} occurs twice")
        if request.intended_at_s < clock:
            raise RequestFileError(
                f"line {number}: intended_at_s {request.intended_at_s} is before the line above "
                f"({clock}); sort the file by time"
            )
        if request.turn <= last_turn.get(request.session, -1):
            raise RequestFileError(
                f"line {number}: turn {request.turn} of session {request.session!r} comes after "
                f"turn {last_turn[request.session]}"
            )
        if not body.stream:
            raise RequestFileError(
                f'line {number}: the body must set "stream": true, or no first token can be timed'
            )
        ids.add(request.id)
        last_turn[request.session] = request.turn
        clock = request.intended_at_s
        requests.append(request)
    if not requests:
        raise RequestFileError("the request file holds no requests")
    return requests


def read_request_file(path: Path) -> tuple[list[Request], str]:
    """Requests of a file and its SHA-256 (hex). Raises RequestFileError."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise RequestFileError(f"cannot read the request file {path}: {error}") from error
    return decode_requests(data), digest(data)


def digest(data: bytes) -> str:
    """SHA-256 (hex) of a request file's bytes."""
    return hashlib.sha256(data).hexdigest()


def prompt_text(request: Request) -> bytes:
    """The prompt as one byte string, in which a longer conversation extends a shorter one."""
    body = msgspec.json.decode(request.body, type=Body)
    if request.kind == "completion":
        return bytes(body.prompt).removesuffix(b'"')
    # The closing quote is left out, so that messages that go on differently share their begin.
    return b"".join(
        b"\x02" + message.role.encode() + b"\x03" + bytes(message.content).removesuffix(b'"')
        for message in body.messages
    )
