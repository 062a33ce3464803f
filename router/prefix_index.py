"""Which worker holds which block: block hash -> bit mask of worker slots.

The sets that workers publish are prefix-closed (who holds `h[i]` holds `h[0..i-1]`), so the
depth of every worker in a chain is found by divide and conquer: one probe in the middle of a
range splits the workers into those that go deeper and those that do not.

    chain   h[0] h[1] … h[mid] … h[n-1]
                        │
            holders ────┴──▶ search (mid, n]      others ──▶ search [0, mid]

Where many workers part, a common beginning ends: mostly where it ended for the last prompts
with the same first block. These places are probed before the middle.

The index is bounded. Beyond `max_pairs` (block, worker) pairs it drops the latest stored blocks
of the worker that has most: parents are stored before what continues them, so these are the
deepest of their chains. A hit is then taken for shorter than it is, never for longer.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from router.bitmask import slots_of, truth_of

MAX_PAIRS = 20_000_000
"""Some 3 GB at most."""

FEW = 8
"""Slots that are written one by one; more are written at once."""


MAX_PARTINGS = 4
"""Places where many workers parted that are remembered for one first block."""

MAX_BEGINNINGS = 4096
"""First blocks for which they are."""


class IndexCheckError(AssertionError):
    """The two sides of the index disagree. Its text says where."""


class PrefixIndex:
    """Blocks by worker slot. All changes are idempotent; `replace` and `drop` forget exactly.

    A slot is a small non-negative number that the caller assigns to a worker and may reuse
    after `drop`.
    """

    def __init__(self, max_pairs: int = MAX_PAIRS) -> None:
        if max_pairs < 1:
            raise ValueError(f"max_pairs must be at least 1, got {max_pairs}")
        self.max_pairs = max_pairs
        self._masks: dict[bytes, int] = {}
        # in order of storing: whatever is cut off the end leaves a prefix-closed set
        self._blocks: dict[int, dict[bytes, None]] = {}
        self._dropped: dict[int, int] = {}
        self._pairs = 0
        # first block -> depths at which many workers parted, the deepest first
        self._partings: dict[bytes, list[int]] = {}

    def __len__(self) -> int:
        """Number of different blocks that any slot holds."""
        return len(self._masks)

    @property
    def pairs(self) -> int:
        """Number of (block, slot) pairs."""
        return self._pairs

    def store(self, slot: int, hashes: Iterable[bytes]) -> None:
        """The worker in `slot` holds `hashes` from now on: parents before what continues them."""
        masks, held = self._masks, self._blocks.setdefault(slot, {})
        before_pairs = len(held)
        bit = 1 << slot
        fresh = [block for block in hashes if block not in held]
        held.update(dict.fromkeys(fresh))
        masks_before = list(map(masks.get, fresh))
        if masks_before.count(None) == len(fresh):
            # one int object a slot serves all blocks that it alone holds
            masks.update(dict.fromkeys(fresh, bit))
        else:
            seen = seen_with_bit = 0
            for block, before in zip(fresh, masks_before, strict=True):
                if before is None:
                    masks[block] = bit
                    continue
                if before is not seen:  # blocks of one chain mostly have the very same holders
                    seen, seen_with_bit = before, before | bit
                masks[block] = seen_with_bit
        self._pairs += len(held) - before_pairs
        if self._pairs > self.max_pairs:
            self._shrink()

    def evict(self, slot: int, hashes: Collection[bytes]) -> None:
        """The worker in `slot` does not hold `hashes` any more; unknown ones are no error."""
        held = self._blocks.get(slot, {})
        known = [block for block in hashes if held.pop(block, True) is None]
        self._clear(known, slot)
        self._pairs -= len(known)
        dropped = self._dropped.get(slot, 0)
        if dropped:
            unknown = len(hashes) - len(known)
            self._dropped[slot] = max(0, dropped - unknown)

    def replace(self, slot: int, hashes: Iterable[bytes]) -> None:
        """The worker in `slot` holds exactly `hashes`."""
        wanted = dict.fromkeys(hashes)
        self._dropped.pop(slot, None)
        self.evict(slot, self._blocks.get(slot, {}).keys() - wanted.keys())
        self.store(slot, wanted)

    def drop(self, slot: int) -> None:
        """Forget `slot`, which may then be given to another worker."""
        held = self._blocks.pop(slot, {})
        self._clear(held, slot)
        self._pairs -= len(held)
        self._dropped.pop(slot, None)

    def holds(self, slot: int, block: bytes) -> bool:
        """Whether the worker in `slot` holds `block`."""
        return bool(self._masks.get(block, 0) >> slot & 1)

    def holders(self, block: bytes) -> int:
        """The slots that hold `block`, as a mask."""
        return self._masks.get(block, 0)

    def blocks_of(self, slot: int) -> frozenset[bytes]:
        """All blocks of `slot` (a copy)."""
        return frozenset(self._blocks.get(slot, ()))

    def count(self, slot: int) -> int:
        """Number of blocks of `slot`."""
        return len(self._blocks.get(slot, ()))

    def dropped(self, slot: int) -> int:
        """Blocks that the worker in `slot` holds but that were dropped for want of room."""
        return self._dropped.get(slot, 0)

    @property
    def dropped_pairs(self) -> int:
        """Blocks of all workers that were dropped for want of room."""
        return sum(self._dropped.values())

    @property
    def problem(self) -> str:
        """In words, what the index leaves out; "" where it is whole."""
        dropped = self.dropped_pairs
        if not dropped:
            return ""
        return (
            f"{dropped} cached blocks are left out because {self.max_pairs} are indexed already: "
            "long prefixes are taken for shorter than they are; raise gateway.index_max_pairs"
        )

    def depths(
        self, chain: Sequence[bytes], slots: int, size: int, limit: int | None = None
    ) -> NDArray[np.int64]:
        """Leading blocks of `chain` that each slot of the mask `slots` holds: `[size]` blocks.

        Slots outside the mask get 0. With a `limit`, only so many blocks of the chain are looked
        at. Cost: about `log2(len(chain))` probes for each different depth.

        Contract: the depth `d` of a slot is a boundary of what it holds: `d` is 0 or
        `chain[d-1]` is held, and `d` is the chain's length or `chain[d]` is not held. In a
        prefix-closed set there is one boundary, the contiguous prefix. In a set that is not
        closed the search may end at a boundary behind a hole; it never claims more than the
        deepest block that is held.
        """
        found = np.zeros(size, dtype=np.int64)
        held = self._masks.get
        length = len(chain) if limit is None else limit
        if not slots or not length:
            return found
        done: list[tuple[int, int]] = []
        partings = self._partings.get(chain[0], ())
        ranges = self._at_partings(chain, slots, length, partings, done)
        # (low, high, mask): every slot of `mask` has its boundary in [low, high]
        while ranges:
            low, high, mask = ranges.pop()
            while low < high:
                middle = (low + high) >> 1
                deeper = held(chain[middle], 0) & mask
                if not deeper:
                    high = middle
                elif deeper == mask:
                    low = middle + 1
                else:
                    ranges.append((low, middle, mask ^ deeper))
                    low, mask = middle + 1, deeper
            done.append((low, mask))
        places: list[int] = []
        values: list[int] = []
        for depth, mask in done:
            if not depth:
                continue
            if mask.bit_count() <= FEW:
                for slot in slots_of(mask):
                    places.append(slot)
                    values.append(depth)
            else:
                found[truth_of(mask, size)] = depth
                if depth not in partings:
                    self._part(chain[0], depth)
        if places:
            found[places] = values
        return found

    def _at_partings(
        self,
        chain: Sequence[bytes],
        slots: int,
        length: int,
        partings: Sequence[int],
        done: list[tuple[int, int]],
    ) -> list[tuple[int, int, int]]:
        """Split `slots` at `partings`, the deepest first, by two probes each.

        Puts (depth, mask) of those that part exactly there into `done`; returns what is left to
        search as (low, high, mask).
        """
        held = self._masks.get
        ranges: list[tuple[int, int, int]] = []
        rest, high = slots, length
        for parting in partings:
            if parting > high:
                continue
            reach = held(chain[parting - 1], 0) & rest
            if reach:
                beyond = held(chain[parting], 0) & reach if parting < high else 0
                if beyond:
                    ranges.append((parting + 1, high, beyond))
                if beyond != reach:
                    done.append((parting, reach ^ beyond))
                rest ^= reach
                if not rest:
                    return ranges
            high = parting - 1  # whoever is left does not hold it
        ranges.append((0, high, rest))
        return ranges

    def check(self) -> None:
        """Raise where masks and sets disagree, with figures."""
        rebuilt: dict[bytes, int] = {}
        for slot, blocks in self._blocks.items():
            for block in blocks:
                rebuilt[block] = rebuilt.get(block, 0) | 1 << slot
        if rebuilt != self._masks:
            wrong = [
                block
                for block in rebuilt.keys() | self._masks.keys()
                if rebuilt.get(block, 0) != self._masks.get(block, 0)
            ]
            raise IndexCheckError(
                f"{len(wrong)} of {len(rebuilt)} blocks have a mask that differs from the "
                f"sets, first {wrong[0].hex()}"
            )
        pairs = sum(map(len, self._blocks.values()))
        if pairs != self._pairs or pairs > self.max_pairs:
            raise IndexCheckError(
                f"{pairs} pairs are held, {self._pairs} counted, {self.max_pairs} allowed"
            )

    def _part(self, first: bytes, depth: int) -> None:
        """Remember a parting, in the place of the nearest one where there are enough."""
        partings = self._partings.get(first)
        if partings is None:
            if len(self._partings) >= MAX_BEGINNINGS:
                self._partings.clear()
            partings = self._partings[first] = []
        if len(partings) >= MAX_PARTINGS:
            partings.remove(min(partings, key=lambda parting: abs(parting - depth)))
        partings.append(depth)
        partings.sort(reverse=True)

    def _clear(self, blocks: Iterable[bytes], slot: int) -> None:
        """Take `slot`, which holds each of `blocks`, out of their masks."""
        masks, bit = self._masks, 1 << slot
        for block in blocks:
            mask = masks.pop(block)
            if mask != bit:
                masks[block] = mask ^ bit

    def _shrink(self) -> None:
        """Drop down to `max_pairs`: the latest stored of the slot that has most, down to its
        even share at most."""
        share = self.max_pairs // len(self._blocks)
        while self._pairs > self.max_pairs:
            slot = max(self._blocks, key=lambda each: len(self._blocks[each]))
            held = self._blocks[slot]
            excess = min(self._pairs - self.max_pairs, len(held) - share)
            latest = list(islice(reversed(held), excess))
            for block in latest:
                del held[block]
            self._clear(latest, slot)
            self._pairs -= excess
            self._dropped[slot] = self._dropped.get(slot, 0) + excess
