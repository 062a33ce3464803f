"""Caches tokens and block hashes of the beginnings of texts: only what is new is computed.

A text is cut into runs at boundaries (`router/boundaries.py`), so that the tokens of its runs, one
after the other, are those of the whole text. Each run is at least `RUN_CHARACTERS` long. Its key is
the run before it and its text:

    [<|im_start|>system … <|im_end|>] [<|im_start|>user … ] [<|im_end|> …] [tail] rest
     run, kept                         run, kept             run, kept      kept   not kept

The tail ends at the last boundary. It is kept with the run before it, and begins the run that the
next turn of the conversation completes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import msgspec

from cluster.blocks import hash_blocks
from router.boundaries import Boundaries

RUN_CHARACTERS = 1_000
"""Looking up a run takes a thirtieth of the time to encode and hash this many characters."""

MAX_CHARACTERS = 8_000_000
"""Most characters of cached runs. With tokens and hashes they take some 30 MB at four characters
per token, and at most some 250 MB, at four tokens per character (such as emoji)."""

RUN_OVERHEAD_CHARACTERS = 100
"""Added to the length of each run, for its fixed size in memory."""


TAIL_CHARACTERS = 100
"""A shorter tail is not kept: to encode it takes as long as to look it up."""


class Run(msgspec.Struct, eq=False):
    """A run at its position after other runs.

    packed   its tokens
    hashes   hashes of the blocks that end in it
    parent   the parent of the next block's hash: the last hash so far, or the root
    rest     packed tokens after the last full block
    name     identifies it in the keys of runs that follow it
    next     text of the run that followed it last: likely the next one again
    tail     the tail that followed it last, and its text of at most `RUN_CHARACTERS`
    """

    packed: bytes
    hashes: list[bytes]
    parent: bytes
    rest: bytes
    name: int | bytes
    next: str = ""
    tail: tuple[str, Run | None] = "", None  # one object: threads change it

    def followed_by(self, packed: bytes, block_size: int) -> Run:
        """The run with these tokens after this one."""
        pending = self.rest + packed
        hashes = hash_blocks(self.parent, pending, block_size)
        rest = pending[len(hashes) * 4 * block_size :]
        return Run(packed, hashes, hashes[-1] if hashes else self.parent, rest, next(_names))

    def extended_by(self, packed: bytes, block_size: int) -> Run:
        """This run with more tokens at its end."""
        more = self.followed_by(packed, block_size)
        more.packed, more.hashes = self.packed + packed, self.hashes + more.hashes
        return more


_names = itertools.count()
_Key = tuple[int | bytes, str]


class KnownTexts:
    """A cache of the runs of recent texts. Thread-safe.

    It has two generations: runs used since the younger one began, and older runs, which are
    dropped when the younger generation is full. A run whose predecessor is gone is never found
    again, and is dropped with its generation.
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
        start = 0
        last = Run(b"", [], root, b"", root + bos)
        packed, hashes = [], []

        def compute(end: int) -> Run:
            """The run from `start`, where `last` ends, to `end`."""
            tail, tail_run = last.tail
            known = start + len(tail)
            if (
                tail_run is not None
                and known <= end
                and text.startswith(tail, start)
                and boundaries.at(text, known)
            ):
                return tail_run.extended_by(encode(text[known:end]), block_size)
            tokens = encode(text[start:end])
            return last.followed_by(tokens if start else bos + tokens, block_size)

        while True:
            run = last.next  # comparing it is cheaper than to search, copy and hash a run
            if not (run and text.startswith(run, start) and boundaries.at(text, start + len(run))):
                cut = boundaries.next_in(text, start + RUN_CHARACTERS)
                if cut is None:
                    break
                run = last.next = text[start:cut]
            key = (last.name, run)
            known = self._young.get(key)
            if known is None:
                known = self._old.get(key)
                if known is None:
                    known = compute(start + len(run))
                    self._keep_tail(last, "", None)
                known.next = ""  # kept no longer than the run itself, which is counted
                self._keep(key, known)
            packed.append(known.packed)
            hashes += known.hashes
            last, start = known, start + len(run)
        cut = boundaries.last_in(text, start, start + RUN_CHARACTERS)
        if start and cut >= start + TAIL_CHARACTERS:
            tail_run = compute(cut)
            self._keep_tail(last, text[start:cut], tail_run)
            rest = tail_run.extended_by(encode(text[cut:]), block_size)
        else:
            rest = compute(len(text))
        return b"".join([*packed, rest.packed]), hashes + rest.hashes

    def _keep_tail(self, run: Run, tail: str, tail_run: Run | None) -> None:
        self._characters += len(tail) - len(run.tail[0])
        run.tail = tail, tail_run

    def _keep(self, key: _Key, run: Run) -> None:
        if self._characters >= self._generation:
            self._old, self._young, self._characters = self._young, {}, 0
        self._young[key] = run
        self._characters += len(key[1]) + len(run.tail[0]) + RUN_OVERHEAD_CHARACTERS
