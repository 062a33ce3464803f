"""`lru`: evict the block that was released longest ago."""

from __future__ import annotations

from collections.abc import Sequence

from worker.block_pool import BlockPool
from worker.eviction.base import BlockUse


class Lru:
    """Evict the block that was released longest ago.

    The pool's list of kept blocks already is that order, and its head always is a leaf: a sequence
    references its whole cached prefix and releases it deepest block first, so a block lies behind
    everything that continues it. Hence no state and O(1).
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool

    def used(self, blocks: Sequence[int], use: BlockUse) -> None:
        """Nothing to note: releasing the blocks puts them last."""

    def leaf(self, block: int) -> None:
        """Nothing to note."""

    def withdrawn(self, block: int) -> None:
        """Nothing to note."""

    def victim(self, now: float) -> int:
        """The oldest kept block."""
        return self._pool.oldest_kept()

    def expired(self, now: float) -> int:
        """Nothing expires."""
        return 0

    def clear(self) -> None:
        """Nothing to forget."""
