"""`lru`: evict the block that was released longest ago."""

from __future__ import annotations

from collections.abc import Sequence

from worker.block_pool import BlockPool
from worker.eviction.base import BlockUse


class Lru:
    """Evict the block that was released longest ago.

    The pool's list of kept blocks is in this order, and its head is always a leaf: a sequence
    references its whole cached prefix and releases it deepest block first, so a block comes after
    all blocks that continue it. So the policy has no state and is O(1).
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool

    def used(self, blocks: Sequence[int], use: BlockUse) -> None:
        """Nothing to do: releasing the blocks puts them last."""

    def leaf(self, block: int) -> None:
        """Nothing to do."""

    def withdrawn(self, block: int) -> None:
        """Nothing to do."""

    def victim(self, now: float) -> int:
        """The oldest kept block."""
        return self._pool.oldest_kept()

    def expired(self, now: float) -> int:
        """Nothing expires."""
        return 0

    def clear(self) -> None:
        """Nothing to do."""
