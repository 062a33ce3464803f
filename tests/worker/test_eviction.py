"""The interface of eviction policies: what a policy is told suffices for any order of leaves."""

import random

import pytest

from cluster.blocks import hash_blocks, pack_tokens
from worker.block_pool import BlockPool, InvariantError
from worker.eviction.base import BlockUse
from worker.eviction.lru import Lru
from worker.prefix_cache import PrefixCache

USE = BlockUse(0.0, 0, 0)


class Watching:
    """Knows the leaves from its hooks alone, and evicts whichever the order asks for."""

    def __init__(self, order):
        self.leaves: set[int] = set()
        self.uses: list[tuple[list[int], BlockUse]] = []
        self.order = order

    def used(self, blocks, use):
        self.uses.append((list(blocks), use))

    def leaf(self, block):
        assert block not in self.leaves
        self.leaves.add(block)

    def withdrawn(self, block):
        self.leaves.remove(block)

    def victim(self, now):
        block = self.order(sorted(self.leaves))
        self.leaves.remove(block)
        return block

    def expired(self, now):
        return 0

    def clear(self):
        self.leaves.clear()


def true_leaves(pool, cache):
    return {
        block
        for block in cache._hashes
        if not pool.references(block) and not cache._children[block]
    }


def play(cache, tokens, use=USE):
    """One sequence: reuse what is cached, compute and store the rest. Returns its table."""
    packed = pack_tokens(tokens)
    hashes = hash_blocks(b"r" * 32, packed, 1)
    table = cache.acquire(b"r" * 32, hashes, packed, len(hashes), use)
    for index in range(len(table), len(hashes)):
        parent_key = hashes[index - 1] if index else b"r" * 32
        parent = table[-1] if table else 0
        part = packed[4 * index : 4 * index + 4]
        block, here = cache.allocate(), use._replace(depth=index)
        table.append(cache.store(block, hashes[index], parent, parent_key, part, here))
    return table


@pytest.mark.parametrize("seed", range(20))
def test_a_policy_knows_all_leaves_and_any_order_keeps_the_set_prefix_closed(seed):
    rng = random.Random(seed)
    pool = BlockPool(12)
    policy = Watching(rng.choice)
    cache = PrefixCache(pool, policy, 1)
    tables: list[list[int]] = []
    for _ in range(300):
        if tables and (rng.random() < 0.5 or pool.free_blocks < 4):
            cache.release(tables.pop(rng.randrange(len(tables))))
        elif pool.free_blocks >= 4:
            tables.append(play(cache, [rng.randrange(2) for _ in range(rng.randint(1, 4))]))
        if rng.random() < 0.02:
            cache.flush()
            for table in tables:
                cache.release(table)
            tables.clear()
        assert policy.leaves == true_leaves(pool, cache)
        pool.check()
        cache.check()
    assert cache.evictions > 20


def test_the_cache_refuses_a_victim_that_is_no_leaf():
    pool = BlockPool(2)
    policy = Watching(max)
    cache = PrefixCache(pool, policy, 1)
    table = play(cache, [1, 2])
    cache.release(table)
    policy.leaves = {table[0]}
    with pytest.raises(InvariantError, match="no leaf"):
        cache.allocate()
    assert len(cache) == 2


def test_a_policy_is_told_who_uses_which_blocks():
    pool = BlockPool(4)
    policy = Watching(max)
    cache = PrefixCache(pool, policy, 1)
    first, second = BlockUse(1.0, 0, 2), BlockUse(2.0, 0, 2)
    table = play(cache, [1, 2], first)
    assert policy.uses == [([table[0]], first), ([table[1]], first._replace(depth=1))]
    policy.uses.clear()
    play(cache, [1, 2], second)
    assert policy.uses == [(table, second)]


def test_a_leaf_that_another_computes_again_is_a_leaf_no_more():
    """One caches a block and ends; another, which began before, then stores the same content."""
    pool = BlockPool(3)
    policy = Watching(min)
    cache = PrefixCache(pool, policy, 1)
    part = pack_tokens([7])
    (block_hash,) = hash_blocks(b"r" * 32, part, 1)
    first, second = cache.allocate(), cache.allocate()
    assert cache.store(first, block_hash, 0, b"r" * 32, part, USE) == first
    cache.release([first])
    assert policy.leaves == {first}
    assert cache.store(second, block_hash, 0, b"r" * 32, part, USE) == first
    assert policy.leaves == set()
    cache.release([first])
    assert policy.leaves == true_leaves(pool, cache) == {first}


@pytest.mark.parametrize("seed", range(20))
def test_lru_evicts_the_leaf_released_longest_ago(seed):
    """Against a model that keeps the time of every release."""
    rng = random.Random(seed)
    pool = BlockPool(10)
    lru = Lru(pool)
    cache = PrefixCache(pool, lru, 1)
    released_at: dict[int, int] = {}
    clock = 0
    evicted = []
    lru_victim = lru.victim

    def checked_victim(now):
        leaves = true_leaves(pool, cache)
        expected = min(leaves, key=released_at.__getitem__)
        block = lru_victim(now)
        assert block == expected
        evicted.append(block)
        return block

    lru.victim = checked_victim
    tables: list[list[int]] = []
    for _ in range(400):
        if tables and (rng.random() < 0.5 or pool.free_blocks < 4):
            table = tables.pop(rng.randrange(len(tables)))
            cache.release(table)
            for block in reversed(table):
                clock += 1
                if not pool.references(block):
                    released_at[block] = clock
        elif pool.free_blocks >= 4:
            tables.append(play(cache, [rng.randrange(3) for _ in range(rng.randint(1, 4))]))
    assert len(evicted) > 50
