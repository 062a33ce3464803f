import pytest

from cluster.blocks import hash_blocks, pack_tokens
from worker.block_pool import BlockPool, InvariantError
from worker.eviction.base import BlockUse
from worker.eviction.lru import Lru
from worker.prefix_cache import PrefixCache, Probe

ROOT, OTHER_ROOT = b"r" * 32, b"o" * 32
SIZE = 2
USE = BlockUse(0.0, 0, 0)


class Chains:
    """A cache with helpers that compute, store and look up token chains as a scheduler would."""

    def __init__(self, capacity):
        self.pool = BlockPool(capacity)
        self.cache = PrefixCache(self.pool, Lru(self.pool), SIZE)

    def store(self, tokens, root=ROOT, hashes=None):
        """The block table, all referenced, of a sequence that reused what it could."""
        packed = pack_tokens(tokens)
        hashes = hashes or hash_blocks(root, packed, SIZE)
        table = self.cache.acquire(root, hashes, packed, len(hashes), USE)
        for index in range(len(table), len(hashes)):
            block = self.cache.allocate()
            part = packed[index * 8 : index * 8 + 8]
            kept = self.cache.store(
                block,
                hashes[index],
                table[-1] if table else 0,
                hashes[index - 1] if index else root,
                part,
                USE,
            )
            table.append(kept or block)
        self.check()
        return table

    def find(self, tokens, root=ROOT, limit=None):
        packed = pack_tokens(tokens)
        hashes = hash_blocks(root, packed, SIZE)
        limit = len(hashes) if limit is None else limit
        found = self.cache.acquire(root, hashes, packed, limit, USE)
        self.cache.release(found)
        return found

    def probe(self, tokens):
        hashes = hash_blocks(ROOT, pack_tokens(tokens), SIZE)
        return self.cache.probe(hashes, len(hashes))

    def check(self):
        self.pool.check()
        self.cache.check()


def test_longest_match_of_full_blocks():
    chains = Chains(8)
    table = chains.store([1, 2, 3, 4, 5, 6])
    assert chains.find([1, 2, 3, 4, 5, 6]) == table
    assert chains.find([1, 2, 3, 4, 9, 9]) == table[:2]
    assert chains.find([1, 2, 3, 4, 5]) == table[:2]
    assert chains.find([1, 2, 3, 4, 5, 6], limit=1) == table[:1]
    assert chains.find([9, 2, 3, 4]) == []


def test_equal_tokens_after_another_prefix_are_no_match():
    chains = Chains(8)
    chains.store([1, 2, 3, 4])
    assert chains.find([3, 4]) == []
    assert chains.find([5, 6, 3, 4]) == []


def test_another_namespace_is_no_match():
    chains = Chains(8)
    chains.store([1, 2, 3, 4])
    assert chains.find([1, 2, 3, 4], root=OTHER_ROOT) == []


def test_probe_counts_what_is_cached_and_what_is_referenced():
    chains = Chains(8)
    long = chains.store([1, 2, 3, 4, 5, 6])
    short = chains.store([1, 2])
    chains.cache.release(long)
    assert chains.probe([1, 2, 3, 4, 5, 6, 7, 8]) == Probe(cached=3, referenced=1)
    chains.cache.release(short)
    assert chains.probe([1, 2, 3, 4]) == Probe(cached=2, referenced=0)
    assert chains.probe([7, 8]) == Probe(0, 0)
    assert chains.probe([]) == Probe(0, 0)


def test_a_matched_block_is_pinned_and_survives_any_allocation():
    chains = Chains(3)
    chains.cache.release(chains.store([1, 2, 3, 4]))
    packed = pack_tokens([1, 2, 3, 4])
    pinned = chains.cache.acquire(ROOT, hash_blocks(ROOT, packed, SIZE), packed, 2, USE)
    assert chains.cache.allocate() not in pinned
    assert chains.pool.free_blocks == 0
    with pytest.raises(InvariantError):
        chains.cache.allocate()
    assert len(chains.cache) == 2
    chains.check()


def test_eviction_takes_the_deepest_block_first_and_the_oldest_chain_first():
    chains = Chains(4)
    chains.cache.release(chains.store([1, 2, 3, 4]))
    chains.cache.release(chains.store([5, 6, 7, 8]))
    chains.find([1, 2, 3, 4])  # the first chain is now the newer
    for expected in ([2, 1], [2, 0], [1, 0], [0, 0]):
        chains.cache.allocate()
        chains.check()
        assert [chains.probe([1, 2, 3, 4]).cached, chains.probe([5, 6, 7, 8]).cached] == expected


