"""A heap of leaves from which any leaf can be removed, for eviction policies."""

from __future__ import annotations

import heapq
from typing import Generic, NamedTuple, TypeVar

Key = TypeVar("Key", bound=tuple[float, ...])

SPARE = 64
"""The heap is rebuilt when its stale entries outnumber the valid ones by this many."""


class _Entry(NamedTuple, Generic[Key]):
    key: Key
    stamp: int
    block: int


class LeafHeap(Generic[Key]):
    """Blocks by key, the least first; equal keys in order of insertion.

    A discarded block leaves a stale entry, which is skipped later. Every operation is amortised
    O(log leaves).
    """

    def __init__(self) -> None:
        self._heap: list[_Entry[Key]] = []
        self._stamps: dict[int, int] = {}
        self._count = 0

    def __len__(self) -> int:
        return len(self._stamps)

    def push(self, block: int, key: Key) -> None:
        """Add a block that is not in the heap."""
        self._count += 1
        self._stamps[block] = self._count
        heapq.heappush(self._heap, _Entry(key, self._count, block))

    def discard(self, block: int) -> None:
        """Remove a block. Raises KeyError if it is not in the heap."""
        del self._stamps[block]
        if len(self._heap) > 2 * len(self._stamps) + SPARE:
            self._heap = [e for e in self._heap if self._stamps.get(e.block) == e.stamp]
            heapq.heapify(self._heap)

    def least(self) -> _Entry[Key] | None:
        """The entry with the least key, without removing it; None if the heap is empty."""
        heap, stamps = self._heap, self._stamps
        while heap:
            entry = heap[0]
            if stamps.get(entry.block) == entry.stamp:
                return entry
            heapq.heappop(heap)
        return None

    def pop(self) -> int:
        """Remove the block with the least key. Raises IndexError if the heap is empty."""
        entry = self.least()
        if entry is None:
            raise IndexError("the heap of leaves is empty")
        heapq.heappop(self._heap)
        del self._stamps[entry.block]
        return entry.block

    def clear(self) -> None:
        """Forget all."""
        self._heap.clear()
        self._stamps.clear()
