"""Where a text may be cut without changing its tokens.

A tokenizer first splits a text at its added tokens, such as the `<|im_start|>` with which a chat
template begins a message. It encodes the parts between them independently.
"""

from __future__ import annotations

import re
import string
from collections.abc import Iterable

import msgspec

PIECE_CHARACTERS = 20_000
"""Texts are searched in pieces of this length, because a search holds the GIL: some 10 ms per piece
for the worst text, with hundreds of tokens."""


class AddedToken(msgspec.Struct):
    """An added token of a tokenizer.json."""

    content: str
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = False
    single_word: bool = False


class _TokenizerFile(msgspec.Struct):
    added_tokens: list[AddedToken] | None = None


class Boundaries:
    """Where the texts of a model may be cut.

    tokenizer_json   contents of a tokenizer.json
    hint             chat template and special tokens: only boundary tokens that occur there are
                     used, or all if none does
    """

    def __init__(self, tokenizer_json: str, hint: str) -> None:
        added = msgspec.json.decode(tokenizer_json, type=_TokenizerFile).added_tokens or []
        tokens = boundary_tokens(added)
        self.tokens = tuple(token for token in tokens if token in hint) or tuple(tokens)
        self._pattern = re.compile("|".join(map(re.escape, self.tokens)))
        self._longest = max(map(len, self.tokens), default=0)

    def at(self, text: str, place: int) -> bool:
        """Whether a boundary token begins at this index, so that `text` may be cut there."""
        return text.startswith(self.tokens, place)

    def last_in(self, text: str, start: int, end: int) -> int:
        """The last index in `[start, end)` where `text` may be cut; -1 if there is none."""
        ends = (text.rfind(token, start, end + len(token) - 1) for token in self.tokens)
        return max(ends, default=-1)

    def next_in(self, text: str, start: int) -> int | None:
        """The first index, not before `start`, where `text` may be cut; None if there is none."""
        if not self.tokens:
            return None
        for begin in range(start, len(text), PIECE_CHARACTERS):
            match = self._pattern.search(text, begin, begin + PIECE_CHARACTERS + self._longest)
            if match is not None:
                return match.start()
        return None


PUNCTUATION = frozenset(string.punctuation) - {"_"}


def boundary_tokens(added: Iterable[AddedToken]) -> list[str]:
    """Added tokens before which any text may be cut without changing its tokens.

    Such a token matches its characters anywhere in the raw text and nothing beside them: it is
    not normalised, has no `lstrip`, `rstrip` or `single_word`, and no other added token contains
    it or can overlap its beginning. It begins with ASCII punctuation: a token before it with
    `rstrip` would absorb white space, and one with `single_word` does not match before a letter.
    """
    added = list(added)
    return [
        token.content
        for token in added
        if token.content[:1] in PUNCTUATION
        and not (token.normalized or token.lstrip or token.rstrip or token.single_word)
        and not any(_hides(other.content, token.content) for other in added)
    ]


def _hides(other: str, token: str) -> bool:
    """Whether a match of `other` may overlap the beginning of `token` in some text."""
    if other != token and token in other:
        return True
    return any(other.endswith(token[:length]) for length in range(1, len(token)))
