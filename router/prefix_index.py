"""Which worker holds which block: block hash -> bit mask of worker slots.

The sets that workers publish are prefix-closed (a worker that holds `h[i]` holds `h[0..i-1]`), so
the depth of every worker in a chain is found by divide and conquer: one probe in the middle of a
range splits the workers into those that go deeper and those that do not.

    chain   h[0] h[1] … h[mid] … h[n-1]
                        │
            holders ────┴──▶ search (mid, n]      others ──▶ search [0, mid]

Many workers end at the same depth where a common prefix ends, mostly where it ended for earlier
prompts with the same first block. Beyond the deepest of these depths a conversation begins, and its
few holders mostly end where they ended last time, or later. So two blocks per remembered depth, the
last one held and the first one not held, are probed first; only what lies between them is searched.

The masks are in 256 dictionaries, by the first byte of the hash. A dictionary that grows moves all
its entries at once: ten million entries would block the event loop for a second, 80,000 block it
for some milliseconds.

The index is bounded. Beyond `max_pairs` (block, worker) pairs it drops the deepest blocks of the
worker with the most blocks, so the beginnings of all prefixes stay known. Hits are then
underestimated, never overestimated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from router.bitmask import FEW, Spread
from router.held_blocks import HeldBlocks

MAX_PAIRS = 20_000_000
"""Some 1.8 GB at most: 90 bytes per pair."""

SPARE = 64
"""When the index is full, at least 1/SPARE of a worker's share is dropped at once, because each
drop scans all of its blocks for the deepest."""

SHARDS = 256

MAX_PARTINGS = 4
"""Most depths remembered for one block where a shared prefix or a conversation begins."""

MAX_BEGINNINGS = 16_384
"""Most blocks with remembered depths."""


class IndexCheckError(AssertionError):
    """The two sides of the index disagree; the message says where."""


class PrefixIndex:
    """Blocks by worker slot. All changes are idempotent.

    A slot is a small non-negative number that the caller assigns to a worker and may reuse
    after `drop`.
    """

    def __init__(self, max_pairs: int = MAX_PAIRS) -> None:
        if max_pairs < 1:
            raise ValueError(f"max_pairs must be at least 1, got {max_pairs}")
        self.max_pairs = max_pairs
        self._shards: list[dict[bytes, int]] = [{} for _ in range(SHARDS)]
        self._held: dict[int, HeldBlocks] = {}
        self._dropped: dict[int, int] = {}
        self._pairs = 0
        # indices to probe first, descending, `d` and `d - 1` per remembered depth `d`: by the first
        # block of a chain, depths where many workers end; by the block at the deepest of these,
        # those where the few others ended
        self._places: dict[bytes, tuple[int, ...]] = {}
        self._spread = Spread()

    def __len__(self) -> int:
        """Number of distinct blocks that any slot holds."""
        return sum(map(len, self._shards))

    @property
    def pairs(self) -> int:
        """Number of (block, slot) pairs."""
        return self._pairs

    def store(self, slot: int, hashes: Iterable[bytes]) -> None:
        """Add `hashes` to the blocks of `slot`: parents before their children."""
        held = self._held.get(slot)
        if held is None:
            held = self._held[slot] = HeldBlocks()
        shards = self._shards
        new: list[bytes] = []
        append = new.append
        bit = 1 << slot  # one shared object for all of these blocks that no other slot holds
        seen = seen_with_bit = 0
        for block in hashes:
            shard = shards[block[0]]
            before = shard.get(block)
            if before is None:
                shard[block] = bit
            elif before is seen:  # blocks of one chain mostly have the same holders
                shard[block] = seen_with_bit
            elif before & bit:
                continue
            else:
                seen, seen_with_bit = before, before | bit
                shard[block] = seen_with_bit
            append(block)
        held.store(new)
        self._pairs += len(new)
        if self._pairs > self.max_pairs:
            self._shrink()

    def evict(self, slot: int, hashes: Collection[bytes]) -> None:
        """Remove `hashes` from the blocks of `slot`; unknown ones are ignored."""
        unknown = self._clear(hashes, slot)
        known = (Counter(hashes) - Counter(unknown)).keys() if unknown else hashes
        held = self._held.get(slot)
        if held is not None:
            held.evict(known)
        self._pairs -= len(known)
        dropped = self._dropped.get(slot, 0)
        if dropped:
            self._dropped[slot] = max(0, dropped - len(unknown))

    def replace(self, slot: int, hashes: Iterable[bytes]) -> None:
        """Set the blocks of `slot` to exactly `hashes`."""
        wanted = dict.fromkeys(hashes)
        self._dropped.pop(slot, None)
        self.evict(slot, [block for block in self._blocks(slot) if block not in wanted])
        self.store(slot, wanted)

    def drop(self, slot: int) -> None:
        """Remove all blocks of `slot`, which may then be assigned to another worker."""
        blocks = self._blocks(slot)
        self._clear(blocks, slot)
        self._pairs -= len(blocks)
        self._held.pop(slot, None)
        self._dropped.pop(slot, None)

    def holds(self, slot: int, block: bytes) -> bool:
        """Whether the worker in `slot` holds `block`."""
        return bool(self.holders(block) >> slot & 1)

    def holders(self, block: bytes) -> int:
        """The slots that hold `block`, as a mask."""
        return self._shards[block[0]].get(block, 0)

    def blocks_of(self, slot: int) -> frozenset[bytes]:
        """All blocks of `slot` (a copy)."""
        return frozenset(self._blocks(slot))

    def count(self, slot: int) -> int:
        """Number of blocks of `slot`."""
        held = self._held.get(slot)
        return 0 if held is None else held.count

    def dropped(self, slot: int) -> int:
        """Blocks that the worker in `slot` holds but that the full index has dropped."""
        return self._dropped.get(slot, 0)

    @property
    def dropped_pairs(self) -> int:
        """Blocks of all workers that the full index has dropped."""
        return sum(self._dropped.values())

    @property
    def problem(self) -> str:
        """What the index leaves out, in words; "" if it is complete."""
        dropped = self.dropped_pairs
        if not dropped:
            return ""
        return (
            f"the prefix index is full and leaves out {dropped} cached blocks, so hits of long "
            f"prefixes are underestimated: raise gateway.index_max_pairs ({self.max_pairs})"
        )

    def depths(
        self,
        chain: Sequence[bytes],
        slots: int,
        size: int,
        limit: int | None = None,
        unit: int = 1,
    ) -> NDArray[np.int64]:
        """Leading blocks of `chain` that each slot of the mask `slots` holds, times `unit`:
        `[size]`.

        Slots outside the mask get 0. With a `limit`, only so many blocks of the chain are
        considered. Cost: about `log2(len(chain))` probes for each distinct depth.

        Contract: the depth `d` of a slot is a boundary of what it holds: `d` is 0 or
        `chain[d-1]` is held, and `d` is the chain's length or `chain[d]` is not held. A
        prefix-closed set has one boundary, the contiguous prefix. In a set that is not
        prefix-closed the search may end at a boundary behind a gap, but never beyond the deepest
        block that is held.
        """
        return self._spread.array(self.ends(chain, slots, limit), size, unit)

    def ends(
        self, chain: Sequence[bytes], slots: int, limit: int | None = None
    ) -> list[tuple[int, int]]:
        """`depths` as (depth, slots that end there), the deepest first, without depth 0."""
        length = len(chain) if limit is None else limit
        if not slots or not length:
            return []
        shards = self._shards
        shared: tuple[int, ...] = self._places.get(chain[0], ())
        own: tuple[int, ...] = ()
        for begin in shared[::2]:
            if begin < length:
                own = self._places.get(chain[begin], ())
                break
        ends: list[tuple[int, int]] = []
        high, rest, searched = length, slots, False
        for place in own + shared:
            if place >= length:
                continue
            block = chain[place]
            deeper = shards[block[0]].get(block, 0) & rest
            if deeper:
                if place + 1 == high:
                    ends.append((high, deeper))
                else:
                    searched = True
                    self._search(chain, place + 1, high, deeper, ends)
                rest ^= deeper
                if not rest:
                    break
            high = place
        if rest and high:
            searched = True
            self._search(chain, 0, high, rest, ends)
            if ends and not ends[-1][0]:
                ends.pop()
        if searched:
            self._remember(chain, length, shared[::2], ends)
        return ends

    def _search(
        self, chain: Sequence[bytes], low: int, high: int, mask: int, ends: list[tuple[int, int]]
    ) -> None:
        """Append (depth, slots), the deepest first, for the slots of `mask`, whose boundaries are
        in `[low, high]`."""
        shards = self._shards
        ranges = [(low, high, mask)]
        while ranges:
            low, high, mask = ranges.pop()
            while low < high:
                middle = (low + high) >> 1
                block = chain[middle]
                deeper = shards[block[0]].get(block, 0) & mask
                if not deeper:
                    high = middle
                elif deeper == mask:
                    low = middle + 1
                else:
                    ranges.append((low, middle, mask ^ deeper))
                    low, mask = middle + 1, deeper
            ends.append((low, mask))

    def check(self) -> None:
        """Raise IndexCheckError, with figures, if masks and sets disagree."""
        rebuilt: dict[bytes, int] = {}
        for slot, held in self._held.items():
            blocks = held.blocks()
            if not len(blocks) == len(set(blocks)) == held.count:
                raise IndexCheckError(
                    f"slot {slot} has {len(blocks)} blocks, {len(set(blocks))} different ones, "
                    f"and counts {held.count}"
                )
            for block in blocks:
                rebuilt[block] = rebuilt.get(block, 0) | 1 << slot
        masks = {block: mask for shard in self._shards for block, mask in shard.items()}
        if rebuilt != masks:
            wrong = [
                block
                for block in rebuilt.keys() | masks.keys()
                if rebuilt.get(block, 0) != masks.get(block, 0)
            ]
            raise IndexCheckError(
                f"{len(wrong)} of {len(rebuilt)} blocks have a mask that differs from the "
                f"sets, first {wrong[0].hex()}"
            )
        pairs = sum(held.count for held in self._held.values())
        if pairs != self._pairs or pairs > self.max_pairs:
            raise IndexCheckError(
                f"{pairs} pairs are held, {self._pairs} counted, {self.max_pairs} allowed"
            )

    def _remember(
        self,
        chain: Sequence[bytes],
        length: int,
        shared: Sequence[int],
        ends: Sequence[tuple[int, int]],
    ) -> None:
        """Remember the `ends` of a chain: those of many slots, with the depths `shared`, under its
        first block; those of few slots under the block after which only few go on."""
        depths = list(shared)
        for depth, mask in ends:
            if mask.bit_count() > FEW and depth not in depths:
                if len(depths) >= MAX_PARTINGS:
                    depths.remove(min(depths, key=lambda each: abs(each - depth)))
                depths.append(depth)
                self._keep(chain[0], depths)
        begin = max((depth for depth in depths if depth < length), default=0)
        if begin:
            few = [depth for depth, mask in ends if depth > begin and mask.bit_count() <= FEW]
            self._keep(chain[begin], few[:MAX_PARTINGS])

    def _keep(self, block: bytes, depths: Iterable[int]) -> None:
        if len(self._places) >= MAX_BEGINNINGS and block not in self._places:
            self._places.clear()
        self._places[block] = tuple(
            place for depth in sorted(depths, reverse=True) for place in (depth, depth - 1)
        )

    def _blocks(self, slot: int) -> list[bytes]:
        """All blocks of `slot` in the order in which they were stored."""
        held = self._held.get(slot)
        return [] if held is None else held.blocks()

    def _clear(self, blocks: Iterable[bytes], slot: int) -> list[bytes]:
        """Remove `slot` from the masks of `blocks`; returns those that it does not hold."""
        shards, bit = self._shards, 1 << slot
        unknown: list[bytes] = []
        for block in blocks:
            shard = shards[block[0]]
            mask = shard.pop(block, 0)
            if mask != bit:
                if mask & bit:
                    shard[block] = mask ^ bit
                else:
                    unknown.append(block)
                    if mask:
                        shard[block] = mask
        return unknown

    def _shrink(self) -> None:
        """Drop pairs down to `max_pairs`: the deepest blocks of the largest slot, down to its even
        share, and some more to make room for the next reports."""
        share = self.max_pairs // len(self._held)
        while self._pairs > self.max_pairs:
            slot = max(self._held, key=lambda each: self._held[each].count)
            held = self._held[slot]
            excess = min(self._pairs - self.max_pairs, held.count - share) + share // SPARE
            self._clear(held.drop_deepest(excess), slot)
            self._pairs -= excess
            self._dropped[slot] = self._dropped.get(slot, 0) + excess
