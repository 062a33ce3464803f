"""The fixed pool of KV blocks: reference counts and free blocks.

Blocks are numbered 1..capacity. Block 0 is reserved: it pads block tables, no sequence ever owns
it, and its links are the ends of the circular list of kept blocks.

```
vacant   a stack           ... vacant vacant  <-> allocate, vacate, worthless releases
kept     0 <-> kept (oldest) ... kept (newest) <-> 0
               ^ evict first               release ^
```

A *vacant* block holds nothing of value. A *kept* block holds cached KV that no sequence references.
The kept list is in order of release, which is the LRU order. Every operation is O(1).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence


class InvariantError(AssertionError):
    """The engine's bookkeeping is inconsistent. The message gives the figures."""


class BlockPool:
    """Owns the reference counts, the free blocks and the time of each block's last use.

    Knows no hashes or tokens and reads no clock: the cache writes `last_used`, in seconds on its
    caller's clock, when a cached block loses its last reference.
    """

    __slots__ = (
        "_kept",
        "_next",
        "_previous",
        "_references",
        "_vacant",
        "capacity",
        "free_blocks",
        "last_used",
    )

    def __init__(self, capacity: int) -> None:
        """`capacity` usable blocks. Raises ValueError below 1."""
        if capacity < 1:
            raise ValueError(f"a block pool needs at least 1 block, got {capacity}")
        size = capacity + 1
        self.capacity = capacity
        # Arrays, not lists of objects: 24 bytes per block, and the garbage collector has nothing to
        # scan in a pool of a million blocks.
        self._references = array("i", bytes(4 * size))
        self._kept = bytearray(size)
        self._next = array("i", bytes(4 * size))
        self._previous = array("i", bytes(4 * size))
        self._vacant = array("i", range(capacity, 0, -1))
        self.last_used = array("d", bytes(8 * size))
        self.free_blocks = capacity
        """Blocks without references, vacant and kept."""

    @property
    def vacant(self) -> int:
        """Blocks without references that hold nothing."""
        return len(self._vacant)

    @property
    def kept(self) -> int:
        """Blocks without references that hold cached KV."""
        return self.free_blocks - len(self._vacant)

    def allocate(self) -> int:
        """Take a vacant block, with one reference. Raises InvariantError if none is vacant."""
        if not self._vacant:
            raise InvariantError(f"no vacant block: {self._figures()}")
        block = self._vacant.pop()
        self.free_blocks -= 1
        self._references[block] = 1
        return block

    def share(self, block: int) -> bool:
        """Add a reference. Returns whether it is the first (the block was kept)."""
        references = self._references[block]
        if references == 0:
            if not self._kept[block]:
                raise InvariantError(f"block {block} is shared but holds nothing")
            self._kept[block] = 0
            self._unlink(block)
            self.free_blocks -= 1
        self._references[block] = references + 1
        return references == 0

    def release(self, block: int, keep: bool) -> bool:
        """Remove a reference. Returns whether it was the last.

        A block without references goes to the end of the kept list if `keep` is set (its KV is
        cached). Otherwise it is vacant and used before anything is evicted.
        """
        references = self._references[block] - 1
        if references < 0 or not block:
            raise InvariantError(f"block {block} is released without a reference")
        self._references[block] = references
        if references:
            return False
        if keep:
            self._kept[block] = 1
            newest = self._previous[0]
            self._next[newest] = self._previous[0] = block
            self._previous[block] = newest
            self._next[block] = 0
        else:
            self._vacant.append(block)
        self.free_blocks += 1
        return True

    def share_all(self, blocks: Sequence[int]) -> list[int]:
        """`share` each block; returns those that were free. Raises as `share` does."""
        references = self._references
        first = []
        for block in blocks:
            count = references[block]
            if count:
                references[block] = count + 1
            else:
                self.share(block)
                first.append(block)
        return first

    def drop_shared(self, blocks: Sequence[int]) -> list[int]:
        """Remove a reference from each block that has more than one. Returns the other blocks,
        unchanged, in reverse order."""
        references = self._references
        others = []
        for block in reversed(blocks):
            count = references[block]
            if count > 1:
                references[block] = count - 1
            else:
                others.append(block)
        return others

    def vacate(self, block: int) -> None:
        """Make a kept block vacant."""
        if not self._kept[block] or self._references[block]:
            raise InvariantError(
                f"block {block} cannot be vacated: {self._references[block]} references, "
                f"kept {self._kept[block]}"
            )
        self._unlink(block)
        self._kept[block] = 0
        self._vacant.append(block)

    def oldest_kept(self) -> int:
        """The kept block that was released longest ago; 0 if there is none."""
        return self._next[0]

    def references(self, block: int) -> int:
        """Number of references to the block."""
        return self._references[block]

    def _unlink(self, block: int) -> None:
        before, after = self._previous[block], self._next[block]
        self._next[before] = after
        self._previous[after] = before

    def free_list(self) -> list[int]:
        """All unreferenced blocks, in the order of reuse. O(pool): for checks and tests."""
        return [*reversed(self._vacant), *self.kept_blocks()]

    def kept_blocks(self) -> list[int]:
        """The kept blocks, oldest first. O(pool): for checks and tests."""
        blocks: list[int] = []
        block = self._next[0]
        while block and len(blocks) <= self.capacity:
            blocks.append(block)
            block = self._next[block]
        return blocks

    def check(self) -> None:
        """Raises InvariantError unless every block is either free or referenced. O(pool)."""
        kept = self.kept_blocks()
        free = self.free_list()
        if len(free) != self.free_blocks or len(set(free)) != len(free):
            raise InvariantError(f"{len(free)} blocks found free: {self._figures()}")
        if sum(self._kept) != len(kept) or not all(self._kept[block] for block in kept):
            raise InvariantError(f"{len(kept)} blocks found on the kept list: {self._figures()}")
        if self._references[0]:
            raise InvariantError(f"the reserved block 0 has {self._references[0]} references")
        on_list = set(free)
        for block in range(1, self.capacity + 1):
            if (self._references[block] > 0) == (block in on_list):
                raise InvariantError(
                    f"block {block} has {self._references[block]} references and is "
                    f"{'on' if block in on_list else 'not on'} the free list"
                )

    def _figures(self) -> str:
        return f"{self.capacity} blocks, {self.free_blocks} free, {self.vacant} of them vacant"
