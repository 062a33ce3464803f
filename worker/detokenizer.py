"""From token ids to text while they come: never half a character, never a part of a stop string.

The work per token does not grow with the length of the answer.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from tokenizers import Tokenizer, decoders

UNDECODED = "\ufffd"
"""What a decoder puts in the place of bytes that are no character (yet)."""

WINDOW_LIMIT = 8
"""Tokens without certain text after which what they give is taken as it is: a character has at
most four bytes, so no further token can complete it."""


class IncrementalDetokenizer:
    """Text of a growing list of token ids.

    All texts that `push` and `finish` return, joined, are what decoding all ids at once gives.
    (One difference is deliberate: where a model with byte fallback emits bytes that are no text,
    a whole decode drops the valid characters directly before them too; here they have been sent.)
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
        """Text that these ids make certain; "" where they only begin a character."""
        step = self._decoder.step
        return "".join([step(index) for index in token_ids if index not in self._skipped])

    def skipped_ids(self, strings: Sequence[str]) -> frozenset[int]:
        """Ids of the special tokens among these strings, which give no text."""
        return self._skipped & {self._tokenizer.token_to_id(string) for string in strings}

    def finish(self) -> str:
        """The rest: U+FFFD where the ids ended within a character."""
        return self._decoder.finish()


class _Decoder(Protocol):
    def step(self, token_id: int) -> str: ...

    def finish(self) -> str: ...


def _bytes_of_characters() -> dict[str, int]:
    """Byte-level BPE spells each byte as one printable character: itself where it is printable
    Latin-1, else the next character from U+0100 on (GPT-2's table)."""
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
        except KeyError:  # an added token is text, not spelled bytes
            spelled = token.encode()
        return self._utf8.decode(spelled)

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


class _WindowDecoder:
    """Other vocabularies: decode a short window twice, with and without the newest tokens.

        ... | settled: their text is out | pending: not certain yet |
            ^ window begins

    The settled tokens give the pending ones their left context (a leading space, say).
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
        else:  # bytes that are no text spoil the valid ones before them, which are out already
            new = self._decode(pending)
        self._window = pending
        self._settled = len(self._window)
        self._settled_text = self._decode(self._window)
        return new

    def _decode(self, token_ids: list[int]) -> str:
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=False)
        return text


class StopStringFilter:
    """Cuts a growing text before the stop string that is complete first.

    What may yet become a stop string is held back, so no part of one is ever emitted. How the
    text is split into pushes makes no difference.
    """

    def __init__(self, stop: list[str]) -> None:
        self._stop = [text for text in stop if text]
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> tuple[str, bool]:
        """Text that may be sent now, and whether a stop string ended it. Later text is dropped."""
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
        """What was held back and became no stop string."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`, but not all of it."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
