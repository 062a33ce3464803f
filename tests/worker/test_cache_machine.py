"""The engine core under arbitrary interleavings, against plain models of cache and outputs.

Two drivers share one `World`: a hypothesis state machine, which shrinks what it finds, and long
seeded schedules, which reach states that short ones do not. What the interleavings must have
reached is asserted as well, so that the drivers cannot become harmless unnoticed.
"""

from __future__ import annotations

import random
from collections import Counter

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cluster.blocks import hash_block, pack_tokens
from cluster.protocol import RequestError
from tests.worker.recording_runner import VOCABULARY, Rig

ROOTS = [b"a" * 32, b"b" * 32]
STEMS = [[1] * 24, [1] * 5 + [2] * 19, [1] * 9 + [3] * 15, [4] * 24]
"""Prompts are cut from these, so that most share a prefix of some length with others."""


FAULTS = ["raises", "not finite", "memory"]
EVICTION = ["lru", "lfu", "ttl:ttl_s=9", "workload_aware"]


def hash_chain(hash_block, root, tokens, size):
    hashes: list[bytes] = []
    for end in range(size, len(tokens) + 1, size):
        part = pack_tokens(tokens[end - size : end])
        hashes.append(hash_block(hashes[-1] if hashes else root, part))
    return hashes


def weak_hash(parent: bytes, packed: bytes) -> bytes:
    """Only 11 values: collides all the time."""
    return bytes([hash_block(parent, packed)[0] % 11]) * 16


class World:
    """An engine and all that must hold for it, whatever is done to it."""

    rig_class: type[Rig] = Rig

    def __init__(self, *, weak: bool, **config) -> None:
        self.parents: dict[bytes, set[bytes]] = {}
        self.weak = weak
        self.rig = self.rig_class(
            context_tokens=30,
            eos_token_ids=[VOCABULARY - 1],
            hash_block=self.hash_block,
            **config,
        )
        self.count = 0
        self.pinned = 0
        self.received: list[str] = []
        self.live: list[str] = []

    def hash_block(self, parent: bytes, packed: bytes) -> bytes:
        block_hash = (weak_hash if self.weak else hash_block)(parent, packed)
        self.parents.setdefault(block_hash, set()).add(parent)
        return block_hash

    def add(self, prompt, max_tokens, root, seed, ignore_eos) -> None:
        self.count += 1
        request_id = f"request-{self.count}"
        config, before = self.rig.config, self.rig.core.load()
        too_long = len(prompt) >= config.sequence_limit
        full = before.waiting >= config.max_waiting
        fields = {"root": root, "seed": seed, "ignore_eos": ignore_eos}
        if too_long or full:
            with pytest.raises(RequestError) as refused:
                self.rig.add(request_id, prompt, max_tokens, **fields)
            assert refused.value.status == (400 if too_long else 429)
            assert self.rig.core.load() == before
        else:
            self.rig.add(request_id, prompt, max_tokens, **fields)
            self.received.append(request_id)
            self.live.append(request_id)

    def cancel(self, request_id) -> None:
        if request_id not in self.rig.final:
            assert self.rig.cancel(request_id)
            self.live.remove(request_id)
        assert not self.rig.core.cancel(request_id)

    def step(self) -> None:
        self.rig.step()
        self.consistent()

    def fail(self) -> None:
        """A step in which nothing can be computed."""
        if self.rig.core.has_work():
            outputs = self.rig.fail()
            assert outputs
            assert all(o.finish_reason == "error" and o.error for o in outputs)
            self.consistent()

    def fault(self, kind: str) -> None:
        """A step in which one request raises or computes NaN, or memory suffices for a token."""
        runner, running = self.rig.runner, self.rig.core._scheduler.running
        victim = next(reversed(running), "")
        if kind == "raises" and victim:
            runner.bad[victim] = RuntimeError("cannot be computed")
        elif kind == "not finite" and victim:
            runner.not_finite.add(victim)
        elif kind == "memory":
            runner.room = 1
        outputs = self.rig.step()
        failed = [output.request_id for output in outputs if output.finish_reason == "error"]
        assert set(failed) <= {victim}
        self.consistent()
        runner.bad.clear()
        runner.not_finite.clear()
        runner.room = 1 << 30

    def only_pinned(self) -> int:
        """Pinned blocks that no sequence uses."""
        scheduler = self.rig.core._scheduler
        used = {b for s in scheduler.running.values() for b in s.block_table}
        return len(set(scheduler.pins.blocks) - used - self.loading())

    def loading(self) -> set[int]:
        """Blocks that loads from cold tiers use."""
        loading = self.rig.core._scheduler.loading
        return set() if loading is None else set(loading.blocks())

    def flush(self) -> None:
        free, pinned = self.rig.core.load().free_blocks, self.only_pinned()
        self.rig.core.flush()
        assert self.rig.core.cached_blocks() == []
        assert self.rig.core.load().free_blocks == free + pinned
        self.consistent()

    def pin(self, prompt, root) -> None:
        """Pinned is what was cached of it, as far as the limit goes."""
        core, size = self.rig.core, self.rig.config.block_size
        pinned = core.pin(root, pack_tokens(prompt)) // size
        hashes = hash_chain(self.hash_block, root, prompt, size)
        blocks = core._cache._blocks
        assert {blocks[h] for h in hashes[:pinned]} <= set(core._scheduler.pins.blocks)
        self.pinned += pinned
        self.consistent()

    def consistent(self) -> None:
        core = self.rig.core
        core.check()
        cached = set(core.cached_blocks())
        for block_hash in cached:
            parents = self.parents[block_hash]
            assert any(p in cached or p in ROOTS for p in parents), "not prefix-closed"
        load = core.load()
        assert load.cached_blocks == len(cached)
        assert core._pool.kept <= self.rig.config.keep_limit
        if not self.rig.config.prefix_caching:
            assert not cached
        free = set(core._pool.free_list())
        scheduler = core._scheduler
        assert (
            len(scheduler.pins.blocks)
            == len(set(scheduler.pins.blocks))
            <= self.rig.config.pin_limit
        )
        used = {b for s in scheduler.running.values() for b in s.block_table} | {
            *scheduler.pins.blocks
        }
        used |= self.loading()
        assert not free & used
        assert free | used == set(range(1, self.rig.config.capacity_blocks + 1))
        assert load.running == len(scheduler.running) <= self.rig.config.max_batch_size
        exact = sum(
            len(s.tokens) - s.computed_tokens
            for s in scheduler.running.values()
            if s.pending_tokens
        )
        assert exact + sum(s.pending_tokens for s in scheduler.waiting.values()) == (
            load.pending_prefill_tokens
        )

    def close(self):
        """Let everything end. Returns the statistics."""
        self.rig.drain()
        self.rig.publish()
        assert not self.loading()
        assert self.rig.received == self.received
        stats = self.rig.core.stats()
        if not self.weak:
            assert stats.collisions == 0
        return stats


