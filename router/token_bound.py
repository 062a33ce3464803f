"""A lower bound of the tokens of a text, from its size alone."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from router.boundaries import AddedToken

MOST_COMPOSED_BYTES = 4
"""Bytes of UTF-8 that become one in NFC, at most: 3.5, as U+1FBE U+0308 U+0301 becomes U+0390."""


class TokenBound(NamedTuple):
    """A lower bound of the tokens of texts.

    bytes_per_token   the most bytes of a text (UTF-8) that one token represents
    dropped           byte values that the tokenizer may drop, as they are not in its vocabulary
    """

    bytes_per_token: int
    dropped: bytes

    def fewest_tokens(self, text: str, enough: int) -> int:
        """The fewest tokens that `text` (valid Unicode) can have; 0 if that cannot exceed
        `enough`."""
        if 4 * len(text) <= enough * self.bytes_per_token:
            return 0
        data = text.encode()
        kept = data.translate(None, self.dropped) if self.dropped else data
        return len(kept) // self.bytes_per_token


class _Step(msgspec.Struct):
    """The relevant fields of a normalizer or pre-tokenizer of a tokenizer.json."""

    type: str
    normalizers: list[_Step] = []
    pretokenizers: list[_Step] = []
    behavior: str = ""
    pattern: dict[str, Any] = {}
    content: str = ""

    def flat(self) -> list[_Step]:
        """The steps of a sequence, or the step itself."""
        inner = [*self.normalizers, *self.pretokenizers]
        return [each for step in inner for each in step.flat()] if inner else [self]


class _Model(msgspec.Struct):
    type: str = ""
    byte_fallback: bool | None = None
    continuing_subword_prefix: str | None = None
    end_of_word_suffix: str | None = None


class _TokenizerFile(msgspec.Struct):
    model: _Model
    normalizer: _Step | None = None
    pre_tokenizer: _Step | None = None
    added_tokens: list[AddedToken] | None = None


def token_bound(tokenizer_json: str, vocabulary: dict[str, int]) -> TokenBound | None:
    """The bound for a tokenizer; None if there is none or it is unknown.

    tokenizer_json   contents of a tokenizer.json
    vocabulary       vocabulary of its model

    Every byte must end in some token. There is no bound if a tokenizer merges unknown characters,
    removes characters, lets an added token absorb the white space around it or matches one in
    normalised text, or has symbols that depend on their place in a word.
    """
    tree = msgspec.json.decode(tokenizer_json, type=_TokenizerFile)
    added = tree.added_tokens or []
    steps = tree.pre_tokenizer.flat() if tree.pre_tokenizer else []
    byte_level = any(step.type == "ByteLevel" for step in steps)
    shrinking = _most_shrinking(tree.normalizer.flat() if tree.normalizer else [])
    if (
        tree.model.type != "BPE"
        or shrinking is None
        or tree.model.continuing_subword_prefix
        or tree.model.end_of_word_suffix
        or any(token.lstrip or token.rstrip for token in added)
        or (tree.normalizer is not None and any(token.normalized for token in added))
        or not all(map(_keeps_all, steps))
        or not (byte_level or tree.model.byte_fallback)
    ):
        return None
    symbols = BYTE_SYMBOLS if byte_level else [f"<0x{byte:02X}>" for byte in range(256)]
    dropped = bytes(byte for byte, symbol in enumerate(symbols) if symbol not in vocabulary)
    if dropped and (tree.normalizer is not None or not byte_level):
        return None
    # a token of byte-level BPE has a character for each byte
    longest = max(len(token if byte_level else token.encode()) for token in vocabulary)
    longest = max([longest, *(len(token.content.encode()) for token in added)])
    return TokenBound(longest * shrinking, dropped)


def _most_shrinking(normalizers: list[_Step]) -> int | None:
    """How many bytes of a text may become one byte; None if unbounded."""
    most = 1
    for step in normalizers:
        if step.type == "NFC":
            most *= MOST_COMPOSED_BYTES
        elif step.type == "Replace":
            pattern = step.pattern.get("String")
            if not pattern or len(pattern.encode()) > len(step.content.encode()):
                return None
        elif step.type != "Prepend":
            return None
    return most


def _keeps_all(step: _Step) -> bool:
    return step.type in ("ByteLevel", "Digits", "Metaspace") or (
        step.type == "Split" and step.behavior != "Removed"
    )


def _byte_symbols() -> list[str]:
    """The character for each byte in byte-level BPE, as in GPT-2's `bytes_to_unicode`."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in printable]
    shifted = {byte: chr(256 + place) for place, byte in enumerate(others)}
    return [shifted.get(byte, chr(byte)) for byte in range(256)]


BYTE_SYMBOLS = _byte_symbols()
