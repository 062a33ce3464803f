"""The policies by name: what each prefers to keep, and that all keep the set prefix-closed."""

import random
from collections import OrderedDict

import pytest

from cluster.blocks import hash_blocks, pack_tokens
from tests.worker.recording_runner import Rig
from tests.worker.test_eviction import play, true_leaves
from worker.block_pool import BlockPool
from worker.eviction.base import BlockUse
from worker.eviction.lfu import Lfu
from worker.eviction.registry import POLICIES, parse_eviction
from worker.eviction.ttl import Ttl
from worker.eviction.workload_aware import MAX_CLASSES, MEMORY, ReuseFit, WorkloadAware
from worker.leaf_heap import LeafHeap
from worker.prefix_cache import PrefixCache


class Caching:
    """A cache of one-token blocks on which whole sequences are played, one at a time."""

    def __init__(self, make_policy, capacity):
        self.pool = BlockPool(capacity)
        self.policy = make_policy(self.pool)
        self.cache = PrefixCache(self.pool, self.policy, 1)

    def serve(self, now, *tokens, request_type="", turn=0):
        """One request; returns how many of its tokens were reused."""
        self.cache.now = now
        self.cache.expire()
        before = len(self.cache) + self.cache.evictions
        use = BlockUse(now, 0, len(tokens), request_type, turn)
        self.cache.release(play(self.cache, tokens, use))
        self.cache.check()
        return len(tokens) - (len(self.cache) + self.cache.evictions - before)

    def holds(self, *tokens):
        hashes = hash_blocks(b"r" * 32, pack_tokens(tokens), 1)
        return self.cache.probe(hashes, len(hashes)).cached == len(tokens)


@pytest.mark.parametrize("text", ["lru", "lfu", "ttl:ttl_s=40", "workload_aware"])
@pytest.mark.parametrize("seed", range(10))
def test_any_policy_keeps_the_set_prefix_closed_under_overlapping_use(text, seed):
    rng = random.Random(seed)
    pool = BlockPool(12)
    cache = PrefixCache(pool, parse_eviction(text)(pool), 1, keep_limit=rng.choice([3, 8, 12]))
    tables: list[list[int]] = []
    for now in range(400):
        cache.now = float(now)
        cache.expire()
        if tables and (rng.random() < 0.5 or pool.free_blocks < 4):
            cache.release(tables.pop(rng.randrange(len(tables))))
        elif pool.free_blocks >= 4:
            tokens = [rng.randrange(2) for _ in range(rng.randint(1, 4))]
            kind = rng.choice(["chat", "api"])
            tables.append(play(cache, tokens, BlockUse(now, 0, 3, kind, rng.randint(0, 3))))
        if rng.random() < 0.01:
            cache.flush()
        pool.check()
        cache.check()
        assert pool.kept <= cache.keep_limit
    assert cache.evictions > 20
    assert sum(cache.evicted_ages) == sum(cache.evicted_for) == cache.evictions


@pytest.mark.parametrize("policy", [Lfu, lambda pool: Ttl(pool, 5.0), WorkloadAware])
def test_a_policy_with_heaps_knows_exactly_the_leaves(policy):
    rng = random.Random(1)
    world = Caching(policy, 12)
    heaps = getattr(world.policy, "_heaps", None) or [getattr(world.policy, "_heap", None)]
    for now in range(300):
        world.serve(now, *(rng.randrange(3) for _ in range(rng.randint(1, 4))))
        heaps = getattr(world.policy, "_heaps", heaps)
        known = {block for heap in heaps for block in heap._stamps}
        assert known == true_leaves(world.pool, world.cache)


def test_lfu_keeps_what_is_used_often_and_lru_would_not():
    worlds = [Caching(POLICIES[name][0], 4) for name in ("lfu", "lru")]
    for world in worlds:
        for now in range(3):
            world.serve(now, 7)
        for now, token in enumerate((1, 2, 3, 4, 5), start=3):
            world.serve(now, token)
    assert [world.holds(7) for world in worlds] == [True, False]


def test_lfu_forgets_what_was_popular_once():
    world = Caching(Lfu, 3)
    for now in range(20):
        world.serve(now, 7)
    for now in range(20, 200):
        world.serve(now, 100 + now)
    assert not world.holds(7)