prompts = st.builds(
    lambda stem, length, tail: stem[:length] + tail,
    st.sampled_from(STEMS),
    st.sampled_from([1, 4, 8, 12, 16, 3, 7, 11, 20, 24]),
    st.one_of(st.just([]), st.lists(st.integers(0, 3), max_size=3)),
)
requests = st.tuples(
    prompts,
    st.integers(1, 12),
    st.sampled_from([ROOTS[0], ROOTS[0], ROOTS[1]]),
    st.integers(0, 3),
    st.booleans(),
)
bursts = st.lists(requests, min_size=1, max_size=5)


class WorldMachine(RuleBasedStateMachine):
    """What every machine over a `World` does; it has to begin with a world and `quiet` at 0."""

    @rule(burst=bursts)
    def add(self, burst):
        for request in burst:
            self.world.add(*request)

    @precondition(lambda self: self.world.live)
    @rule(data=st.data())
    def cancel(self, data):
        self.world.cancel(data.draw(st.sampled_from(self.world.live)))

    @rule(count=st.integers(1, 10))
    def step(self, count):
        self.quiet += count
        for _ in range(count):
            self.world.step()

    @rule()
    def publish(self):
        self.world.rig.publish()

    # Rare, or no state would live long enough to become interesting.
    @precondition(lambda self: self.quiet > 8)
    @rule(what=st.sampled_from(["flush", "fail", *FAULTS]))
    def flush_or_fail(self, what):
        self.quiet = 0
        if what == "flush":
            self.world.flush()
        elif what == "fail":
            self.world.fail()
        else:
            self.world.fault(what)

    @invariant()
    def consistent(self):
        self.world.consistent()

    def teardown(self):
        if hasattr(self, "world"):
            self.world.close()


