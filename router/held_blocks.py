"""The blocks of one worker in the order in which they were stored.

Who holds a block is asked of the index's masks; this is only for what concerns a whole worker:
forgetting it, comparing it with a snapshot, dropping its latest blocks. So a change costs next to
nothing here: stored blocks are appended, evicted ones are noted by the report, and once there
are many of these the list is gone through, as it is before anybody reads it.

    blocks   a b c d e a      a was evicted when there were 4 blocks, c when there were 5
             x   x     │
                       └─ stored again after its eviction
"""

from __future__ import annotations

from collections.abc import Collection

MIN_GONE = 256
"""The list is not gone through for fewer evicted blocks than these, or than half of those held."""


class HeldBlocks:
    """count   blocks that are held
    log     those stored, in order, with evicted ones among them; its owner appends to it
    """

    __slots__ = ("_gone", "_gone_blocks", "count", "log")

    def __init__(self) -> None:
        self.count = 0
        self.log: list[bytes] = []
        self._gone: list[tuple[int, tuple[bytes, ...]]] = []
        self._gone_blocks = 0

    def evict(self, blocks: Collection[bytes]) -> None:
        """These are not held any more; each of them was."""
        if not blocks:
            return
        self.count -= len(blocks)
        self._gone.append((len(self.log), tuple(blocks)))
        self._gone_blocks += len(blocks)
        if self._gone_blocks > max(MIN_GONE, self.count >> 1):
            self.blocks()

    def blocks(self) -> list[bytes]:
        """All that are held, in the order of their storing. Not to be changed."""
        if self._gone:
            evicted_at: dict[bytes, int] = {}
            for place, blocks in self._gone:
                evicted_at.update(dict.fromkeys(blocks, place))
            latest = evicted_at.get
            self.log = [b for place, b in enumerate(self.log) if latest(b, 0) <= place]
            self._gone.clear()
            self._gone_blocks = 0
        return self.log

    def drop_latest(self, count: int) -> list[bytes]:
        """Forget the `count` blocks that were stored last; returns them."""
        blocks = self.blocks()
        place = len(blocks) - count
        latest = blocks[place:]
        del blocks[place:]
        self.count -= count
        return latest