def test_ttl_drops_what_was_not_used_in_time_though_nobody_needs_the_room():
    world = Caching(lambda pool: Ttl(pool, 10.0), 8)
    world.serve(0.0, 1, 2)
    world.serve(6.0, 1)
    world.serve(9.9, 5)
    assert world.holds(1, 2)
    world.serve(11.0, 5)
    assert world.holds(1)
    assert not world.holds(1, 2)
    world.serve(16.0, 5)
    assert not world.holds(1)
    assert world.cache.evicted_for == [0, 0, 2]
    assert world.cache.evicted_age_s == 11.0 + 10.0


def test_ttl_expires_through_the_engine_also_while_it_is_idle():
    rig = Rig(eviction="ttl:ttl_s=30")
    rig.add("a", [1] * 12, max_tokens=1)
    rig.drain()
    assert rig.core.load().cached_blocks == 3
    rig.core.expire(rig.now + 29.0)
    assert rig.core.load().cached_blocks == 3
    rig.core.expire(rig.now + 30.0)
    assert rig.publish() == set()
    assert rig.core.stats().evictions_expired == 3
    ages = rig.core.eviction_ages()
    assert sum(ages.counts) == 3
    assert ages.sum_s == 90.0


class TestWorkloadAware:
    def test_it_learns_which_class_comes_back_and_keeps_it(self):
        """Chats come back after 5 s, batch jobs never; after a flood of both, chats are there."""
        results = {}
        for name in ("workload_aware", "lru"):
            world = Caching(parse_eviction(name), 24)
            rng = random.Random(4)
            reused = asked = 0
            chats: OrderedDict[int, float] = OrderedDict()
            for now in range(1500):
                if now % 5 == 0:
                    token = 10_000 + now
                    chats[token] = now + 12.0
                    world.serve(now, token, request_type="chat", turn=1)
                due = [token for token, at in chats.items() if at <= now]
                for token in due:
                    del chats[token]
                    hit = world.serve(now, token, token + 1, request_type="chat", turn=2)
                    if now > 500:
                        asked += 1
                        reused += hit > 0
                for _ in range(3):
                    world.serve(now, rng.randrange(10**6, 10**9), request_type="batch")
            results[name] = reused / asked
        assert results["workload_aware"] > 0.95
        assert results["lru"] < 0.1

    def test_within_a_class_and_a_moment_the_end_of_a_prompt_goes_first(self):
        world = Caching(WorkloadAware, 6)
        world.serve(0.0, 1, 2, 3)
        world.serve(0.0, 4, 5)
        world.cache.now = 1.0
        world.serve(1.0, 8, 9, 10)
        assert world.holds(1, 2)
        assert world.holds(4)
        assert not world.holds(1, 2, 3)
        assert not world.holds(4, 5)

    def test_the_fit_finds_the_rate_and_the_share(self):
        rng = random.Random(2)
        fit = ReuseFit()
        for _ in range(3000):
            fit.opened()
            if rng.random() < 0.3:
                fit.reused(rng.expovariate(1 / 20.0))
        assert fit.share == pytest.approx(0.3, rel=0.1)
        assert fit.rate == pytest.approx(1 / 20.0, rel=0.1)
        assert fit.probability(0.0, 1e9) == pytest.approx(fit.share)

    def test_a_long_wait_makes_a_use_less_likely_and_never_breaks(self):
        fit = ReuseFit()
        for _ in range(100):
            fit.opened()
            fit.reused(1.0)
        chances = [fit.probability(idle, 60.0) for idle in (0.0, 1.0, 10.0, 100.0, 1e9)]
        assert chances == sorted(chances, reverse=True)
        assert chances[-1] == 0.0
        assert all(0.0 <= chance <= 1.0 for chance in chances)

    def test_a_class_forgets(self):
        fit = ReuseFit()
        for _ in range(MEMORY):
            fit.opened()
            fit.reused(1.0)
        for _ in range(5 * MEMORY):
            fit.opened()
        assert fit.share < 0.1

    def test_no_number_of_request_types_makes_it_grow(self):
        world = Caching(WorkloadAware, 8)
        for now in range(3 * MAX_CLASSES):
            world.serve(now, now, request_type=f"type {now}", turn=now)
        assert len(world.policy._heaps) == MAX_CLASSES

    def test_the_class_travels_with_the_request(self):
        rig = Rig(eviction="workload_aware")
        rig.add("a", [1] * 12, max_tokens=1, request_type="chat", turn=2)
        rig.drain()
        assert list(rig.core._cache._policy._numbers) == [("chat", 2)]