class EngineMachine(WorldMachine):
    @initialize(
        block_size=st.sampled_from([1, 2, 4]),
        capacity=st.integers(4, 24),
        budget=st.integers(1, 40),
        chunk=st.sampled_from([0, 1, 3, 4, 7, 16]),
        batch=st.integers(1, 6),
        max_waiting=st.sampled_from([100, 3]),
        weak=st.sampled_from([False, False, True]),
        caching=st.sampled_from([True] * 7 + [False]),
        share=st.sampled_from([1.0, 1.0, 0.5, 0.0]),
        pin=st.sampled_from([0.0, 0.3]),
        eviction=st.sampled_from(EVICTION),
        burst=bursts,
    )
    def start(
        self,
        block_size,
        capacity,
        budget,
        chunk,
        batch,
        max_waiting,
        weak,
        caching,
        share,
        pin,
        eviction,
        burst,
    ):
        self.world = World(
            weak=weak,
            block_size=block_size,
            capacity_blocks=capacity,
            max_batch_size=batch,
            token_budget=budget,
            chunk_tokens=chunk,
            max_waiting=max_waiting,
            prefix_caching=caching,
            cache_share=share,
            pin_share=pin,
            eviction=eviction,
        )
        self.add(burst)
        self.quiet = 0

    @precondition(lambda self: self.world.live)
    @rule(data=st.data(), tail=st.lists(st.integers(0, 3), max_size=4))
    def next_turn(self, data, tail):
        """An earlier prompt again, with what was answered so far and a new turn, if any."""
        earlier = data.draw(st.sampled_from(self.world.live))
        request, prompt = self.world.rig.requests[earlier]
        turn = prompt + (self.world.rig.tokens[earlier] + tail if tail else [])
        self.world.add(turn, 4, request.namespace_root, 0, True)

    @rule(prompt=prompts, root=st.sampled_from(ROOTS))
    def pin(self, prompt, root):
        self.world.pin(prompt, root)


EngineMachine.TestCase.settings = settings(
    max_examples=200,
    stateful_step_count=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
TestEngineMachine = EngineMachine.TestCase


def play(seed: int):
    """150 random operations on one engine. Returns its statistics, and how much was pinned."""
    rng = random.Random(seed)
    world = World(
        weak=seed % 5 == 4,
        block_size=rng.choice([1, 2, 4]),
        capacity_blocks=rng.choice([8, 12, 20, 30]),
        max_batch_size=rng.randint(1, 6),
        token_budget=rng.choice([1, 5, 12, 40, 100]),
        chunk_tokens=rng.choice([0, 1, 3, 4, 7, 16]),
        prefix_caching=seed % 10 != 7,
        cache_share=rng.choice([1.0, 1.0, 0.4]),
        pin_share=rng.choice([0.0, 0.2]),
        eviction=EVICTION[seed % len(EVICTION)],
    )
    for _ in range(150):
        chance = rng.random()
        if chance < 0.35 and len(world.live) - len(world.rig.final) < 12:
            earlier = rng.choice(world.live) if world.live else None
            if earlier is not None and rng.random() < 0.4:
                request, prompt = world.rig.requests[earlier]
                if rng.random() < 0.7:
                    prompt = [*prompt, *world.rig.tokens[earlier], rng.randrange(4)]
                root = request.namespace_root
            else:
                tail = [rng.randrange(4) for _ in range(rng.choice([0, 0, 1, 3]))]
                prompt = rng.choice(STEMS)[: rng.randint(1, 24)] + tail
                root = rng.choice([ROOTS[0], ROOTS[0], ROOTS[1]])
            world.add(prompt, rng.randint(1, 12), root, rng.randrange(4), rng.random() < 0.5)
        elif chance < 0.40 and world.live:
            world.cancel(rng.choice(world.live))
        elif chance < 0.41:
            world.flush()
        elif chance < 0.42:
            world.fail()
        elif chance < 0.435:
            world.fault(rng.choice(FAULTS))
        elif chance < 0.45:
            world.pin(rng.choice(STEMS), rng.choice(ROOTS))
        elif chance < 0.50:
            world.rig.publish()
        else:
            world.step()
    return world.close(), world.pinned


def test_long_random_schedules():
    totals: Counter[str] = Counter()
    for seed in range(80):
        stats, pinned = play(seed)
        for name in stats.__struct_fields__:
            totals[name] += getattr(stats, name)
        totals["pinned"] += pinned
    reached = {
        "hits": 100,
        "partial_hits": 100,
        "evictions_for_space": 500,
        "evictions_over_share": 200,
        "evictions_expired": 100,
        "pinned": 50,
        "preemptions": 100,
        "resumed_tokens": 100,
        "duplicates": 20,
        "held_requests": 100,
        "collisions": 100,
        "failed_steps": 20,
    }
    assert {name: totals[name] for name, least in reached.items() if totals[name] < least} == {}
