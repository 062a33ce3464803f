"""Turn a stream of token ids into text, without partial characters or parts of stop strings.

The work per token does not grow with the length of the answer.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from tokenizers import Tokenizer, decoders

UNDECODED = "\ufffd"
"""A decoder's replacement for bytes that do not form a character (yet)."""

WINDOW_LIMIT = 8
"""After this many pending tokens their text is final: a character has at most four bytes, so no
further token can complete it."""


class IncrementalDetokenizer:
    """Text of a growing list of token ids.

    The texts from `push` and `finish`, joined, equal the text of all ids decoded at once.
    (One difference is deliberate: if a model with byte fallback emits invalid bytes, decoding all
    at once also drops the valid characters directly before them; here they were sent already.)
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True) -> None:
        self._decoder: _ByteDecoder | _WindowDecoder
        if isinstance(tokenizer.decoder, decoders.ByteLevel):
            self._decoder = _ByteDecoder(tokenizer)
        else:
            self._decoder = _WindowDecoder(tokenizer)
        self._skipped: frozenset[int] = frozenset()
        self._tokenizer = tokenizer
        if skip_special:
            added = tokenizer.get_added_tokens_decoder()
            self._skipped = frozenset(index for index, token in added.items() if token.special)

    def push(self, token_ids: Sequence[int]) -> str:
        """Text that is final with these ids; "" if they only begin a character."""
        step = self._decoder.step
        return "".join([step(index) for index in token_ids if index not in self._skipped])

    def skipped_ids(self, strings: Sequence[str]) -> frozenset[int]:
        """Ids of the special tokens among these strings, which give no text."""
        return self._skipped & {self._tokenizer.token_to_id(string) for string in strings}

    def finish(self) -> str:
        """The remaining text: U+FFFD if the ids ended within a character."""
        return self._decoder.finish()


class _Decoder(Protocol):
    def step(self, token_id: int) -> str: ...

    def finish(self) -> str: ...


def _bytes_of_characters() -> dict[str, int]:
    """Byte-level BPE writes each byte as one printable character: the byte itself if it is
    printable Latin-1, else the next character from U+0100 on (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    spelled = {chr(byte): byte for byte in printable}
    spelled.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return spelled


_BYTES = _bytes_of_characters()


class _ByteDecoder:
    """Byte-level vocabularies: each token is bytes, and an incremental UTF-8 decoder joins them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def step(self, token_id: int) -> str:
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return ""
        try:
            spelled = bytes([_BYTES[character] for character in token])
        except KeyError:  # an added token is text, not encoded bytes
            spelled = token.encode()
        return self._utf8.decode(spelled)

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


class _WindowDecoder:
    """Other vocabularies: decode a short window twice, with and without the newest tokens.

        ... | settled: text was sent | pending: not final yet |
            ^ window begins

    The settled tokens are the left context of the pending ones, as for a leading space.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._settled = 0
        self._settled_text = ""

    def step(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._decode(self._window)
        pending = len(self._window) - self._settled
        unsure = text.endswith(UNDECODED) or len(text) <= len(self._settled_text)
        if unsure and pending < WINDOW_LIMIT:
            return ""
        return self._settle(text)

    def finish(self) -> str:
        return self._settle(self._decode(self._window))

    def _settle(self, text: str) -> str:
        pending = self._window[self._settled :]
        if text.startswith(self._settled_text):
            new = text[len(self._settled_text) :]
        else:  # invalid bytes also replace the valid ones before them, which were sent already
            new = self._decode(pending)
        self._window = pending
        self._settled = len(self._window)
        self._settled_text = self._decode(self._window)
        return new

    def _decode(self, token_ids: list[int]) -> str:
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=False)
        return text


class StopStringFilter:
    """Ends a growing text before the first complete stop string.

    Text that may become a stop string is held back, so no part of one is ever sent. The result
    does not depend on how the text is split into pushes.
    """

    def __init__(self, stop: list[str]) -> None:
        self._stop = [text for text in stop if text]
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> tuple[str, bool]:
        """Text to send now, and whether a stop string ended it. Later text is dropped."""
        if self.stopped:
            return "", True
        if not self._stop:
            return text, False
        held = self._held + text
        ends = [
            (start + len(stop), start) for stop in self._stop if (start := held.find(stop)) >= 0
        ]
        if ends:
            self.stopped = True
            self._held = ""
            return held[: min(ends)[1]], True
        keep = max(_overlap(held, stop) for stop in self._stop)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep], False

    def finish(self) -> str:
        """Text that was held back but did not become a stop string."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `stop`."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
