"""Prefixes that running prefills are computing, and whether to wait for one."""

from __future__ import annotations

from bisect import bisect_left
from itertools import islice

from worker.engine_config import EngineConfig
from worker.sequence import Sequence


class InFlight:
    """Blocks that running prefills have not computed yet.

    blocks  hash of every such full block -> the sequence that computes it
    """

    def __init__(self, config: EngineConfig) -> None:
        self._block_size = config.block_size
        self._chunk_limit = config.chunk_limit
        self.blocks: dict[bytes, Sequence] = {}

    def enter(self, sequence: Sequence) -> None:
        """Add the blocks that the sequence will compute, those not settled."""
        for block_hash in islice(sequence.hashes, sequence.settled_blocks, None):
            self.blocks.setdefault(block_hash, sequence)

    def leave(self, sequence: Sequence) -> None:
        """Remove the blocks that the sequence will not compute or not cache."""
        for block_hash in islice(sequence.hashes, sequence.settled_blocks, None):
            if self.blocks.get(block_hash) is sequence:
                del self.blocks[block_hash]

    def worth_waiting_for(self, hashes: list[bytes], cached: int, limit: int) -> int:
        """Leading blocks of a chain, at most `limit`, that will be cached after a wait that pays
        off; 0 if no wait does. `cached` of them are cached now.

        ```
        |<- cached ->|<- shared with the holder, in flight ->|<- the sequence's own ->|
                     |<------------- saved ----------------->|
              |<- holder still computes: the wait ---------->|
        ```
        A wait pays off if it is at most one chunk (about one step) longer than computing the saved
        tokens: it then costs little or no time and saves the engine `saved` tokens. The holder is
        always running, never waiting, so there is no deadlock. When the holder ends or is
        preempted, its blocks are removed and the wait ends.
        """
        if cached >= limit:
            return 0
        holder = self.blocks.get(hashes[cached])
        if holder is None:
            return 0
        theirs = holder.hashes
        end = min(limit, len(theirs))
        shared = bisect_left(range(end), True, cached, key=lambda i: hashes[i] != theirs[i])
        saved = (shared - cached) * self._block_size
        wait = shared * self._block_size - holder.computed_tokens
        return 0 if saved <= 0 or wait > saved + self._chunk_limit else shared
