"""Pins: cached blocks of prompts that are protected from eviction until the next flush."""

from __future__ import annotations

from collections.abc import Callable

from worker.engine_config import EngineConfig
from worker.eviction.base import BlockUse
from worker.prefix_cache import PrefixCache


class Pins:
    """Blocks that hold one reference without a sequence.

    blocks  the pinned blocks, at most `config.pin_limit`
    """

    def __init__(
        self,
        cache: PrefixCache,
        config: EngineConfig,
        hash_block: Callable[[bytes, bytes], bytes],
    ) -> None:
        self._cache = cache
        self._limit = config.pin_limit
        self._block_size = config.block_size
        self._hash_block = hash_block
        self.blocks: list[int] = []

    def pin(self, root: bytes, packed: bytes) -> int:
        """Protect the cached blocks of a prompt below its namespace root from eviction.

        Returns how many of its leading tokens are pinned now: fewer than all if some are not
        cached or the limit is reached.
        """
        block_size = self._block_size
        count = len(packed) // 4 // block_size
        hashes: list[bytes] = []
        for index in range(count):
            part = packed[4 * index * block_size : 4 * (index + 1) * block_size]
            hashes.append(self._hash_block(hashes[-1] if hashes else root, part))
        use = BlockUse(self._cache.now, 0, count)
        found = self._cache.acquire(root, hashes, packed, count, use)
        pinned = set(self.blocks)
        kept = 0
        for block in found:
            if block not in pinned:
                if len(self.blocks) >= self._limit:
                    break
                self.blocks.append(block)
            kept += 1
        # One reference each: drop the second one of blocks pinned before.
        self._cache.release([block for block in found[:kept] if block in pinned] + found[kept:])
        return kept * block_size

    def drop(self, blocks: set[int]) -> None:
        """Unpin those of these blocks, which have left the cache, that are pinned."""
        self._cache.release([block for block in self.blocks if block in blocks])
        self.blocks = [block for block in self.blocks if block not in blocks]

    def release(self) -> None:
        """Unpin all."""
        self._cache.release(self.blocks)
        self.blocks = []
