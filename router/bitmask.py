"""Sets of worker slots as bit masks in Python integers."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray


def slots_of(mask: int) -> Iterator[int]:
    """The slots of a mask, lowest first."""
    while mask:
        low_bit = mask & -mask
        yield low_bit.bit_length() - 1
        mask ^= low_bit


def truth_of(mask: int, size: int) -> NDArray[np.bool_]:
    """`[size]`: which slots are in the mask. Slots from `size` on must not be."""
    packed = np.frombuffer(mask.to_bytes((size + 7) // 8, "little"), dtype=np.uint8)
    return np.unpackbits(packed, count=size, bitorder="little").view(np.bool_)
