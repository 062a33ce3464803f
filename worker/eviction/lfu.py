"""`lfu`: evict the block that was used least often."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from worker.block_pool import BlockPool
from worker.eviction.base import BlockUse
from worker.leaf_heap import LeafHeap


class Lfu:
    """Evict the block with the fewest uses; among equals, the one used longest ago.

    Counts age as in LFU with dynamic aging (Arlitt et al., 2000): counts start from the count of
    the last victim, so that blocks that were popular once do not stay forever.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._heap: LeafHeap[tuple[float, float]] = LeafHeap()
        self._uses = array("q", bytes(8 * (pool.capacity + 1)))
        self._ranks = array("q", bytes(8 * (pool.capacity + 1)))
        self._floor = 0

    def used(self, blocks: Sequence[int], use: BlockUse) -> None:
        """Count a use."""
        uses, ranks, floor = self._uses, self._ranks, self._floor
        for block in blocks:
            uses[block] += 1
            ranks[block] = floor + uses[block]

    def leaf(self, block: int) -> None:
        """Rank the leaf by its uses, then by the time of the last one."""
        self._heap.push(block, (self._ranks[block], self._pool.last_used[block]))

    def withdrawn(self, block: int) -> None:
        """Remove the leaf; its count stays."""
        self._heap.discard(block)

    def victim(self, now: float) -> int:
        """The leaf with the lowest rank."""
        block = self._heap.pop()
        self._floor = max(self._floor, self._ranks[block])
        self._uses[block] = 0
        return block

    def expired(self, now: float) -> int:
        """Nothing expires."""
        return 0

    def clear(self) -> None:
        """Forget all counts."""
        self._heap.clear()
        for counts in (self._uses, self._ranks):
            counts[:] = array("q", bytes(8 * len(counts)))
        self._floor = 0
