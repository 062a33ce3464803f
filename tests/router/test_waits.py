"""The limit on expected waits: `max_wait_s`, or what is usual; turns of those that come back."""

import heapq
import math
import random

import pytest

from router.waits import (
    CALM_S,
    LEAST_REQUESTS,
    LEAST_STARTS,
    LONGEST_RETRY_S,
    SLACK,
    USUAL_S,
    UsualWaits,
    WaitLimit,
)


def noted(waits, start=0.0):
    usual = UsualWaits()
    for number, wait_s in enumerate(waits):
        usual.note(start + number * 0.01, wait_s)
    return usual


def test_the_usual_wait_is_unknown_until_enough_had_to_wait_and_were_calm():
    usual = noted([1.0] * LEAST_REQUESTS)
    assert usual.p99_s(1.0) is None  # something may still be refused
    assert usual.p99_s(CALM_S + 1.0) == 1.0
    assert noted([1.0] * (LEAST_REQUESTS - 1)).p99_s(CALM_S + 1.0) is None


def test_it_is_the_99th_percentile():
    assert noted([n / 100 for n in range(200)]).p99_s(CALM_S + 5.0) == 1.98


def test_waits_shortly_before_a_refusal_are_not_usual():
    usual = noted([1.0] * 50)
    usual.p99_s(CALM_S + 1.0)
    for number in range(100):
        usual.note(CALM_S + 2.0 + number * 0.01, 9.0)
    usual.refused()
    assert usual.p99_s(2 * CALM_S + 5.0) == 1.0


def test_old_waits_are_forgotten():
    usual = noted([1.0] * 50)
    assert usual.p99_s(CALM_S + 1.0) == 1.0
    assert usual.p99_s(USUAL_S + 1.0) is None


def test_without_a_usual_wait_the_limit_is_the_setting():
    assert WaitLimit(30.0).allowed_s(5.0, 0.1) == 30.0
    assert WaitLimit(0.0).allowed_s(5.0, 0.1) == math.inf


@pytest.mark.parametrize(
    ("usual_s", "interval_s", "allowed_s"),
    [
        (2.0, 0.01, SLACK * 2.0),
        (0.001, 0.1, LEAST_STARTS * 0.1),
        (29.0, 0.1, 30.0),
        (1.0, 10.0, 30.0),
    ],
)
def test_with_one_it_is_somewhat_more_than_usual(usual_s, interval_s, allowed_s):
    limit = WaitLimit(30.0)
    for number in range(100):
        limit.admitted(number * 0.01, usual_s)
    assert limit.allowed_s(CALM_S + 2.0, interval_s) == pytest.approx(allowed_s)


def test_refused_requests_get_turns_at_the_rate_of_starts():
    limit = WaitLimit(30.0)
    assert [limit.refuse(100.0, 1.0, 0.5) for _ in range(5)] == [1, 2, 2, 3, 3]
    assert [limit.refuse(100.0, 1.0, 0.5) for _ in range(300)][-1] == LONGEST_RETRY_S
    assert limit.refuse(1000.0, 0.2, 0.5) == 1  # turns that nobody took are over
    assert limit.refuse(1000.0, 7.5, 0.5) == 8


def model(load, seconds, rng, limit, begin, state, starters=8, mean_s=2.4):
    """Requests of a queue with `starters` places: waits of the admitted, and number refused."""
    free, starts = state
    now, waits, refused = begin, [], 0
    while (now := now + rng.expovariate(load * starters / mean_s)) < begin + seconds:
        while starts and starts[0] <= now:
            heapq.heappop(starts)
        expected_s = len(starts) * mean_s / starters
        if expected_s > limit.allowed_s(now, mean_s / starters):
            limit.refuse(now, 0.0, mean_s / starters)
            refused += 1
            continue
        if expected_s:
            limit.admitted(now, expected_s)
        start = max(now, heapq.heappop(free))
        heapq.heappush(free, start + rng.uniform(0.5, 1.5) * mean_s)
        heapq.heappush(starts, start)
        waits.append(start - now)
    return waits, refused


def p99(values):
    return sorted(values)[int(0.99 * len(values))]


@pytest.mark.parametrize("times", [3.0, 10.0])
def test_under_overload_requests_wait_about_as_long_as_usual_and_few_are_refused_before(times):
    """Of a model of a queue: what an overload makes of the waits, and of the load before it."""
    ratios, shares = [], []
    for seed in range(20):
        rng, limit, state = random.Random(seed), WaitLimit(30.0), ([0.0] * 8, [])
        usual, early = model(0.9, 300.0, rng, limit, 0.0, state)
        over, refused = model(times, 90.0, rng, limit, 300.0, state)
        ratios.append(p99(over) / p99(usual))
        shares.append(early / (early + len(usual)))
        assert refused > len(over)
    assert sorted(ratios)[10] < 2.0
    assert sum(shares) / 20 < 0.01
