"""What a worker says of its prefill before the first request: what its runner really takes."""

import asyncio

import pytest

from cluster.protocol import prefill_pairs
from tests.tiny_model import write_tiny_llama
from tests.worker.test_emulator import Clock
from tests.worker.test_tiers_life import a_fleet
from tests.worker.test_worker_life import a_worker
from worker.emulated_profiles import CostModel
from worker.emulator import EmulatedRunner
from worker.first_speed import ENOUGH_S, MOST_TOKENS, first_speed
from worker.prefill_speed import Speed


class Stopwatch:
    """A runner whose steps take what `seconds(start, tokens)` says; `slow_first` on top for the
    first of its shape."""

    def __init__(self, seconds, slow_first=0.0):
        self.seconds, self.slow_first = seconds, slow_first
        self.now, self.steps, self.seen = 0.0, [], set()

    def execute(self, batch):
        (item,) = batch
        step = item.start, len(item.token_ids)
        assert len(item.block_table) * 16 >= sum(step)
        self.now += self.seconds(*step) + (self.slow_first if step not in self.seen else 0.0)
        self.seen.add(step)
        self.steps.append(step)
        return [0]

    def measured(self, room_tokens=100_000, chunk_tokens=8192):
        return first_speed(self, 16, room_tokens, chunk_tokens, lambda: self.now)


def quadratic(token, pair):
    return lambda start, tokens: token * tokens + pair * prefill_pairs(start, start + tokens)


@pytest.mark.parametrize(("token", "pair"), [(5e-3, 1e-6), (2e-5, 5e-9), (1e-6, 0.0)])
def test_both_parts_are_found_whatever_the_first_step_of_a_shape_takes(token, pair):
    runner = Stopwatch(quadratic(token, pair), slow_first=3.0)
    found = runner.measured()
    assert found.s_per_token == pytest.approx(token, rel=0.01)
    assert found.s_per_pair == pytest.approx(pair, rel=0.01, abs=1e-12)


def test_slow_workers_are_asked_for_little():
    runner = Stopwatch(quadratic(5e-3, 0.0))
    runner.measured()
    assert sum(tokens for _, tokens in runner.steps) == 4 * 64


def test_quick_workers_prefill_until_the_time_can_be_told():
    runner = Stopwatch(quadratic(1e-5, 0.0))
    runner.measured()
    assert max(tokens for _, tokens in runner.steps) == MOST_TOKENS
    runner = Stopwatch(quadratic(1e-4, 0.0))
    runner.measured()
    assert {tokens for start, tokens in runner.steps if not start} == {64, 256, 1024}
    assert runner.seconds(0, 256) < ENOUGH_S < runner.seconds(0, 1024)


@pytest.mark.parametrize("room_tokens", [1, 20, 64, 100, 129, 3000])
def test_a_small_pool_and_small_chunks_are_kept_to(room_tokens):
    runner = Stopwatch(quadratic(1e-4, 1e-7))
    found = runner.measured(room_tokens, chunk_tokens=50)
    assert found.s_per_token > 0
    assert all(tokens <= 50 and start + tokens <= room_tokens for start, tokens in runner.steps)


def test_where_depth_costs_nothing_that_can_be_seen_no_pair_does():
    runner = Stopwatch(lambda start, tokens: 0.2 - 1e-3 * bool(start))
    assert runner.measured() == Speed(s_per_token=3.13e-3, s_per_pair=0.0)  # 0.2 s of 64


def test_an_emulated_accelerator_is_timed_as_its_profile_says():
    clock = Clock()
    cost = CostModel(step_s=0.002, prefill_token_s=1e-4, prefill_pair_s=1e-8)
    runner = EmulatedRunner(cost, [1], clock, clock.wait)
    timed = first_speed(runner, 16, 100_000, 1024, clock)
    said = cost.first_speed(1024)
    for prompt in (2000, 20_000):
        pairs = prefill_pairs(0, prompt)
        of_profile = said.s_per_token * prompt + said.s_per_pair * pairs
        assert timed.s_per_token * prompt + timed.s_per_pair * pairs == pytest.approx(
            of_profile, rel=0.02
        )


async def test_routers_know_the_speed_before_the_first_request(redis_url, pool, tmp_path):
    model = str(write_tiny_llama(tmp_path / "model", 1))
    async with a_worker(redis_url, pool, model, kv_blocks=30, block_size=8):
        async with a_fleet(redis_url, pool) as fleet, asyncio.timeout(20):
            changed = asyncio.Event()
            fleet.room.subscribe(changed.set)
            while not (members := fleet.members()) or fleet.last_report_at is None:
                await changed.wait()
                changed.clear()
        assert members[0].load.prefill_s_per_token > 0
