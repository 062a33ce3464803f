"""What the client of a request has received, over one attempt or several."""

from __future__ import annotations

from typing import Protocol

import msgspec

from cluster.protocol import (
    HEADER_HIT_TOKENS,
    HEADER_MIGRATIONS,
    HEADER_POLICY,
    HEADER_PREDICTED_HIT_TOKENS,
    HEADER_PROMPT_TOKENS,
    HEADER_REQUEST_ID,
    HEADER_WORKER,
    GenerateRequest,
)
from router.dispatch import Placement
from router.http_messages import Request, Response, Stream

EVENT_END = b"\n\n"
STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class BodyReader(Protocol):
    """Takes a worker's body apart: `cluster.frames.FrameReader` or `EventReader`."""

    @property
    def ids(self) -> bytes: ...

    def feed(self, data: bytes) -> bytes:
        """The bytes for the client that `data` completes."""

    def rest(self) -> bytes:
        """The bytes for the client after the last ones, once the body has ended."""


class EventReader:
    """Reads a body without frames: whole server-sent events, or a JSON object when it has ended.

    So a client never receives half an event, even if the worker dies while it sends one.
    """

    ids = b""

    def __init__(self) -> None:
        self._begun = b""

    def feed(self, data: bytes) -> bytes:
        """The complete events after `data`, unchanged."""
        if not self._begun and data.endswith(EVENT_END):
            return data
        data = self._begun + data
        cut = data.rfind(EVENT_END)
        cut = 0 if cut < 0 else cut + len(EVENT_END)
        self._begun = data[cut:]
        return data[:cut]

    def rest(self) -> bytes:
        """What was not complete, but is the end."""
        return self._begun


class Delivery:
    """The response to one client.

    generate     the body for the next attempt; after an interrupted one, it goes on where that
                 ended
    hit_tokens   prompt tokens that the first worker reused; None before its response began
    migrations   attempts that went on where another ended
    """

    generate: GenerateRequest

    def __init__(self, client: Request) -> None:
        self.hit_tokens: int | None = None
        self.migrations = 0
        self._client = client
        self._headers: dict[str, str] = {}
        self._stream: Stream | None = None
        self._parts: list[bytes] = []

    @property
    def begun(self) -> bool:
        """Whether bytes were sent to the client."""
        return self._stream is not None

    @property
    def resumes(self) -> bool:
        """Whether the next attempt goes on where another ended."""
        return self.hit_tokens is not None and bool(self.generate.output_ids)

    def answered(self, placement: Placement, hit_tokens: int, content_type: str) -> None:
        """The worker of this attempt begins its response."""
        if self.hit_tokens is None:
            self.hit_tokens = hit_tokens
        if not self.begun:
            self._headers = {
                HEADER_REQUEST_ID: self.generate.request_id,
                HEADER_WORKER: placement.worker,
                HEADER_POLICY: placement.policy,
                HEADER_PREDICTED_HIT_TOKENS: str(placement.predicted_hit_tokens),
                HEADER_PROMPT_TOKENS: str(len(self.generate.token_ids) // 4),
                HEADER_HIT_TOKENS: str(self.hit_tokens),
                "Content-Type": content_type,
            }
            if self.migrations:
                self._headers[HEADER_MIGRATIONS] = str(self.migrations)

    async def send(self, data: bytes) -> None:
        """More of the body. A stream passes it on at once. Raises ClientGone."""
        if data and self.generate.stream:
            await self._begin().write(data)
        elif data:
            self._parts.append(data)

    def end(self, data: bytes) -> Response | None:
        """The last of the body. Returns a response that is not a stream. Raises ClientGone."""
        if self.generate.stream:
            self._begin().end(data)
            return None
        return Response(b"".join([*self._parts, data]).rstrip(b"\n"), headers=self._headers)

    def interrupted(self, ids: bytes) -> None:
        """The attempt ended early, `ids` (packed) after its start."""
        self._parts.clear()
        generate = self.generate
        self.generate = msgspec.structs.replace(
            generate, output_ids=generate.output_ids + ids, hit_tokens=self.hit_tokens or 0
        )

    def _begin(self) -> Stream:
        if self._stream is None:
            self._stream = self._client.begin({**self._headers, **STREAM_HEADERS})
        return self._stream
