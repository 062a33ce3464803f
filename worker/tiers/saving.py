"""Save at shutdown: write to disk the blocks that are only on the device.

The most valuable blocks are written first, each after the one that it continues, by one thread in
this order: when time runs out, the disk holds complete files without gaps in their chains.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from worker.tiers.cold_tiers import ColdTiers

if TYPE_CHECKING:
    from worker.prefix_cache import PrefixCache

BLOCKS_AT_ONCE = 64
"""Blocks that are copied to host memory and written at a time."""


def save_cache(
    cache: PrefixCache,
    tiers: ColdTiers,
    seconds: float,
    clock: Callable[[], float],
    idle: Callable[[], None],
) -> tuple[int, int]:
    """Write the cached blocks within `seconds` of `clock`; `idle` waits a moment.

    The blocks must not be in use, and the cache must not be used afterwards. Returns how many
    blocks of the cache are on disk now, and how many there were.
    """
    until = clock() + seconds
    order = cache.wind_up()
    fits = order[: tiers.disk.capacity]  # more would displace the first ones
    tiers.keep_on_disk([cache.hash_of(block) for block in fits], cache.now)
    at_once = max(1, min(BLOCKS_AT_ONCE, tiers.host.capacity // 2))
    for first in range(0, len(fits), at_once):
        for block in fits[first : first + at_once]:
            cache.offer(block, cache.now)
        if not _settle(tiers, until, clock, idle):
            break
    tiers.end_writing()
    saved = [hash_ for hash_ in map(cache.hash_of, reversed(order)) if tiers.on_disk(hash_)]
    tiers.note_use(saved)
    return len(saved), len(order)


def _settle(
    tiers: ColdTiers, until: float, clock: Callable[[], float], idle: Callable[[], None]
) -> bool:
    """Wait for all copies and writes. Returns whether time is left."""
    tiers.copy_out()
    while True:
        tiers.take_loaded(clock())
        if clock() >= until:
            return False
        if not tiers.pending:
            return True
        idle()
