"""`workload_aware`: evict the block that its class of request makes least likely to be used again.

Source: "KVCache in the Wild" (USENIX ATC'25). Its finding: over all requests the time to the next
use of a block is hard to predict, but within one class of request type and turn it follows an
exponential distribution. Its policy: evict the lowest pair of (probability of a use within the time
that a block lives in the cache, offset from the prompt's end).
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence

from worker.block_pool import BlockPool
from worker.eviction.base import BlockUse
from worker.leaf_heap import LeafHeap

MAX_CLASSES = 64
"""Maximum of classes; further ones share the last. An eviction looks at one leaf per class."""

LAST_TURN = 8
"""Later turns form one class."""

MEMORY = 4096
"""Uses of blocks after which a class halves all its counts, to adapt."""

PRIOR_S = 60.0
"""Assumed time to the next use and life of a block, before any was observed."""

LIFE_SHARE = 0.01
"""Weight of one eviction in the mean life of a block."""


class ReuseFit:
    """Observed uses of the blocks of one class: how many were used again, and after how long.

    P(a next use at all) = p and, given one, P(it takes longer than t) = exp(-rate * t); both are
    maximum likelihood estimates with one imagined observation each.
    """

    __slots__ = ("_reuses", "_uses", "_waited_s")

    def __init__(self) -> None:
        self._uses = self._reuses = self._waited_s = 0.0

    def opened(self) -> None:
        """A block was used; another use may follow."""
        self._uses += 1.0
        if self._uses > MEMORY:
            self._uses /= 2
            self._reuses /= 2
            self._waited_s /= 2

    def reused(self, after_s: float) -> None:
        """It followed."""
        self._reuses += 1.0
        self._waited_s += after_s

    @property
    def share(self) -> float:
        """Share of uses that were followed by another: p."""
        return (self._reuses + 1.0) / (self._uses + 2.0)

    @property
    def rate(self) -> float:
        """1 / mean seconds to the next use."""
        return (self._reuses + 1.0) / (self._waited_s + PRIOR_S)

    def probability(self, idle_s: float, life_s: float) -> float:
        """Probability of a use within the next `life_s` seconds, for a block idle for `idle_s`.

        Bayes' rule on the two above; it decreases with `idle_s`.
        """
        share, rate = min(self.share, 0.999), self.rate
        still = share * math.exp(-rate * idle_s)
        return still * -math.expm1(-rate * life_s) / (1.0 - share + still)


class WorkloadAware:
    """One heap of leaves per class, by last use and then by offset from the prompt's end.

    The probability falls with the time since the last use, so the least likely leaf of a class is
    the head of its heap: an eviction compares the heads, O(classes + log leaves).
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._numbers: dict[tuple[str, int], int] = {}
        self._fits: list[ReuseFit] = []
        self._heaps: list[LeafHeap[tuple[float, float]]] = []
        self._class_of = array("b", [-1]) * (pool.capacity + 1)
        self._offsets = array("i", bytes(4 * (pool.capacity + 1)))
        self.life_s = PRIOR_S
        """Mean time from a block's last use to its eviction: its expected life."""

    def used(self, blocks: Sequence[int], use: BlockUse) -> None:
        """Learn from the idle time of known blocks, and move all to the class of their new user."""
        number = self._number(use)
        fit = self._fits[number]
        last_used, class_of = self._pool.last_used, self._class_of
        offset = use.prompt_blocks - 1 - use.depth
        for block in blocks:
            before = class_of[block]
            if before >= 0:
                self._fits[before].reused(max(0.0, use.now - last_used[block]))
            fit.opened()
            class_of[block] = number
            last_used[block] = use.now
            self._offsets[block] = offset
            offset -= 1

    def leaf(self, block: int) -> None:
        """Add the leaf to the heap of its class."""
        key = (self._pool.last_used[block], float(self._offsets[block]))
        self._heaps[self._class_of[block]].push(block, key)

    def withdrawn(self, block: int) -> None:
        """Remove the leaf from the heap of its class."""
        self._heaps[self._class_of[block]].discard(block)

    def victim(self, now: float) -> int:
        """The leaf with the lowest (probability, offset) of all classes."""
        life_s = self.life_s
        least: tuple[float, float] | None = None
        chosen = self._heaps[0]
        idle_s = 0.0
        for fit, heap in zip(self._fits, self._heaps, strict=True):
            head = heap.least()
            if head is None:
                continue
            waited_s = max(0.0, now - head.key[0])
            pair = (fit.probability(waited_s, life_s), head.key[1])
            if least is None or pair < least:
                least, chosen, idle_s = pair, heap, waited_s
        block = chosen.pop()
        self._class_of[block] = -1
        self.life_s += LIFE_SHARE * (idle_s - self.life_s)
        return block

    def expired(self, now: float) -> int:
        """Nothing expires."""
        return 0

    def clear(self) -> None:
        """Forget the blocks, but not the statistics of their classes."""
        for heap in self._heaps:
            heap.clear()
        self._class_of = array("b", [-1]) * len(self._class_of)

    def probability(self, request_type: str, turn: int, idle_s: float) -> float:
        """Probability of a use within a block's life, for inspection."""
        fit = self._fits[self._number(BlockUse(0.0, 0, 0, request_type, turn))]
        return fit.probability(idle_s, self.life_s)

    def _number(self, use: BlockUse) -> int:
        name = (use.request_type, min(use.turn, LAST_TURN))
        number = self._numbers.get(name)
        if number is None:
            if len(self._fits) == MAX_CLASSES:
                return MAX_CLASSES - 1
            number = self._numbers[name] = len(self._fits)
            self._fits.append(ReuseFit())
            self._heaps.append(LeafHeap())
        return number
