"""Loads from the cold tiers on behalf of waiting sequences.

A load owns the device blocks that it writes, and references the cached ones before them. When it
has ended these blocks are cached as if they had been computed, and the waiting sequences find them
by an ordinary look-up. So no sequence ever holds an incomplete block, and ending, flushing or
preempting a sequence has nothing to undo here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from worker.block_pool import BlockPool
from worker.sequence import Sequence
from worker.tiers.cold_load import ColdLoad
from worker.tiers.cold_tiers import ColdTiers

if TYPE_CHECKING:
    from worker.prefix_cache import PrefixCache


class _Job(NamedTuple):
    """prefix   the cached blocks before those of the load, referenced
    hashes   hashes of the chain up to the end of the load
    """

    load: ColdLoad
    sequence: Sequence
    prefix: list[int]
    hashes: list[bytes]


class Loading:
    """Owns the loads in progress and the blocks that they reference."""

    def __init__(
        self, tiers: ColdTiers, pool: BlockPool, cache: PrefixCache, block_size: int
    ) -> None:
        self.tiers = tiers
        self._pool = pool
        self._cache = cache
        self._block_size = block_size
        self._jobs: dict[ColdLoad, _Job] = {}
        self._wanted: set[ColdLoad] = set()  # started since the last flush
        self._hashes: dict[bytes, _Job] = {}  # of the blocks being loaded, by those that may be hit

    def holds(self, block_hash: bytes) -> bool:
        """Whether the block is being loaded."""
        return block_hash in self._hashes

    def blocks(self) -> Iterator[int]:
        """All references of loads to device blocks. For checks."""
        for job in self._jobs.values():
            yield from job.prefix
            yield from job.load.blocks

    def begin(
        self, sequence: Sequence, cached: int, referenced: int, limit: int, headroom: int
    ) -> int:
        """Let the sequence wait for blocks from a cold tier, if that pays off.

        Returns how many leading blocks it can then reuse; 0 if it should not wait. Starts a load
        only if the sequence would be admitted now: `cached`, `referenced`, `limit` and `headroom`
        are as in `Scheduler._place`. Blocks that another sequence waits for are loaded only once.
        """
        if cached >= limit:
            return 0
        hashes = sequence.hashes
        other = self._hashes.get(hashes[cached])
        if other is not None:
            shared = cached
            while shared < min(limit, len(other.hashes)) and hashes[shared] == other.hashes[shared]:
                shared += 1
            sequence.held_for = hashes[shared - 1]
            return shared
        total = -(-len(sequence.tokens) // self._block_size)
        if sequence.loaded or total - referenced + headroom > self._pool.free_blocks:
            return 0
        packed, root = sequence.packed(), sequence.request.namespace_root
        load = self.tiers.plan(root, hashes, packed, cached, limit)
        if load is None:
            return 0
        use = sequence.use(self._cache.now, 0, self._block_size)
        prefix = self._cache.acquire(root, hashes, packed, cached, use)
        # The match may be shorter than the probe if hashes collide.
        if len(prefix) < cached or len(load.entries) + headroom > self._pool.free_blocks:
            self._cache.release(prefix)
            self.tiers.drop(load)
            return 0
        self.tiers.start(load, [self._cache.allocate() for _ in load.entries])
        end = cached + len(load.entries)
        job = self._jobs[load] = _Job(load, sequence, prefix, hashes[:end])
        self._wanted.add(load)
        self._hashes.update(dict.fromkeys(job.hashes[cached:], job))
        sequence.loaded = True
        sequence.held_for = hashes[end - 1]
        return end

    def settle(self) -> None:
        """Cache loaded blocks, release the others, and copy out blocks evicted meanwhile."""
        self.tiers.copy_out()
        for load in self.tiers.take_loaded(self._cache.now):
            job = self._jobs.pop(load)
            if load in self._wanted:
                self._wanted.remove(load)
                self._store(job)
            for block_hash in job.hashes[load.start :]:
                if self._hashes.get(block_hash) is job:
                    del self._hashes[block_hash]
            self._cache.release(job.prefix + load.blocks)

    def flush(self) -> None:
        """Loads in progress must not be hit any more; their blocks are released when they end."""
        self._hashes.clear()
        self._wanted.clear()

    def _store(self, job: _Job) -> None:
        load, sequence = job.load, job.sequence
        parent = job.prefix[-1] if job.prefix else 0
        for place in range(load.whole):
            index = load.start + place
            key = job.hashes[index - 1] if index else sequence.request.namespace_root
            parent = self._cache.store(
                load.blocks[place],
                job.hashes[index],
                parent,
                key,
                sequence.packed_block(index, self._block_size),
                sequence.use(self._cache.now, index, self._block_size),
            )
            if not parent:  # a collision on the device
                return
            load.blocks[place] = parent
            self.tiers.loaded_block(load, place, parent)
