"""The prefix cache: full blocks by hash, longest match, storing, eviction, changes.

The cached set is *prefix-closed*: it contains, with every block, all blocks before it in its chain.
Three rules ensure this: a block is stored only below a cached parent; a sequence that references a
cached block also references all blocks before it; only leaves are evicted. So the cached depth of a
chain can be found by bisection, here and at the routers.
"""

from __future__ import annotations

import enum
from array import array
from bisect import bisect_left
from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

from worker.block_pool import BlockPool, InvariantError
from worker.eviction.base import BlockUse, EvictionPolicy
from worker.tiers.cold_tiers import ColdTiers, Leaving


class Probe(NamedTuple):
    """Result of a look-up that changes nothing.

    cached      leading blocks of the chain that are cached
    referenced  leading blocks of these that running sequences reference, so that they are not free
    """

    cached: int
    referenced: int


class Why(enum.IntEnum):
    """Eviction reason: the block was needed, the cache exceeded its share, or the block was not
    used for too long."""

    SPACE = 0
    CAP = 1
    EXPIRED = 2


AGE_BOUNDS_S = (1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0)
"""Upper bounds of the classes of ages at eviction; a last class has none."""


class PrefixCache:
    """Owns the map from block hash to block.

    A block's *content* is its packed tokens, at depth 0 after the namespace root. Content and
    parent are stored and compared, so that a collision of hashes is a miss.

    now             time of the step, seconds on the caller's clock; set by the caller
    keep_limit      maximum of cached blocks that no sequence references
    evicted_for     evictions by reason (`Why`)
    evicted_ages    evictions by age (time since the last use): one count per entry of AGE_BOUNDS_S,
                    not cumulative, and one for older blocks
    evicted_age_s   sum of these ages, seconds
    flushed         blocks dropped by flushes or because their KV may be invalid
    """

    def __init__(
        self,
        pool: BlockPool,
        policy: EvictionPolicy,
        block_size: int,
        keep_limit: int | None = None,
        tiers: ColdTiers | None = None,
    ) -> None:
        self.now = 0.0
        self.keep_limit = pool.capacity if keep_limit is None else keep_limit
        self._pool = pool
        self._policy = policy
        self._tiers = tiers
        self._block_bytes = 4 * block_size
        # Maps of bytes and ints only, which the garbage collector does not scan.
        self._blocks: dict[bytes, int] = {}
        self._hashes: dict[int, bytes] = {}
        self._contents: dict[int, bytes] = {}
        self._parents = array("i", bytes(4 * (pool.capacity + 1)))
        self._children = array("i", bytes(4 * (pool.capacity + 1)))
        self._stored: dict[bytes, None] = {}
        self._evicted: dict[bytes, None] = {}
        self.evicted_for = [0] * len(Why)
        self.evicted_ages = [0] * (len(AGE_BOUNDS_S) + 1)
        self.evicted_age_s = 0.0
        self.flushed = 0
        self.collisions = 0
        self.duplicates = 0

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def evictions(self) -> int:
        """Blocks evicted for any reason, flushes excluded."""
        return sum(self.evicted_for)

    def hashes(self) -> list[bytes]:
        """Hashes of all cached blocks, parents first."""
        return list(self._blocks)

    def holds(self, block: int) -> bool:
        """Whether the block is cached."""
        return block in self._hashes

    def probe(self, hashes: Sequence[bytes], limit: int) -> Probe:
        """Count a chain's cached blocks, at most `limit`, in O(log limit).

        Compares hashes only, not contents: an upper bound if hashes collide.
        """
        blocks, references = self._blocks, self._pool.references
        if not limit or hashes[0] not in blocks:
            return Probe(0, 0)
        cached = bisect_left(range(limit), True, key=lambda i: hashes[i] not in blocks)
        referenced = bisect_left(
            range(cached), True, key=lambda i: not references(blocks.get(hashes[i], 0))
        )
        return Probe(cached, referenced)

    def acquire(
        self, root: bytes, hashes: Sequence[bytes], packed: bytes, limit: int, use: BlockUse
    ) -> list[int]:
        """Longest match of at most `limit` blocks; adds a reference to each.

        `packed` holds the sequence's tokens, at least `limit` blocks of them.
        """
        size, contents, parents = self._block_bytes, self._contents, self._parents
        looked_up = list(map(self._blocks.get, islice(hashes, limit)))
        count = looked_up.index(None) if None in looked_up else len(looked_up)
        found: list[int] = looked_up[:count]  # type: ignore[assignment]  # up to the first None
        # Compare all parents and tokens at once, since mismatches are rare.
        chain = [0, *found]
        chain.pop()
        whole = b"".join(map(contents.__getitem__, found))
        if list(map(parents.__getitem__, found)) != chain or whole != root + packed[: count * size]:
            for index, block in enumerate(found):
                part = packed[index * size : (index + 1) * size]
                if parents[block] != chain[index] or contents[block] != (
                    part if index else root + part
                ):
                    self.collisions += 1
                    del found[index:]
                    break
        for block in self._pool.share_all(found):
            if not self._children[block]:
                self._policy.withdrawn(block)
        if found:
            self._policy.used(found, use)
        return found

    def allocate(self) -> int:
        """A block to write, with one reference; evicts one if none is vacant.

        Raises InvariantError if every block is referenced; check `pool.free_blocks` first.
        """
        if not self._pool.vacant and self._pool.free_blocks:
            self._evict(self._policy.victim(self.now), Why.SPACE)
        return self._pool.allocate()

    def store(
        self,
        block: int,
        block_hash: bytes,
        parent: int,
        parent_key: bytes,
        packed: bytes,
        use: BlockUse,
    ) -> int:
        """Offer a block whose KV is written and final. Returns the block to use from now on.

        That is `block` itself, now cached; or the block that has this content already: then the
        caller's reference has moved to it and `block` is released (if both were cached, evicting
        one would report a hash as evicted that is still cached). 0 means a collision: nothing is
        cached and the caller keeps `block`.

        `parent` is the cached, referenced block before it, 0 at depth 0; `parent_key` is its
        hash, or the namespace root.
        """
        content = packed if parent else parent_key + packed
        present = self._blocks.get(block_hash)
        if present is not None:
            if self._contents[present] != content or self._parents[present] != parent:
                self.collisions += 1
                return 0
            if present == block:
                raise InvariantError(f"block {block} is stored twice")
            self.duplicates += 1
            if self._pool.share(present) and not self._children[present]:
                self._policy.withdrawn(present)
            self._pool.release(block, keep=False)
            self._policy.used((present,), use)
            return present
        if block in self._hashes or (parent and parent not in self._hashes):
            raise InvariantError(f"block {block} cannot be stored below block {parent}")
        self._blocks[block_hash] = block
        self._hashes[block] = block_hash
        self._contents[block] = content
        self._parents[block] = parent
        if parent:
            self._children[parent] += 1
        self._policy.used((block,), use)
        if block_hash in self._evicted:
            del self._evicted[block_hash]
        else:
            self._stored[block_hash] = None
        return block

    def release(self, blocks: Sequence[int]) -> None:
        """Release a sequence's references, deepest block first, as the LRU order requires."""
        pool, hashes, children = self._pool, self._hashes, self._children
        last_used, now = pool.last_used, self.now
        for block in pool.drop_shared(blocks):
            if block in hashes:
                last_used[block] = now
                pool.release(block, keep=True)
                if not children[block]:
                    self._policy.leaf(block)
            else:
                pool.release(block, keep=False)
        while pool.kept > self.keep_limit:
            self._evict(self._policy.victim(self.now), Why.CAP)

    def wind_up(self) -> list[int]:
        """All unreferenced cached blocks in reverse eviction order: the most valuable first, and
        each after its parent.

        For the end of the cache's life: pool and policy drop them, and afterwards only `offer`
        and `hash_of` may be called.
        """
        order = []
        while self._pool.kept:
            block = self._policy.victim(self.now)
            self._pool.vacate(block)
            order.append(block)
            self._orphan(block)
        return order[::-1]

    def offer(self, block: int, now: float) -> None:
        """Offer a cached block, used at `now`, and those before it to the cold tiers."""
        if self._tiers is not None:
            path = []
            above = block
            while above and not self._tiers.keeps(above):
                path.append(Leaving(above, self._hashes[above], self._contents[above]))
                above = self._parents[above]
            if path:
                self._tiers.leave(above, path[::-1], now)

    def hash_of(self, block: int) -> bytes:
        """The hash of a cached block."""
        return self._hashes[block]

    def expire(self) -> None:
        """Drop blocks that were not used for too long."""
        while block := self._policy.expired(self.now):
            self._evict(block, Why.EXPIRED)

    def flush(self) -> None:
        """Drop all blocks. Referenced blocks stay valid for their users."""
        # Children before parents, as in eviction.
        for block_hash, block in reversed(self._blocks.items()):
            if not self._pool.references(block):
                self._pool.vacate(block)
            self._note_gone(block_hash)
        self._policy.clear()
        self.flushed += len(self._blocks)
        for block in self._hashes:
            self._parents[block] = self._children[block] = 0
        self._blocks.clear()
        self._hashes.clear()
        self._contents.clear()

    def forget(self, blocks: Sequence[int]) -> set[int]:
        """Drop those of these blocks that are cached, and all that continue them, also from the
        cold tiers, because their KV may be invalid. Returns all that were cached. O(cache).

        Referenced blocks stay with the sequences that use them.
        """
        gone = self._hashes.keys() & set(blocks)
        order = []
        for block in self._blocks.values() if gone else ():  # parents first
            if self._parents[block] in gone:
                gone.add(block)
            if block in gone:
                order.append(block)
        if self._tiers is not None:
            self._tiers.forget_blocks([self._hashes[block] for block in order])
        for block in reversed(order):
            if not self._pool.references(block):
                self._policy.withdrawn(block)
                self._pool.vacate(block)
            self._drop(block)
        self.flushed += len(order)
        return gone

    def take_changes(self) -> tuple[list[bytes], list[bytes]]:
        """Hashes stored (parents first) and evicted since the last call, net and disjoint."""
        stored, evicted = list(self._stored), list(self._evicted)
        self._stored.clear()
        self._evicted.clear()
        return stored, evicted

    def _evict(self, block: int, why: Why) -> None:
        block_hash = self._hashes.get(block)
        if block_hash is None or self._children[block] or self._pool.references(block):
            raise InvariantError(
                f"block {block} is no leaf: cached {block_hash is not None}, "
                f"{self._children[block]} children, {self._pool.references(block)} references"
            )
        if self._tiers is not None and why is not Why.EXPIRED:  # expired: useless in tiers too
            self.offer(block, self.now)
        self._pool.vacate(block)
        self.evicted_for[why] += 1
        age_s = max(0.0, self.now - self._pool.last_used[block])
        self.evicted_ages[bisect_left(AGE_BOUNDS_S, age_s)] += 1
        self.evicted_age_s += age_s
        self._drop(block)

    def _drop(self, block: int) -> None:
        """Remove a block without children from the maps."""
        if self._tiers is not None:
            self._tiers.left(block, self.now)
        block_hash = self._hashes.pop(block)
        del self._blocks[block_hash], self._contents[block]
        self._note_gone(block_hash)
        self._orphan(block)
        self._parents[block] = 0

    def _orphan(self, block: int) -> None:
        """Decrement the child count of the block's parent."""
        parent = self._parents[block]
        if parent:
            self._children[parent] -= 1
            if not self._children[parent] and not self._pool.references(parent):
                self._policy.leaf(parent)

    def _note_gone(self, block_hash: bytes) -> None:
        if block_hash in self._stored:
            del self._stored[block_hash]
        else:
            self._evicted[block_hash] = None

    def check(self) -> None:
        """Raises InvariantError unless prefix-closed and in agreement with the pool. O(pool)."""
        if not len(self._blocks) == len(self._hashes) == len(self._contents):
            raise InvariantError(
                f"{len(self._blocks)} hashes, {len(self._hashes)} blocks, "
                f"{len(self._contents)} contents"
            )
        kept = set(self._pool.kept_blocks())
        children = array("i", bytes(4 * (self._pool.capacity + 1)))
        for block_hash, block in self._blocks.items():
            if self._hashes.get(block) != block_hash:
                raise InvariantError(f"block {block} is cached under two hashes")
            references = self._pool.references(block)
            if (references == 0) != (block in kept):
                raise InvariantError(
                    f"cached block {block}: {references} references, kept {block in kept}"
                )
            parent = self._parents[block]
            if parent:
                children[parent] += 1
                if parent not in self._hashes:
                    raise InvariantError(f"block {block} is cached but its parent {parent} is not")
                if references and not self._pool.references(parent):
                    raise InvariantError(
                        f"block {block} is referenced but its parent {parent} is not"
                    )
        if children != self._children:
            raise InvariantError("counts of cached children are wrong")
        if not kept <= self._hashes.keys():
            raise InvariantError(
                f"blocks {sorted(kept - self._hashes.keys())} are kept but not cached"
            )
