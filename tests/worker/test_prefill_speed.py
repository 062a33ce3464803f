"""The measured prefill speed is the real one, whatever holds single steps up."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.protocol import prefill_pairs
from worker.prefill_speed import MIN_STEPS, PrefillSpeed, Speed, StepWork, fit_step_time


class Worker:
    """Steps that take as long as four numbers say, with noise and stalls."""

    def __init__(self, fixed, token, pair, decode, *, noise=0.0, stalls=0.0, seed=0):
        self.costs = fixed, token, pair, decode
        self.noise, self.stalls = noise, stalls
        self.rng = random.Random(seed)
        self.now = 1000.0
        self.measured = PrefillSpeed()

    @property
    def speed(self):
        return self.measured.speed

    def step(self, tokens, start=0, decodes=0, synced=True):
        pairs = prefill_pairs(start, start + tokens)
        fixed, token, pair, decode = self.costs
        seconds = fixed + token * tokens + pair * pairs + decode * decodes
        seconds *= self.rng.gauss(1.0, self.noise) if self.noise else 1.0
        if self.rng.random() < self.stalls:
            seconds *= self.rng.uniform(3, 20)
        began, self.now = self.now, self.now + seconds
        self.measured.observe(StepWork(tokens, pairs, decodes, synced), began, self.now)

    def work(self, steps=300):
        rng = self.rng
        for _ in range(steps):
            self.step(rng.choice([16, 100, 256, 512]), rng.randrange(16_000), rng.randrange(30))

    def prefill_s(self, tokens, start):
        """What prefilling really takes, the fixed cost of its steps left out."""
        _, token, pair, _ = self.costs
        return token * tokens + pair * prefill_pairs(start, start + tokens)

    def estimated_s(self, tokens, start):
        pairs = prefill_pairs(start, start + tokens)
        return self.speed.s_per_token * tokens + self.speed.s_per_pair * pairs


def test_nothing_is_claimed_before_it_is_known():
    worker = Worker(1e-3, 1e-4, 1e-8, 1e-4)
    for _ in range(MIN_STEPS - 1):
        worker.step(100)
        assert (worker.speed.s_per_token, worker.speed.s_per_pair) == (0.0, 0.0)
    worker.step(100)
    assert worker.speed.s_per_token > 0


def test_what_was_known_first_stands_until_there_are_steps_enough():
    first = Speed(7e-4, 3e-9)
    worker = Worker(0.0, 1e-4, 0.0, 0.0)
    worker.measured = PrefillSpeed(first)
    for _ in range(MIN_STEPS - 1):
        worker.step(100)
        assert worker.speed == first
    worker.step(100)
    assert worker.speed.s_per_token == pytest.approx(1e-4, rel=0.01)


def test_steps_without_prefill_say_nothing():
    worker = Worker(1e-3, 1e-4, 1e-8, 1e-4)
    for _ in range(100):
        worker.step(0, decodes=5)
    assert worker.speed.s_per_token == 0.0


@settings(max_examples=60, deadline=None)
@given(
    token=st.floats(1e-6, 1e-2),
    fixed_share=st.floats(0, 0.3),
    pair_share=st.floats(0.1, 3.0),
    decode_share=st.floats(0, 2),
    stalls=st.floats(0, 0.2),
    seed=st.integers(0, 10_000),
)
def test_the_speed_is_found_through_noise_and_stalls(
    token, fixed_share, pair_share, decode_share, stalls, seed
):
    """Pairs matter in proportion to `pair_share`: at 8,000 tokens of context as much as tokens."""
    worker = Worker(
        fixed_share * token * 200,
        token,
        pair_share * token / 8000,
        decode_share * token,
        noise=0.03,
        stalls=stalls,
        seed=seed,
    )
    worker.work()
    fixed, *_ = worker.costs
    for tokens, start in ((4000, 0), (512, 15_000), (16_000, 0)):
        real = worker.prefill_s(tokens, start) + fixed * tokens / 221  # the mean step's tokens
        assert worker.estimated_s(tokens, start) == pytest.approx(real, rel=0.12)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 1000), st.integers(0, 100_000), st.integers(0, 50), st.floats(1e-6, 1e3)
        ),
        min_size=1,
        max_size=60,
    )
)
def test_whatever_was_measured_no_coefficient_is_negative_or_no_number(rows):
    features = np.array([[1, tokens, pairs, decodes] for tokens, pairs, decodes, _ in rows], float)
    seconds = np.array([row[-1] for row in rows])
    found = fit_step_time(features, seconds)
    assert np.isfinite(found).all()
    assert (found >= 0).all()


def test_chunks_of_one_size_still_tell_what_a_prompt_takes():
    worker = Worker(5e-3, 1e-4, 0.0, 0.0, noise=0.02)
    for _ in range(200):
        worker.step(512)
    # 5 ms and 512 × 0.1 ms a step cannot be told apart, and need not be
    steps = 10
    assert worker.estimated_s(512 * steps, 0) == pytest.approx(steps * 0.0562, rel=0.05)


def test_a_worker_that_gets_slower_is_noticed():
    worker = Worker(1e-3, 1e-4, 1e-8, 1e-4, noise=0.02)
    worker.work()
    before = worker.estimated_s(1000, 0)
    worker.costs = tuple(3 * cost for cost in worker.costs)
    worker.work()
    assert worker.estimated_s(1000, 0) == pytest.approx(3 * before, rel=0.1)


def test_a_step_that_may_still_run_is_measured_with_the_next():
    """A device returns from chunks at once and shows their time where a token is sampled."""
    told, real = PrefillSpeed(), Worker(0.0, 1e-4, 0.0, 0.0)
    now = 0.0
    for _ in range(50):
        for _ in range(3):
            told.observe(StepWork(500, prefill_pairs(0, 500), 0, False), now, now + 1e-5)
            now += 1e-5
            real.step(500)
        took = 4 * 500 * 1e-4 - 3e-5
        told.observe(StepWork(500, prefill_pairs(0, 500), 0, True), now, now + took)
        now += took + 7.0  # idle until the next prompt
        real.step(500)
    found = told.speed
    assert found.s_per_token * 500 + found.s_per_pair * 125_000 == pytest.approx(0.05, rel=0.02)


def test_a_failed_step_is_forgotten():
    speed = PrefillSpeed()
    speed.observe(StepWork(100, 5000, 0, False), 0.0, 0.1)
    speed.interrupted()
    for number in range(20):
        speed.observe(StepWork(100, 5000, 0, True), 50.0 + number, 50.01 + number)
    found = speed.speed
    assert found.s_per_token * 100 + found.s_per_pair * 5000 == pytest.approx(0.01, rel=0.01)


def test_small_changes_are_no_news():
    worker = Worker(0.0, 1e-4, 0.0, 0.0, noise=1e-5)
    worker.work()
    first = worker.speed.s_per_token
    worker.work()
    assert worker.speed.s_per_token == first == 1e-4
