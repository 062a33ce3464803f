"""The body of a worker's response in frames, after any of which another worker can go on.

A frame is bytes for the client and then a mark, a line with the ids of their tokens:

    data: {"choices":[{"index":0,"delta":{"content":" Hel"}, ...}]}

    :d70300001b010000

The mark is `:`, the packed ids in hexadecimal, and `.` in the last frame. `:!` and an OpenAI error
object end a response that failed because of the request itself. A reader passes on the bytes of
whole frames only, without marks. So it knows the ids of all text that a client has, and no others.
The frames of a response that is not a stream have no bytes, except the last one.

Marks are comments of server-sent events. Compact JSON has no line that begins with `:`.
"""

from __future__ import annotations

from binascii import unhexlify

COLON = ord(":")


def frame(body: bytes, ids: bytes, *, last: bool = False) -> bytes:
    """`body`, which is empty or ends with a line feed, and the packed ids of its tokens."""
    return b"%b:%b%b\n" % (body, ids.hex().encode(), b"." if last else b"")


def error_frame(error: bytes) -> bytes:
    """The end of a response that failed because of the request; `error` is an OpenAI error."""
    return b":!%b\n" % error


class FrameReader:
    """Takes a body apart.

    last    whether the last frame was read
    error   the OpenAI error object of an error frame, or a reason why the rest cannot be read; b""
            without one
    ids     packed ids of all frames read so far
    """

    def __init__(self) -> None:
        self.last = False
        self.error = b""
        self.ids = b""
        self._begun = b""

    def feed(self, data: bytes) -> bytes:
        """The bytes for the client of the frames that `data` completes."""
        if self._begun:
            data, self._begun = self._begun + data, b""
        start = data.find(b"\n:") + 1
        if start and data.find(b"\n", start) == len(data) - 1 and data[0] != COLON:
            body = data[:start]  # one frame, as mostly
            return body if self._note(data[start + 1 : -1]) else b""
        return self._several(data)

    def _several(self, data: bytes) -> bytes:
        bodies, start = b"", 0
        while not self.error:
            mark = start
            if not data.startswith(b":", start):
                mark = data.find(b"\n:", start) + 1
                if not mark:
                    break
            end = data.find(b"\n", mark)
            if end < 0:
                break
            if self._note(data[mark + 1 : end]):
                bodies += data[start:mark]
            start = end + 1
        self._begun = data[start:]
        return bodies

    def rest(self) -> bytes:
        """b"": what follows the last whole frame is not for the client."""
        return b""

    def _note(self, mark: bytes) -> bool:
        """Whether the frame that ends with `mark` is for the client."""
        try:
            self.ids += unhexlify(mark)
        except ValueError:
            return self._note_end(mark)
        return True

    def _note_end(self, mark: bytes) -> bool:
        if mark.startswith(b"!"):
            self.error = mark[1:]
            return False
        try:
            self.ids += unhexlify(mark.removesuffix(b"."))
        except ValueError:
            self.error = b"the mark of a frame is not hexadecimal"
            return False
        self.last = True
        return True
