"""Writing to disk, when a worker ends in good order, what is on the device alone.

The most valuable blocks go first, each behind the one that it continues, and one thread writes them
in that order: wherever time runs out, what lies there is whole chains of whole files.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from worker.tiers.cold_tiers import ColdTiers

if TYPE_CHECKING:
    from worker.prefix_cache import PrefixCache

BLOCKS_AT_ONCE = 64
"""Blocks that are copied to host memory, then written, before the next ones are."""


def save_cache(
    cache: PrefixCache,
    tiers: ColdTiers,
    seconds: float,
    clock: Callable[[], float],
    idle: Callable[[], None],
) -> tuple[int, int]:
    """Write what the cache holds, as far as `seconds` of `clock` go; `idle` waits a moment.

    Nobody may use the cache's blocks any more, nor the cache afterwards. Returns how many blocks of
    the cache lie on disk now, and how many there were.
    """
    until = clock() + seconds
    order = cache.wind_up()
    fits = order[: tiers.disk.capacity]  # what goes beyond would take the room of the first ones
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
    """Wait until nothing is on its way to the disk. Returns whether there is time left."""
    tiers.copy_out()
    while True:
        tiers.take_loaded(clock())
        if clock() >= until:
            return False
        if not tiers.pending:
            return True
        idle()
