"""`ttl`: evict blocks that were not used for a given time, else the least recently used one."""

from __future__ import annotations

from collections.abc import Sequence

from worker.block_pool import BlockPool
from worker.eviction.base import BlockUse
from worker.leaf_heap import LeafHeap


class Ttl:
    """Evict the least recently used block, and every block not used for `ttl_s` seconds.

    A block is never older than the blocks that continue it, so a chain expires from its end.
    """

    def __init__(self, pool: BlockPool, ttl_s: float) -> None:
        """Raises ValueError unless `ttl_s` is above 0."""
        if not ttl_s > 0:
            raise ValueError(f"ttl_s must be above 0 seconds, got {ttl_s:g}")
        self.ttl_s = ttl_s
        self._pool = pool
        self._heap: LeafHeap[tuple[float]] = LeafHeap()

    def used(self, blocks: Sequence[int], use: BlockUse) -> None:
        """Nothing to do: the pool stores the time."""

    def leaf(self, block: int) -> None:
        """Add the leaf by the time of its last use."""
        self._heap.push(block, (self._pool.last_used[block],))

    def withdrawn(self, block: int) -> None:
        """Remove the leaf, which is used again."""
        self._heap.discard(block)

    def victim(self, now: float) -> int:
        """The least recently used leaf."""
        return self._heap.pop()

    def expired(self, now: float) -> int:
        """The least recently used leaf, if it was not used for `ttl_s`."""
        oldest = self._heap.least()
        if oldest is None or now - oldest.key[0] < self.ttl_s:
            return 0
        return self._heap.pop()

    def clear(self) -> None:
        """Forget all."""
        self._heap.clear()
