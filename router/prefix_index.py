"""Which worker holds which block: block hash -> bit mask of worker slots.

The sets that workers publish are prefix-closed (who holds `h[i]` holds `h[0..i-1]`), so the
depth of every worker in a chain is found by divide and conquer: one probe in the middle of a
range splits the workers into those that go deeper and those that do not.

    chain   h[0] h[1] … h[mid] … h[n-1]
                        │
            holders ────┴──▶ search (mid, n]      others ──▶ search [0, mid]
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

_NOTHING: Mapping[bytes, int] = MappingProxyType({})


class IndexCheckError(AssertionError):
    """The two sides of the index disagree. Its text says where."""


class PrefixIndex:
    """Blocks by worker slot. All changes are idempotent; `replace` and `drop` forget exactly.

    A slot is a small non-negative number that the caller assigns to a worker and may reuse
    after `drop`.
    """

    def __init__(self) -> None:
        self._masks: dict[bytes, int] = {}
        self._blocks: dict[int, set[bytes]] = {}

    def __len__(self) -> int:
        """Number of different blocks that any slot holds."""
        return len(self._masks)

    def store(self, slot: int, hashes: Iterable[bytes]) -> None:
        """The worker in `slot` holds `hashes` from now on."""
        masks, held = self._masks, self._blocks.setdefault(slot, set())
        bit = 1 << slot
        for block in hashes:
            if block in held:
                continue
            held.add(block)
            before = masks.get(block)
            # one int object a slot serves all blocks that it alone holds
            masks[block] = bit if before is None else before | bit

    def evict(self, slot: int, hashes: Iterable[bytes]) -> None:
        """The worker in `slot` does not hold `hashes` any more; unknown ones are no error."""
        held = self._blocks.get(slot)
        if not held:
            return
        for block in hashes:
            if block in held:
                held.remove(block)
                self._clear(block, slot)

    def replace(self, slot: int, hashes: Iterable[bytes]) -> None:
        """The worker in `slot` holds exactly `hashes`."""
        wanted = set(hashes)
        self.evict(slot, self._blocks.get(slot, set()) - wanted)
        self.store(slot, wanted)

    def drop(self, slot: int) -> None:
        """Forget `slot`, which may then be given to another worker."""
        for block in self._blocks.pop(slot, ()):
            self._clear(block, slot)

    def holds(self, slot: int, block: bytes) -> bool:
        """Whether the worker in `slot` holds `block`."""
        return bool(self._masks.get(block, 0) >> slot & 1)

    def blocks_of(self, slot: int) -> frozenset[bytes]:
        """All blocks of `slot` (a copy)."""
        return frozenset(self._blocks.get(slot, ()))

    def count(self, slot: int) -> int:
        """Number of blocks of `slot`."""
        return len(self._blocks.get(slot, ()))

    def depths(
        self,
        chain: Sequence[bytes],
        slots: int,
        size: int,
        coming: Mapping[bytes, int] = _NOTHING,
    ) -> NDArray[np.int64]:
        """Leading blocks of `chain` that each slot of the mask `slots` holds: `[size]` blocks.

        `coming` is a second table of masks that count as held (blocks on their way). Slots
        outside the mask get 0. Cost: about `log2(len(chain))` probes for each different depth.

        Contract: the depth `d` of a slot is a boundary of what it holds: `d` is 0 or
        `chain[d-1]` is held, and `d` is the chain's length or `chain[d]` is not held. In a
        prefix-closed set there is one boundary, the contiguous prefix. In a set that is not
        closed the search may end at a boundary behind a hole; it never claims more than the
        deepest block that is held.
        """
        found = np.zeros(size, dtype=np.int64)
        held, on_way = self._masks.get, coming.get
        # (low, high, mask): every slot of `mask` has its boundary in [low, high]
        ranges = [(0, len(chain), slots)] if slots else []
        while ranges:
            low, high, mask = ranges.pop()
            while low < high:
                middle = (low + high) >> 1
                block = chain[middle]
                deeper = mask & (held(block, 0) | on_way(block, 0))
                if deeper == mask:
                    low = middle + 1
                elif not deeper:
                    high = middle
                else:
                    ranges.append((low, middle, mask ^ deeper))
                    low, mask = middle + 1, deeper
            if low:
                _fill(found, mask, low)
        return found

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

    def _clear(self, block: bytes, slot: int) -> None:
        left = self._masks[block] & ~(1 << slot)
        if left:
            self._masks[block] = left
        else:
            del self._masks[block]


def _fill(found: NDArray[np.int64], mask: int, depth: int) -> None:
    """Write `depth` to every slot of `mask`."""
    if mask.bit_count() <= 4:
        while mask:
            low_bit = mask & -mask
            found[low_bit.bit_length() - 1] = depth
            mask ^= low_bit
        return
    packed = np.frombuffer(mask.to_bytes((len(found) + 7) // 8, "little"), dtype=np.uint8)
    found[np.unpackbits(packed, count=len(found), bitorder="little").view(np.bool_)] = depth
