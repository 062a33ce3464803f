"""Sets of worker slots as bit masks in Python integers, and arrays made of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

FEW = 24
"""Up to this many slots are written one by one; more are written as an array."""

VERY_FEW = 4
"""Up to this many slots at one depth are written into the copy of a cached array; more are part of
the cached array."""

MAX_BASES = 256
"""Arrays that a `Spread` caches."""


def truth_of(mask: int, size: int) -> NDArray[np.bool_]:
    """`[size]`: which slots are in the mask. The mask has only slots below `size`."""
    packed = np.frombuffer(mask.to_bytes((size + 7) // 8, "little"), dtype=np.uint8)
    return np.unpackbits(packed, count=size, bitorder="little").view(np.bool_)


def write(found: NDArray[np.int64], mask: int, value: int) -> None:
    """Set `found` (`[size]`) to `value` at the slots of the mask."""
    if mask.bit_count() > FEW:
        found[truth_of(mask, len(found))] = value
        return
    while mask:
        slot = mask.bit_length() - 1  # from the highest: the integer gets shorter each time
        found[slot] = value
        mask ^= 1 << slot


class Spread:
    """Makes arrays of depths by slot.

    The slots that reach a common depth are mostly the same from prompt to prompt. So the array for
    large groups is cached and copied, and small groups are written into the copy.
    """

    def __init__(self) -> None:
        self._bases: dict[tuple[int, ...], NDArray[np.int64]] = {}

    def array(self, groups: Sequence[tuple[int, int]], size: int, unit: int) -> NDArray[np.int64]:
        """`[size]`: the depth of each slot, times `unit`. `groups` are (depth, mask) pairs with
        disjoint masks, the deepest first.

        Slots in no group get 0.
        """
        few: list[tuple[int, int]] = []
        key = [size]
        reach = 0
        for depth, mask in groups:
            reach |= mask
            if mask.bit_count() <= VERY_FEW:
                few.append((depth * unit, mask))
            else:
                key += depth * unit, reach
        levels = tuple(key)
        base = self._bases.get(levels)
        found = (self._base(levels) if base is None else base).copy()
        for value, mask in few:
            write(found, mask, value)
        return found

    def _base(self, key: tuple[int, ...]) -> NDArray[np.int64]:
        """`key`: size, then pairs of a value and the slots that reach it, the deepest first."""
        size, *levels = key
        base = np.zeros(size, dtype=np.int64)
        for place in range(len(levels) - 2, -1, -2):
            base[truth_of(levels[place + 1], size)] = levels[place]
        if len(self._bases) >= MAX_BASES:
            self._bases.clear()
        self._bases[key] = base
        return base
