"""The fixed pool of KV blocks: reference counts, and one list of everything unreferenced.

Blocks are numbers 1..capacity. Block 0 is reserved: block tables are padded with it, no sequence
ever owns it, and here its links are the ends of the circular free list.

```
free list   0 <-> vacant ... vacant <-> kept (oldest) ... kept (newest) <-> 0
                  ^ allocate                                        release ^
```

A *vacant* block holds nothing of value. A *kept* one holds cached KV that nobody references; the
kept part of the list is in order of release, so it is the LRU order. Every operation is O(1).
"""

from __future__ import annotations

from array import array


class InvariantError(AssertionError):
    """The engine's own bookkeeping is wrong. The text gives the figures."""


class BlockPool:
    """Owner of reference counts and of the free list. Knows nothing of hashes or tokens."""

    __slots__ = ("_kept", "_next", "_previous", "_references", "capacity", "free_blocks", "vacant")

    def __init__(self, capacity: int) -> None:
        """`capacity` usable blocks. Raises ValueError below 1."""
        if capacity < 1:
            raise ValueError(f"a block pool needs at least 1 block, got {capacity}")
        size = capacity + 1
        self.capacity = capacity
        self._references = array("i", bytes(4 * size))
        self._kept = bytearray(size)
        # Arrays of machine integers, not lists of objects: 12 bytes a block, and nothing that
        # the garbage collector would walk in a pool of a million blocks.
        self._next = array("i", range(1, size + 1))
        self._next[capacity] = 0
        self._previous = array("i", range(-1, size - 1))
        self._previous[0] = capacity
        self.free_blocks = capacity
        """Blocks without references, vacant and kept."""
        self.vacant = capacity
        """Blocks without references that hold nothing."""

    def allocate(self) -> int:
        """A vacant block, now with one reference. Raises InvariantError where none is vacant."""
        block = self._next[0]
        if not self.vacant or self._kept[block]:
            raise InvariantError(f"no vacant block: {self._figures()}")
        self._unlink(block)
        self.vacant -= 1
        self._references[block] = 1
        return block

    def share(self, block: int) -> bool:
        """One more reference. Returns whether it is the first (the block was free and kept)."""
        references = self._references[block]
        if references == 0:
            if not self._kept[block]:
                raise InvariantError(f"block {block} is shared but holds nothing")
            self._kept[block] = 0
            self._unlink(block)
        self._references[block] = references + 1
        return references == 0

    def release(self, block: int, keep: bool) -> bool:
        """One reference less. Returns whether it was the last.

        Without references the block goes to the list's end where `keep` is set (its KV is worth
        keeping), else to its front, so that worthless blocks are used before anything is evicted.
        """
        references = self._references[block] - 1
        if references < 0 or not block:
            raise InvariantError(f"block {block} is released without a reference")
        self._references[block] = references
        if references:
            return False
        if keep:
            self._kept[block] = 1
            self._link(block, self._previous[0], 0)
        else:
            self.vacant += 1
            self._link(block, 0, self._next[0])
        self.free_blocks += 1
        return True

    def vacate(self, block: int) -> None:
        """A kept block gives up its content."""
        if not self._kept[block] or self._references[block]:
            raise InvariantError(
                f"block {block} cannot be vacated: {self._references[block]} references, "
                f"kept {self._kept[block]}"
            )
        self._unlink(block)
        self._kept[block] = 0
        self._link(block, 0, self._next[0])
        self.free_blocks += 1
        self.vacant += 1

    def oldest_kept(self) -> int:
        """The kept block that was released longest ago; 0 while any block is vacant or none is
        kept."""
        return 0 if self.vacant else self._next[0]

    def references(self, block: int) -> int:
        """How many sequences use the block."""
        return self._references[block]

    def _unlink(self, block: int) -> None:
        before, after = self._previous[block], self._next[block]
        self._next[before] = after
        self._previous[after] = before
        self.free_blocks -= 1

    def _link(self, block: int, before: int, after: int) -> None:
        self._next[before] = block
        self._previous[block] = before
        self._next[block] = after
        self._previous[after] = block

    def free_list(self) -> list[int]:
        """All unreferenced blocks, first to be used first. O(pool): for checks and tests."""
        blocks: list[int] = []
        block = self._next[0]
        while block and len(blocks) <= self.capacity:
            blocks.append(block)
            block = self._next[block]
        return blocks

    def kept_blocks(self) -> list[int]:
        """The kept blocks, oldest first. O(pool): for checks and tests."""
        return [block for block in self.free_list() if self._kept[block]]

    def check(self) -> None:
        """Raises InvariantError unless every block is either free or referenced. O(pool)."""
        free = self.free_list()
        kept = [block for block in free if self._kept[block]]
        if len(free) != self.free_blocks or len(set(free)) != len(free):
            raise InvariantError(f"the free list has {len(free)} entries: {self._figures()}")
        if len(free) - len(kept) != self.vacant or kept != free[self.vacant :]:
            raise InvariantError(f"{len(kept)} kept blocks, not at the end: {self._figures()}")
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
