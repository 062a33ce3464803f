"""The blocks of one worker in the order in which they were stored.

Who holds a block is asked of the index's masks; this is only for what concerns a whole worker:
forgetting it, comparing it with a snapshot, dropping its latest blocks. So a change costs next to
nothing here: stored blocks are kept and evicted ones noted as they come, in runs, and once there
are many evicted ones the runs are gone through, as they are before anybody reads them.

    runs       (a b) (c d) (e) (a f)      a was evicted when there were 2 runs, c when there were 3
                x     x         │
                                └─ stored again after its eviction

Runs are tuples: the garbage collector looks into one of bytes once, into a list every time.
"""

from __future__ import annotations

from collections.abc import Collection

MIN_GONE = 256
"""Runs are not gone through for fewer evicted blocks than these, or than half of those held."""


class HeldBlocks:
    """count   blocks that are held"""

    __slots__ = ("_gone", "_gone_blocks", "_runs", "count")

    def __init__(self) -> None:
        self.count = 0
        self._runs: list[tuple[bytes, ...]] = []
        self._gone: list[tuple[int, tuple[bytes, ...]]] = []
        self._gone_blocks = 0

    def store(self, blocks: Collection[bytes]) -> None:
        """These are held from now on; none of them was."""
        if blocks:
            self.count += len(blocks)
            self._runs.append(tuple(blocks))

    def evict(self, blocks: Collection[bytes]) -> None:
        """These are not held any more; each of them was."""
        if blocks:
            self.count -= len(blocks)
            self._gone.append((len(self._runs), tuple(blocks)))
            self._gone_blocks += len(blocks)
            if self._gone_blocks > max(MIN_GONE, self.count >> 1):
                self.blocks()

    def blocks(self) -> tuple[bytes, ...]:
        """All that are held, in the order of their storing."""
        if self._gone:
            evicted_at: dict[bytes, int] = {}
            for place, blocks in self._gone:
                evicted_at.update(dict.fromkeys(blocks, place))
            latest = evicted_at.get
            self._runs = [
                tuple(
                    [
                        b
                        for place, run in enumerate(self._runs)
                        for b in run
                        if latest(b, 0) <= place
                    ]
                )
            ]
            self._gone.clear()
            self._gone_blocks = 0
        elif len(self._runs) > 1:
            self._runs = [tuple([block for run in self._runs for block in run])]
        return self._runs[0] if self._runs else ()

    def drop_latest(self, count: int) -> tuple[bytes, ...]:
        """Forget the `count` blocks that were stored last; returns them."""
        blocks = self.blocks()
        place = len(blocks) - count
        self._runs = [blocks[:place]]
        self.count -= count
        return blocks[place:]
