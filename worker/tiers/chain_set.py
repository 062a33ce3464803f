"""The index of one cold tier: blocks found by hash, compared by content, evicted leaf first. Pure.

A tier is *prefix-closed* by itself, like the device's cache: it contains, with every block, all
blocks before it. So each tier holds a leading part of a chain, the union of the tiers is
prefix-closed, and along a chain the fastest tier that holds a block only gets slower:

    chain    h[0] … h[d-1] | h[d] … h[c-1] | h[c] … h[k-1]
    read in  the device    | host memory   | disk
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from worker.block_pool import InvariantError
from worker.leaf_heap import LeafHeap


class Entry:
    """One block of a tier.

    content   packed tokens, at depth 0 after the namespace root
    place     index of its place in the tier, still in use by a pinned entry that has left the tier
    alive     whether it is in the tier
    ready     its KV is complete; before that no look-up finds it
    pins      users that protect it from eviction: copies, reads or writes in progress
    twin      the same block in the next slower tier, if known; check whether it is alive
    """

    __slots__ = (
        "alive",
        "block_hash",
        "children",
        "content",
        "last_used",
        "parent",
        "pins",
        "place",
        "ready",
        "twin",
    )

    def __init__(
        self, block_hash: bytes, parent: Entry | None, content: bytes, place: int, now: float
    ) -> None:
        self.block_hash = block_hash
        self.parent = parent
        self.content = content
        self.place = place
        self.last_used = now
        self.alive = True
        self.ready = False
        self.twin: Entry | None = None
        self.pins = 0
        self.children = 0


class ChainSet:
    """Owns a tier's entries, its places 0..capacity-1, and the changes.

    on_drop      called with every entry that leaves the tier
    evicted      entries evicted to make room for others
    collisions   equal hashes of different contents seen
    """

    def __init__(self, capacity: int, on_drop: Callable[[Entry], None] | None = None) -> None:
        self.capacity = capacity
        self._on_drop = on_drop
        self.evicted = 0
        self.collisions = 0
        self._entries: dict[bytes, Entry] = {}
        self._by_place: dict[int, Entry] = {}
        self._free = list(range(capacity - 1, -1, -1))
        self._leaves: LeafHeap[tuple[float]] = LeafHeap()
        self._stored: dict[bytes, None] = {}
        self._gone: dict[bytes, None] = {}
        self._ready = 0
        self._held = 0  # places of pinned entries that have left the tier

    def __len__(self) -> int:
        """Blocks that are ready."""
        return self._ready

    def get(self, block_hash: bytes) -> Entry | None:
        """The entry of a hash, ready or not."""
        return self._entries.get(block_hash)

    def entries(self) -> Iterator[Entry]:
        """All entries, parents first."""
        return iter(self._entries.values())

    def hashes(self) -> list[bytes]:
        """Hashes of what is ready, parents first."""
        return [entry.block_hash for entry in self._entries.values() if entry.ready]

    def match(
        self, root: bytes, hashes: Sequence[bytes], packed: bytes, block_bytes: int, limit: int
    ) -> list[Entry]:
        """The chain's leading entries that are ready, at most `limit`. Compares contents.

        `packed` holds the tokens of at least `limit` blocks, `block_bytes` bytes each.
        """
        found: list[Entry] = []
        parent: Entry | None = None
        for index in range(limit):
            entry = self._entries.get(hashes[index])
            if entry is None or not entry.ready:
                break
            part = packed[index * block_bytes : (index + 1) * block_bytes]
            if entry.parent is not parent or entry.content != (part if index else root + part):
                self.collisions += 1
                break
            found.append(entry)
            parent = entry
        return found

    def add(
        self, block_hash: bytes, parent: Entry | None, content: bytes, now: float
    ) -> Entry | None:
        """Add an entry for a block below `parent`, pinned once and not ready yet.

        Evicts one if no place is free. None if nothing can be evicted. The hash must be new.
        """
        if block_hash in self._entries:
            raise InvariantError(f"{block_hash.hex()} is in the tier already")
        if parent is not None:
            self.pin(parent)  # or it might be evicted for its own child
        room = bool(self._free) or self._evict()
        if parent is not None:
            self.unpin(parent)
        if not room:
            return None
        entry = Entry(block_hash, parent, content, self._free.pop(), now)
        entry.pins = 1
        if parent is not None:
            if self._is_leaf(parent):
                self._leaves.discard(parent.place)
            parent.children += 1
        self._entries[block_hash] = entry
        self._by_place[entry.place] = entry
        return entry

    def set_ready(self, entry: Entry) -> None:
        """Mark the entry's KV as complete. It is announced from now on."""
        entry.ready = True
        self._ready += 1
        if entry.block_hash in self._gone:
            del self._gone[entry.block_hash]
        else:
            self._stored[entry.block_hash] = None

    def pin(self, entry: Entry) -> None:
        """Protect an entry from eviction."""
        if self._is_leaf(entry):
            self._leaves.discard(entry.place)
        entry.pins += 1

    def unpin(self, entry: Entry) -> None:
        """Remove a pin. The last pin of an entry that has left the tier frees its place."""
        entry.pins -= 1
        if self._is_leaf(entry):
            self._leaves.push(entry.place, (entry.last_used,))
        elif not entry.alive and not entry.pins:
            self._held -= 1
            self._free.append(entry.place)

    def touch(self, entries: Iterable[Entry], now: float) -> None:
        """Mark the entries as just used."""
        for entry in entries:
            entry.last_used = now
            if self._is_leaf(entry):
                self._leaves.discard(entry.place)
                self._leaves.push(entry.place, (now,))

    def remove(self, entry: Entry) -> list[Entry]:
        """Remove an entry and all entries that continue it; returns these, children first.

        Pinned ones are removed too; their places stay in use until they are unpinned.
        """
        below = {entry}
        if entry.children:
            for other in self._entries.values():  # parents first
                if other.parent in below:
                    below.add(other)
        order = [other for other in self._entries.values() if other in below]
        for other in reversed(order):
            self._drop(other)
        return order[::-1]

    def shrink(self, capacity: int) -> None:
        """Limit the tier to this many places; nothing may be pinned."""
        while len(self._entries) > capacity and self._evict():
            pass
        self.capacity = capacity
        self._free = self._free[: capacity - len(self._entries)]

    def clear(self) -> list[Entry]:
        """Remove all entries, children first, as `remove` does."""
        order = list(self._entries.values())[::-1]
        for entry in order:
            self._drop(entry)
        return order

    def take_changes(self) -> tuple[list[bytes], list[bytes]]:
        """Hashes stored (parents first) and removed since the last call, net and disjoint."""
        stored, gone = list(self._stored), list(self._gone)
        self._stored.clear()
        self._gone.clear()
        return stored, gone

    def _is_leaf(self, entry: Entry) -> bool:
        return not entry.children and not entry.pins and entry.alive

    def _evict(self) -> bool:
        least = self._leaves.least()
        if least is None:
            return False
        self._drop(self._by_place[least.block])
        self.evicted += 1
        return True

    def _drop(self, entry: Entry) -> None:
        if self._is_leaf(entry):
            self._leaves.discard(entry.place)
        del self._entries[entry.block_hash], self._by_place[entry.place]
        if entry.pins:
            self._held += 1
        else:
            self._free.append(entry.place)
        entry.alive = False
        if entry.ready:
            self._ready -= 1
            if entry.block_hash in self._stored:
                del self._stored[entry.block_hash]
            else:
                self._gone[entry.block_hash] = None
        parent = entry.parent
        if parent is not None:
            parent.children -= 1
            if self._is_leaf(parent):
                self._leaves.push(parent.place, (parent.last_used,))
        if self._on_drop is not None:
            self._on_drop(entry)

    def check(self) -> None:
        """Raises InvariantError unless prefix-closed and every place is accounted for."""
        children: dict[Entry, int] = {}
        for entry in self._entries.values():
            if entry.parent is not None:
                children[entry.parent] = children.get(entry.parent, 0) + 1
                if self._entries.get(entry.parent.block_hash) is not entry.parent:
                    raise InvariantError(f"{entry.block_hash.hex()} has no parent in the tier")
                if entry.ready and not entry.parent.ready:
                    raise InvariantError(f"{entry.block_hash.hex()} is ready before its parent")
        for entry in self._entries.values():
            if entry.children != children.get(entry, 0):
                raise InvariantError(f"{entry.block_hash.hex()} has a wrong count of children")
        leaves = sum(map(self._is_leaf, self._entries.values()))
        if leaves != len(self._leaves):
            raise InvariantError(f"{leaves} leaves, {len(self._leaves)} in the heap")
        if len(self._free) + len(self._entries) + self._held != self.capacity:
            raise InvariantError(
                f"{len(self._free)} free, {len(self._entries)} taken and {self._held} held of "
                f"{self.capacity} places"
            )
        if self._ready != sum(entry.ready for entry in self._entries.values()):
            raise InvariantError(f"{self._ready} ready entries by the count, not by the entries")
