"""Bodies of HTTP/1.1 messages as they come in pieces (RFC 9112, sections 6 and 7)."""

from __future__ import annotations

MAX_LINE_BYTES = 8_192
"""A chunk's size line, or a trailer, may be so long at most."""


class MalformedBody(ValueError):
    """The other side does not keep to the chunked coding."""


class ChunkedBody:
    """Takes the chunked coding off."""

    def __init__(self) -> None:
        self.ended = False
        self._rest = b""
        self._left = 0  # bytes of the chunk under way that are still to come, and its line break
        self._in_trailers = False

    def feed(self, data: bytes) -> bytes:
        """The content in `data`; what follows the body's end is dropped. Raises MalformedBody."""
        if self._rest:
            data = self._rest + data
            self._rest = b""
        pieces: list[bytes] = []
        at, size = 0, len(data)
        while at < size and not self.ended:
            if self._left:
                content = data[at : at + max(0, self._left - 2)]
                if content:
                    pieces.append(content)
                passed = min(self._left, size - at)
                at += passed
                self._left -= passed
                if not self._left and data[at - 1 : at] != b"\n":
                    raise MalformedBody("a chunk is longer than its size says")
                continue
            end = data.find(b"\r\n", at)
            if end < 0:
                if size - at > MAX_LINE_BYTES:
                    raise MalformedBody("the line of a chunk's size is too long")
                self._rest = data[at:]
                break
            line = data[at:end]
            at = end + 2
            if self._in_trailers:
                self.ended = not line
            else:
                self._begin_chunk(line)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _begin_chunk(self, line: bytes) -> None:
        digits = line.partition(b";")[0].strip()
        try:
            if not digits.isalnum():
                raise ValueError
            length = int(digits, 16)
        except ValueError:
            raise MalformedBody(f"not a chunk's size: {line[:40]!r}") from None
        if length:
            self._left = length + 2
        else:
            self._in_trailers = True


class SizedBody:
    """Counts a body of known length; None: until the connection is closed."""

    def __init__(self, length: int | None) -> None:
        self._left = length
        self.ended = length == 0

    @property
    def until_closed(self) -> bool:
        """Whether the end of the connection is the body's end."""
        return self._left is None

    def feed(self, data: bytes) -> bytes:
        """The content in `data`; what follows the body's end is dropped."""
        if self._left is None:
            return data
        data = data[: self._left]
        self._left -= len(data)
        self.ended = not self._left
        return data
