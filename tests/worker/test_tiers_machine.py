"""Pool, cache, scheduler and cold tiers under arbitrary interleavings of work and I/O.

As `test_cache_machine`, whose world and whose runner, which checks every KV slot that it reads, are
used here: I/O ends early or late, files break, the disk fills up, requests go while they load.
"""

from __future__ import annotations

import random
from collections import Counter

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import initialize, rule

from tests.worker.test_cache_machine import (
    EVICTION,
    FAULTS,
    ROOTS,
    STEMS,
    World,
    WorldMachine,
    bursts,
)
from tests.worker.tiered_rig import TieredRig


class TieredWorld(World):
    rig_class = TieredRig

    def consistent(self) -> None:
        super().consistent()
        tiers = self.rig.core.tiers
        for tier in (tiers.host, tiers.disk):
            held = set(tier.hashes())
            assert len(held) == len(tier) <= tier.capacity
            for block_hash in held:
                assert any(p in held or p in ROOTS for p in self.parents[block_hash]), (
                    "a tier is not prefix-closed"
                )

    def fail(self) -> None:
        """A step fails, unless there is nothing to compute before a load has ended."""
        failed_before = self.rig.core.stats().failed_steps
        outputs = self.rig.fail()
        if self.rig.core.stats().failed_steps > failed_before:
            assert outputs
            assert all(o.finish_reason == "error" and o.error for o in outputs)
        else:
            assert not self.rig.core.has_work() or self.rig.core.waits_for_loads()
        self.consistent()

    def break_a_file(self, rng) -> None:
        folder = self.rig.folder
        if folder is not None and folder.files:
            folder.bad.add(rng.choice(sorted(folder.files)))

    def close(self):
        if self.rig.folder is not None:
            self.rig.folder.full = False
        stats = super().close()
        tiers = self.rig.core.tiers
        assert not tiers._writing
        assert not tiers._copying
        if self.rig.folder is not None:
            assert set(self.rig.folder.files) == set(tiers.disk.hashes())
        if not self.weak:
            assert tiers.stats().tier_collisions == 0
        return stats


class TieredMachine(WorldMachine):
    @initialize(
        block_size=st.sampled_from([1, 2, 4]),
        capacity=st.integers(4, 16),
        host=st.integers(1, 16),
        disk=st.sampled_from([0, 3, 8, 40]),
        patience=st.sampled_from([1.0, 0.5, 0.2]),
        budget=st.integers(1, 40),
        batch=st.integers(1, 6),
        weak=st.sampled_from([False, False, True]),
        share=st.sampled_from([1.0, 1.0, 0.5, 0.0]),
        pin=st.sampled_from([0.0, 0.3]),
        eviction=st.sampled_from(EVICTION),
        seed=st.integers(0, 1000),
        burst=bursts,
    )
    def start(
        self,
        block_size,
        capacity,
        host,
        disk,
        patience,
        budget,
        batch,
        weak,
        share,
        pin,
        eviction,
        seed,
        burst,
    ):
        self.rng = random.Random(seed)
        self.world = TieredWorld(
            weak=weak,
            block_size=block_size,
            capacity_blocks=capacity,
            host_blocks=host,
            disk_blocks=disk,
            patience=patience,
            seed=seed,
            max_batch_size=batch,
            token_budget=budget,
            max_waiting=100,
            cache_share=share,
            pin_share=pin,
            eviction=eviction,
        )
        self.add(burst)
        self.quiet = 0

    @rule()
    def break_a_file(self):
        self.world.break_a_file(self.rng)


TieredMachine.TestCase.settings = settings(
    max_examples=150,
    stateful_step_count=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
TestTieredMachine = TieredMachine.TestCase


def play(seed: int) -> Counter[str]:
    """150 random operations on one engine. Returns what was reached."""
    rng = random.Random(seed)
    reached: Counter[str] = Counter()
    world = TieredWorld(
        weak=seed % 5 == 4,
        block_size=rng.choice([1, 2, 4]),
        capacity_blocks=rng.choice([8, 12, 20]),
        host_blocks=rng.choice([2, 6, 12, 40]),
        disk_blocks=rng.choice([0, 5, 20, 60]),
        patience=rng.choice([1.0, 0.6, 0.2]),
        seed=seed,
        max_batch_size=rng.randint(1, 6),
        token_budget=rng.choice([5, 12, 40, 100]),
        cache_share=rng.choice([1.0, 1.0, 0.4]),
        eviction=EVICTION[seed % len(EVICTION)],
    )
    core = world.rig.core
    for _ in range(150):
        chance = rng.random()
        if chance < 0.35 and len(world.live) - len(world.rig.final) < 12:
            tail = [rng.randrange(4) for _ in range(rng.choice([0, 0, 1, 3]))]
            prompt = rng.choice(STEMS)[: rng.randint(1, 24)] + tail
            root = rng.choice([ROOTS[0], ROOTS[0], ROOTS[1]])
            world.add(prompt, rng.randint(1, 8), root, rng.randrange(4), rng.random() < 0.5)
        elif chance < 0.40 and world.live:
            name = rng.choice(world.live)
            waiting = core._scheduler.waiting.get(name)
            held = waiting is not None and waiting.held_for in core._scheduler.loading._hashes
            reached["cancelled_while_loading"] += held
            world.cancel(name)
        elif chance < 0.41:
            reached["flushed_while_loading"] += core.tiers.loads
            world.flush()
        elif chance < 0.42:
            world.fail()
        elif chance < 0.43:
            world.fault(rng.choice(FAULTS))
        elif chance < 0.45:
            world.break_a_file(rng)
        elif chance < 0.46 and world.rig.folder is not None:
            world.rig.folder.full = not world.rig.folder.full
        elif chance < 0.50:
            world.rig.publish()
        else:
            world.step()
            loading = core._scheduler.loading
            holders = [s.held_for for s in core._scheduler.waiting.values() if s.held_for]
            waiting = Counter(h for h in holders if loading.holds(h))
            reached["waited_for_anothers_load"] += sum(waiting.values()) > core.tiers.loads
    world.close()
    stats = core.tiers.stats()
    reached.update({name: getattr(stats, name) for name in stats.__struct_fields__})
    return reached


def test_long_random_schedules():
    totals: Counter[str] = Counter()
    for seed in range(80):
        totals.update(play(seed))
    reached = {
        "loads": 500,
        "cpu_loaded_blocks": 500,
        "disk_loaded_blocks": 200,
        "failed_loads": 10,
        "failed_writes": 10,
        "refused_blocks": 20,
        "cpu_evictions": 200,
        "disk_evictions": 50,
        "tier_collisions": 5,
        "cancelled_while_loading": 5,
        "flushed_while_loading": 3,
        "waited_for_anothers_load": 20,
    }
    assert {name: totals[name] for name, least in reached.items() if totals[name] < least} == {}
