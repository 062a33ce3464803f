"""The blocks of one worker in the order in which they were stored.

The masks of the index say who holds a block. This list serves operations on a whole worker: to
remove it, to compare it with a snapshot, to drop its deepest blocks. A change costs little:
stored and evicted hashes are appended to runs. Once there are many evicted hashes, they are removed
from the stored ones at once.

    stored    a b c d e a f     a was evicted when 4 blocks were stored, c when 5 were
              x   x     │
                        └─ stored again after its eviction

Runs of hashes take 16 bytes per block, and the garbage collector does not scan them.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import repeat

import numpy as np
from numpy.typing import NDArray

from cluster.blocks import HASH_BYTES, MAX_DEPTH, depths_of, join_hashes, split_hashes

MIN_GONE = 256
MAX_GONE = 8192
"""Evicted blocks are removed once they exceed a quarter of the held ones, within these bounds: some
milliseconds of work."""

MARKS = 1 << 18
"""Size of a table that marks evicted blocks by the beginning of their hash, which rules out most
others."""


class HeldBlocks:
    """count   blocks that are held"""

    __slots__ = ("_gone", "_gone_blocks", "_runs", "_stored", "count")

    def __init__(self) -> None:
        self.count = 0
        self._runs: list[bytes] = []
        self._stored = 0  # blocks in the runs
        # (blocks stored before, evicted hashes)
        self._gone: list[tuple[int, bytes]] = []
        self._gone_blocks = 0

    def store(self, blocks: Collection[bytes]) -> None:
        """Add blocks, none of which was held."""
        if blocks:
            self.count += len(blocks)
            self._stored += len(blocks)
            self._runs.append(_join(blocks))

    def evict(self, blocks: Collection[bytes]) -> None:
        """Remove blocks, each of which was held."""
        if blocks:
            self.count -= len(blocks)
            self._gone.append((self._stored, _join(blocks)))
            self._gone_blocks += len(blocks)
            if self._gone_blocks > min(MAX_GONE, max(MIN_GONE, self.count >> 2)):
                self._take_out()

    def blocks(self) -> list[bytes]:
        """All held blocks in the order in which they were stored."""
        return split_hashes(self._take_out())

    def drop_deepest(self, count: int) -> list[bytes]:
        """Remove and return the `count` blocks that are deepest in their chains; of equally deep
        ones, those stored last. The rest stays prefix-closed."""
        runs = self._take_out()
        depths = depths_of(runs)
        at_depth = np.bincount(depths, minlength=MAX_DEPTH + 1)
        deeper = at_depth[::-1].cumsum()[::-1]  # blocks at this depth or deeper
        last = int((deeper >= count).nonzero()[0][-1]) if count else MAX_DEPTH
        gone = depths > last
        at_last = (depths == last).nonzero()[0]
        gone[at_last[len(at_last) - (count - int(gone.sum())) :]] = True
        hashes = np.frombuffer(runs, dtype=f"V{HASH_BYTES}")
        self.count -= count
        self._stored -= count
        self._runs = [hashes[~gone].tobytes()]
        return split_hashes(hashes[gone].tobytes())

    def _take_out(self) -> bytes:
        """Remove the evicted hashes. Returns all held blocks as one run."""
        runs = b"".join(self._runs)
        if self._gone:
            evicted_at: dict[bytes, int] = {}
            for place, joined in self._gone:
                evicted_at.update(dict.fromkeys(split_hashes(joined), place))
            # equal beginnings are not equal hashes: the marks only select what to compare
            marks = np.zeros(MARKS, dtype=np.bool_)
            marks[_beginnings(b"".join(evicted_at))] = True
            stored = np.frombuffer(runs, dtype=f"V{HASH_BYTES}")
            places = marks[_beginnings(runs)].nonzero()[0]
            latest = map(evicted_at.get, split_hashes(stored[places].tobytes()), repeat(0))
            out = places[np.fromiter(latest, np.int64, len(places)) > places]
            kept = np.ones(self._stored, dtype=np.bool_)
            kept[out] = False
            runs = stored[kept].tobytes()
            self._gone.clear()
            self._gone_blocks = 0
            self._stored = self.count
        self._runs = [runs]
        return runs


def _beginnings(joined: bytes) -> NDArray[np.integer]:
    return np.frombuffer(joined, dtype=np.uint32)[:: HASH_BYTES // 4] & (MARKS - 1)


def _join(blocks: Collection[bytes]) -> bytes:
    joined = join_hashes(blocks)
    if len(joined) != HASH_BYTES * len(blocks):
        raise ValueError(f"block hashes must have {HASH_BYTES} bytes each")
    return joined
