"""Server-sent events: bytes in, the data of whole events out."""

from __future__ import annotations


class EventParser:
    """Incremental parser of an event stream; bytes may be cut anywhere, even within a character.

    Only the `data` field is kept: OpenAI streams use no other. Comments are dropped.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, chunk: bytes) -> list[bytes]:
        """The data of every event that `chunk` completes, in order."""
        lines = (self._rest + chunk).split(b"\n")
        self._rest = lines.pop()
        events = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data = []
        return events

    @property
    def pending(self) -> bool:
        """Whether an event has begun that has not ended."""
        return bool(self._rest or self._data)