def test_the_cap_leaves_to_the_cache_its_share_of_the_pool():
    rig = Rig(capacity_blocks=20, cache_share=0.25)
    for name in range(5):
        rig.add(str(name), [name] * 16, max_tokens=1)
        rig.drain()
        assert rig.core.load().cached_blocks <= 5
    assert rig.core.stats().evictions_over_share == 20 - 5
    assert rig.core.stats().evictions_for_space == 0


def test_without_a_share_only_running_requests_share_blocks():
    rig = Rig(cache_share=0.0, chunk_tokens=4)
    rig.add("a", [1] * 16, max_tokens=9, ignore_eos=True)
    rig.add("b", [1] * 16, max_tokens=1)
    rig.drain()
    assert rig.hit_tokens("b") == 12
    assert rig.core.load().cached_blocks == 0


class TestPins:
    def test_a_pinned_prefix_survives_what_evicts_all_else(self):
        rig = Rig(capacity_blocks=12, pin_share=0.5)
        for name, first in (("pinned", 1), ("other", 2)):
            rig.add(name, [first] * 12, max_tokens=1)
            rig.drain()
        assert rig.core.pin(b"r" * 32, rig.requests["pinned"][0].token_ids) == 12
        for name in range(6):
            rig.add(f"flood{name}", [name] * 21, max_tokens=2)
            rig.drain()
        for name, first in (("again", 1), ("other again", 2)):
            rig.add(name, [first] * 12, max_tokens=1)
            rig.drain()
        assert rig.hit_tokens("again") == 8  # all but the block of the last token
        assert rig.hit_tokens("other again") == 0
        assert rig.core.stats().pinned_blocks == 3

    def test_pins_stop_at_their_share_and_count_common_blocks_once(self):
        rig = Rig(capacity_blocks=20, pin_share=0.25)
        prompts = {"a": [1] * 12, "b": [1] * 8 + [2] * 4, "c": [1] * 8 + [3] * 8}
        for name, prompt in prompts.items():
            rig.add(name, prompt, max_tokens=1)
            rig.drain()
        pinned = [rig.core.pin(b"r" * 32, rig.requests[name][0].token_ids) for name in prompts]
        assert pinned == [12, 12, 12]
        assert rig.core.stats().pinned_blocks == 5
        rig.core.check()

    def test_a_request_may_take_all_that_pins_can_never_take(self):
        rig = Rig(capacity_blocks=8, pin_share=0.5)
        rig.add("a", [1] * 15, max_tokens=1)
        rig.drain()
        assert rig.core.pin(b"r" * 32, rig.requests["a"][0].token_ids) == 12
        assert rig.config.sequence_limit == 16
        rig.add("whole", [2] * 15, max_tokens=9, ignore_eos=True)
        rig.add("too", [3] * 15, max_tokens=9, ignore_eos=True)
        rig.drain()

    def test_a_flush_ends_pins(self):
        rig = Rig(pin_share=0.5)
        rig.add("a", [1] * 16, max_tokens=1)
        rig.drain()
        rig.core.pin(b"r" * 32, rig.requests["a"][0].token_ids)
        rig.core.flush()
        assert rig.core.stats().pinned_blocks == 0
        rig.drain()


def test_a_heap_of_leaves_stays_as_small_as_what_it_holds():
    heap: LeafHeap[tuple[float]] = LeafHeap()
    for number in range(10_000):
        heap.push(number % 7, (float(number),))
        heap.discard(number % 7)
    assert len(heap) == 0
    assert len(heap._heap) < 100
    with pytest.raises(IndexError):
        heap.pop()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("mru", "unknown eviction policy 'mru'; use one of lru, lfu, ttl, workload_aware"),
        ("ttl:seconds=3", "has no parameter 'seconds=3'; it has ttl_s=600"),
        ("lru:x=1", "it has none"),
        ("ttl:ttl_s=soon", "must be a number, got 'soon'"),
        ("ttl:ttl_s=0", "must be above 0"),
        ("ttl:ttl_s=nan", "must be above 0"),
    ],
)
def test_what_names_no_policy_is_refused_in_words(text, says):
    with pytest.raises(ValueError, match=says):
        parse_eviction(text)


def test_parameters_reach_the_policy():
    policy = parse_eviction("ttl:ttl_s=7.5")(BlockPool(1))
    assert isinstance(policy, Ttl)
    assert policy.ttl_s == 7.5
