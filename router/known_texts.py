"""Tokens and block hashes of texts that begin as earlier ones did: only what is new is computed.

A text is cut before boundary tokens: added tokens, such as `<|im_start|>`, with which a chat
template begins and ends messages. A tokenizer splits a text at added tokens before anything else
and treats what lies between them apart, so the tokens of the runs, one after the other, are those
of the whole text. Each run is at least `RUN_CHARACTERS` long, and is found by what stands before
it and its text:

    [<|im_start|>system … <|im_end|>] [<|im_start|>user … ] [<|im_end|> …] rest
     run, kept                         run, kept             run, kept      computed every time
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable
from typing import NamedTuple

import msgspec

from cluster.blocks import hash_blocks

RUN_CHARACTERS = 500
"""Looking up a run takes a twentieth of encoding and hashing so many."""

MAX_CHARACTERS = 8_000_000
"""Of the runs kept. With tokens and hashes they take some 30 MB where four characters are a token,
and some 250 MB at most, where each is four tokens, as emoji may be."""

RUN_OVERHEAD_CHARACTERS = 100
"""What a run counts for besides its text."""


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
    hint             chat template and special tokens: of the boundary tokens, those named there
                     are used, or all where it names none
    """

    def __init__(self, tokenizer_json: str, hint: str) -> None:
        added = msgspec.json.decode(tokenizer_json, type=_TokenizerFile).added_tokens or []
        tokens = boundary_tokens(added)
        used = [token for token in tokens if token in hint] or tokens
        used.sort(key=len, reverse=True)
        self.pattern = re.compile("|".join(map(re.escape, used))) if used else None


def boundary_tokens(added: Iterable[AddedToken]) -> list[str]:
    """Added tokens before which any text may be cut without changing its tokens.

    Such a token is matched wherever its characters stand, in the raw text, and takes nothing
    of its neighbours: not normalised, no `lstrip`, `rstrip` or `single_word`, and no other added
    token contains it or can overlap its beginning.
    """
    added = list(added)
    return [
        token.content
        for token in added
        if token.content
        and not token.content[0].isspace()
        and not (token.normalized or token.lstrip or token.rstrip or token.single_word)
        and not any(_hides(other.content, token.content) for other in added)
    ]


def _hides(other: str, token: str) -> bool:
    """Whether a match of `other` may cover the beginning of `token` somewhere in a text."""
    if other != token and token in other:
        return True
    return any(other.endswith(token[:length]) for length in range(1, len(token)))


class Run(NamedTuple):
    """A run after those before it.

    packed   its tokens
    hashes   of the blocks that end in it
    parent   what the next block's hash continues: the last hash so far, or the root
    rest     packed tokens after the last full block
    name     tells it from all others, in the keys of runs that follow it
    """

    packed: bytes
    hashes: list[bytes]
    parent: bytes
    rest: bytes
    name: int | bytes

    def followed_by(self, packed: bytes, block_size: int) -> Run:
        """The run with these tokens after this one."""
        pending = self.rest + packed
        hashes = hash_blocks(self.parent, pending, block_size)
        rest = pending[len(hashes) * 4 * block_size :]
        return Run(packed, hashes, hashes[-1] if hashes else self.parent, rest, next(_names))


_names = itertools.count()
_Key = tuple[int | bytes, str]


class KnownTexts:
    """Runs of recent texts. Thread-safe.

    They are kept in two generations: those used since the younger one began, and those before it,
    which are dropped when the younger one is full. A run whose predecessor is gone is never found
    again, and goes with its generation.
    """

    def __init__(self, max_characters: int = MAX_CHARACTERS) -> None:
        self._generation = max_characters // 2
        self._young: dict[_Key, Run] = {}
        self._old: dict[_Key, Run] = {}
        self._characters = 0

    def tokens_and_hashes(
        self,
        text: str,
        boundaries: Boundaries,
        encode: Callable[[str], bytes],
        *,
        bos: bytes,
        root: bytes,
        block_size: int,
    ) -> tuple[bytes, list[bytes]]:
        """Packed tokens of `text` after those of `bos`, and the hashes of their full blocks.

        `encode` gives the packed tokens of a run. Texts with the same `root` have the same
        `encode`, `boundaries` and `block_size`.
        """
        pattern, start = boundaries.pattern, 0
        last = Run(b"", [], root, b"", root + bos)
        packed, hashes = [], []
        while pattern is not None:
            match = pattern.search(text, start + RUN_CHARACTERS)
            if match is None:
                break
            run = text[start : match.start()]
            key = (last.name, run)
            known = self._young.get(key)
            if known is None:
                known = self._old.get(key)
                if known is None:
                    tokens = encode(run) if start else bos + encode(run)
                    known = last.followed_by(tokens, block_size)
                self._keep(key, known)
            packed.append(known.packed)
            hashes += known.hashes
            last, start = known, match.start()
        tokens = encode(text[start:]) if start else bos + encode(text)
        rest = last.followed_by(tokens, block_size)
        return b"".join([*packed, rest.packed]), hashes + rest.hashes

    def _keep(self, key: _Key, run: Run) -> None:
        if self._characters >= self._generation:
            self._old, self._young, self._characters = self._young, {}, 0
        self._young[key] = run
        self._characters += len(key[1]) + RUN_OVERHEAD_CHARACTERS
