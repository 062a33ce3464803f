import itertools
import math

import numpy as np
import pytest

from loadgen.arrivals import ArrivalError, interleave, poisson_gaps_s
from loadgen.workloads import Conversation


def test_gaps_are_exponential():
    gaps = np.array(list(itertools.islice(poisson_gaps_s(4.0, seed=1), 20_000)))
    assert gaps.mean() == pytest.approx(0.25, rel=0.03)
    assert gaps.std() == pytest.approx(0.25, rel=0.03)
    # Kolmogorov-Smirnov distance; 1.95 / sqrt(n) is exceeded by one seed in a thousand.
    cdf = 1 - np.exp(-4.0 * np.sort(gaps))
    ranks = np.arange(1, len(gaps) + 1) / len(gaps)
    assert np.abs(cdf - ranks).max() < 1.95 / math.sqrt(len(gaps))
    # Neighbours are independent.
    assert abs(np.corrcoef(gaps[:-1], gaps[1:])[0, 1]) < 0.03


def test_gaps_follow_the_seed():
    def first(seed):
        return list(itertools.islice(poisson_gaps_s(1.0, seed), 5))

    assert first(7) == first(7) != first(8)


@pytest.mark.parametrize("rate", [0.0, -1.0, math.inf, math.nan])
def test_a_rate_must_be_positive_and_finite(rate):
    with pytest.raises(ArrivalError, match="request rate"):
        next(poisson_gaps_s(rate, 0))


def conversations(count, turns):
    return [Conversation(f"s{i}", "g", [b"{}"] * turns) for i in range(count)]


def test_without_think_time_the_gaps_are_the_arrivals_own():
    requests = interleave(conversations(5, 4), itertools.repeat(0.5), 0.0, seed=0)
    assert [r.intended_at_s for r in requests] == [0.5 * (i + 1) for i in range(20)]


def test_arrivals_wait_where_no_conversation_is_due():
    requests = interleave(conversations(1, 3), itertools.repeat(1.0), 10.0, seed=0)
    assert [r.intended_at_s for r in requests] == [1.0, 11.0, 21.0]


def test_conversations_mix_from_begin_to_end():
    requests = interleave(conversations(50, 10), itertools.repeat(1.0), 0.0, seed=3)
    tenths = [len({r.session for r in requests[i : i + 50]}) for i in range(0, len(requests), 50)]
    assert min(tenths) > 20
