"""Prefixes that running prefills are computing right now, and whether to wait for one."""

from __future__ import annotations

from bisect import bisect_left
from itertools import islice

from worker.engine_config import EngineConfig
from worker.sequence import Sequence


class InFlight:
    """Blocks that running prefills have still to compute.

    blocks  hash of every such full block -> the sequence that computes it
    """

    def __init__(self, config: EngineConfig) -> None:
        self._block_size = config.block_size
        self._chunk_limit = config.chunk_limit
        self.blocks: dict[bytes, Sequence] = {}

    def enter(self, sequence: Sequence) -> None:
        """The sequence is about to compute its blocks that are not settled."""
        for block_hash in islice(sequence.hashes, sequence.settled_blocks, None):
            self.blocks.setdefault(block_hash, sequence)

    def leave(self, sequence: Sequence) -> None:
        """It will not compute, or not cache, those that it has not settled yet."""
        for block_hash in islice(sequence.hashes, sequence.settled_blocks, None):
            if self.blocks.get(block_hash) is sequence:
                del self.blocks[block_hash]

    def worth_waiting_for(self, hashes: list[bytes], cached: int, limit: int) -> int:
        """Leading blocks of a chain, at most `limit`, that there will be after a wait that pays;
        0 where none does. `cached` of them are there now.

        ```
        |<- cached ->|<- shared with the holder, in flight ->|<- the sequence's own ->|
                     |<------------- saved ----------------->|
              |<- holder still computes: the wait ---------->|
        ```
        It pays where the wait is longer than computing the saved tokens by at most one chunk, that
        is about one step: it then costs little or no time and spares the engine `saved` tokens.
        Whom a sequence waits for is running, never waiting itself, so there is no deadlock; when
        the holder ends or is preempted its blocks leave and the wait is over.
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
