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
        self._rest = b""  # the beginning of a line
        self._left = 0  # bytes of the chunk under way still to come, with its line break
        self._in_trailers = False

    def feed(self, data: bytes) -> bytes:
        """The content in `data`; what follows the body's end is dropped. Raises MalformedBody."""
        if self._rest:
            data, self._rest = self._rest + data, b""
        pieces: list[bytes] = []
        at, size = 0, len(data)
        if self._left:
            at = self._go_on(data, pieces)
        while at < size and not self.ended:
            end = data.find(b"\r\n", at)
            if end < 0:
                if size - at > MAX_LINE_BYTES:
                    raise MalformedBody("the line of a chunk's size is too long")
                self._rest = data[at:]
                break
            if self._in_trailers:
                self.ended = end == at
                at = end + 2
                continue
            length = _length(data[at:end])
            at = end + 2
            if not length:
                self._in_trailers = True
                continue
            end = at + length
            pieces.append(data[at:end])
            at = end + 2
            if at > size:
                self._left = at - size
            elif data[end:at] != b"\r\n":
                raise MalformedBody("a chunk is longer than its size says")
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _go_on(self, data: bytes, pieces: list[bytes]) -> int:
        """Take what `data` has of the chunk under way; returns where the next line begins."""
        left, size = self._left, len(data)
        if left > 2:
            pieces.append(data[: left - 2])
        self._left = max(0, left - size)
        breaks = data[max(0, left - 2) : left]
        if breaks != b"\r\n"[2 - min(2, left) :][: len(breaks)]:
            raise MalformedBody("a chunk is longer than its size says")
        return min(left, size)


def _length(line: bytes) -> int:
    """Of a chunk, from its first line. Extensions mean nothing here."""
    digits = line.partition(b";")[0].strip()
    try:
        length = int(digits, 16)
    except ValueError:
        length = -1
    if length < 0:
        raise MalformedBody(f"not a chunk's size: {line[:40]!r}")
    return length


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