def test_a_parent_is_kept_while_any_branch_continues_it():
    chains = Chains(4)
    chains.cache.release(chains.store([1, 2, 3, 4]))
    chains.cache.release(chains.store([1, 2, 5, 6]))
    chains.cache.release(chains.store([9, 9]))
    order = []
    for _ in range(4):
        before = set(chains.cache.hashes())
        chains.cache.allocate()
        order += before - set(chains.cache.hashes())
        chains.check()
    left, right = (hash_blocks(ROOT, pack_tokens(t), SIZE) for t in ([1, 2, 3, 4], [1, 2, 5, 6]))
    assert order[:3] == [left[1], right[1], left[0]]


def test_a_block_computed_twice_is_kept_once_and_never_announced_as_gone():
    chains = Chains(4)
    first = chains.store([1, 2])
    chains.cache.take_changes()
    own = chains.cache.allocate()
    (block_hash,) = hash_blocks(ROOT, pack_tokens([1, 2]), SIZE)
    assert chains.cache.store(own, block_hash, 0, ROOT, pack_tokens([1, 2]), USE) == first[0]
    assert chains.pool.references(first[0]) == 2
    assert chains.pool.references(own) == 0
    chains.cache.release(first)
    chains.cache.release(first)
    chains.cache.allocate()
    assert chains.cache.take_changes() == ([], [])
    assert chains.cache.duplicates == 1
    chains.check()


def test_a_collision_on_a_look_up_is_a_miss_and_is_counted():
    chains = Chains(4)
    same = [b"x" * 16]
    chains.store([1, 2], hashes=same)
    assert chains.cache.acquire(ROOT, same, pack_tokens([3, 4]), 1, USE) == []
    assert chains.cache.acquire(OTHER_ROOT, same, pack_tokens([1, 2]), 1, USE) == []
    assert chains.cache.collisions == 2
    assert len(chains.cache.acquire(ROOT, same, pack_tokens([1, 2]), 1, USE)) == 1


def test_a_collision_on_a_commit_changes_nothing():
    chains = Chains(4)
    same = [b"x" * 16]
    first = chains.store([1, 2], hashes=same)
    block = chains.cache.allocate()
    assert chains.cache.store(block, same[0], 0, ROOT, pack_tokens([3, 4]), USE) == 0
    assert not chains.cache.holds(block)
    assert chains.cache.collisions == 1
    assert chains.cache.acquire(ROOT, same, pack_tokens([1, 2]), 1, USE) == first
    chains.check()


def test_a_child_is_not_stored_below_an_uncached_parent():
    chains = Chains(4)
    parent, child = chains.cache.allocate(), chains.cache.allocate()
    with pytest.raises(InvariantError, match="cannot be stored below"):
        chains.cache.store(child, b"c" * 16, parent, b"p" * 16, pack_tokens([3, 4]), USE)


def test_changes_are_net_and_parents_come_first():
    chains = Chains(2)
    packed = pack_tokens([1, 2, 3, 4])
    hashes = hash_blocks(ROOT, packed, SIZE)
    chains.cache.release(chains.store([1, 2, 3, 4]))
    assert chains.cache.take_changes() == (hashes, [])
    assert chains.cache.take_changes() == ([], [])
    # The deeper block goes, another comes and goes, the deeper one returns: nothing has changed.
    chains.cache.release(chains.store([1, 2, 7, 8]))
    chains.cache.release(chains.store([1, 2, 3, 4]))
    assert chains.cache.take_changes() == ([], [])
    other = hash_blocks(ROOT, pack_tokens([1, 2, 7, 8]), SIZE)
    chains.cache.release(chains.store([1, 2, 7, 8]))
    assert chains.cache.take_changes() == ([other[1]], [hashes[1]])


def test_flush_empties_the_cache_and_leaves_used_blocks_to_their_users():
    chains = Chains(4)
    used = chains.store([1, 2, 3, 4])
    chains.cache.release(chains.store([1, 2, 5, 6]))
    chains.cache.take_changes()
    free = chains.pool.free_blocks
    chains.cache.flush()
    chains.check()
    stored, evicted = chains.cache.take_changes()
    assert (stored, len(evicted), len(chains.cache)) == ([], 3, 0)
    assert chains.pool.free_blocks == free
    assert [chains.pool.references(block) for block in used] == [1, 1]
    assert chains.find([1, 2, 3, 4]) == []
    # The same content may be cached anew beside the blocks still in use, which end as vacant.
    again = chains.store([1, 2])
    assert not set(again) & set(used)
    chains.cache.release(used)
    chains.cache.release(again)
    chains.check()
    assert (len(chains.cache), chains.pool.free_blocks) == (1, 4)


def test_check_sees_a_missing_parent():
    chains = Chains(4)
    chains.cache.release(chains.store([1, 2, 3, 4]))
    head = chains.cache.hashes()[0]
    block = chains.cache._blocks.pop(head)
    del chains.cache._hashes[block], chains.cache._contents[block]
    with pytest.raises(InvariantError, match="its parent"):
        chains.cache.check()
