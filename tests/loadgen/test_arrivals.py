import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.arrivals import ArrivalError, Arrivals, arrange, interleave, start_sessions
from loadgen.workloads import Chat, Conversation, Rag, Turn


def gaps(count=20_000, seed=1, **changes):
    return np.array(Arrivals(**changes).gaps_s(count, seed))


def test_gaps_are_exponential():
    found = gaps(request_rate=4.0)
    assert found.mean() == pytest.approx(0.25, rel=0.03)
    assert found.std() == pytest.approx(0.25, rel=0.03)
    # Kolmogorov-Smirnov distance; 1.95 / sqrt(n) is exceeded by one seed in a thousand.
    cdf = 1 - np.exp(-4.0 * np.sort(found))
    ranks = np.arange(1, len(found) + 1) / len(found)
    assert np.abs(cdf - ranks).max() < 1.95 / math.sqrt(len(found))
    # Neighbours are independent.
    assert abs(np.corrcoef(found[:-1], found[1:])[0, 1]) < 0.03


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_burstiness_is_the_shape_of_a_gamma_distribution(burstiness):
    found = gaps(request_rate=2.0, burstiness=burstiness)
    assert found.mean() == pytest.approx(0.5, rel=0.05)
    assert found.std() / found.mean() == pytest.approx(burstiness**-0.5, rel=0.05)


def test_infinite_burstiness_is_a_constant_gap():
    assert set(gaps(10, request_rate=4.0, burstiness=math.inf)) == {0.25}


def test_an_infinite_rate_sends_all_at_once():
    assert set(gaps(10, request_rate=math.inf)) == {0.0}


@pytest.mark.parametrize(("strategy", "middle"), [("linear", 5.05), ("exponential", 1.0)])
def test_a_ramp_goes_from_its_start_to_its_end(strategy, middle):
    found = gaps(
        1001,
        burstiness=math.inf,
        ramp_up_strategy=strategy,
        ramp_up_start_rps=0.1,
        ramp_up_end_rps=10.0,
    )
    assert 1 / found[[0, 500, 1000]] == pytest.approx([0.1, middle, 10.0])


def test_gaps_follow_the_seed():
    assert list(gaps(5, seed=7)) == list(gaps(5, seed=7)) != list(gaps(5, seed=8))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"request_rate": 0.0}, "request rate"),
        ({"request_rate": -1.0}, "request rate"),
        ({"request_rate": math.nan}, "request rate"),
        ({"burstiness": 0.0}, "burstiness"),
        ({"ramp_up_start_rps": 1.0}, "ramp_up_strategy"),
        ({"ramp_up_strategy": "linear"}, "ramp_up_start_rps and ramp_up_end_rps"),
        (
            {"ramp_up_strategy": "linear", "ramp_up_start_rps": 0.0, "ramp_up_end_rps": 1.0},
            "positive ramp_up_start_rps",
        ),
        ({"ramp_up_strategy": "steep"}, "linear or exponential"),
    ],
)
def test_impossible_arrivals_are_named(wrong, said):
    with pytest.raises(ArrivalError, match=said):
        Arrivals(**wrong).gaps_s(3, 0)


STEADY = Arrivals(request_rate=1.0, burstiness=math.inf)


def conversations(count, turns, think_time_s=0.0):
    return [
        Conversation(
            f"s{i}", "g", [Turn((), 1, think_time_s if turn else 0.0) for turn in range(turns)]
        )
        for i in range(count)
    ]


def test_without_think_time_the_gaps_are_the_arrivals_own():
    arranged = interleave(conversations(5, 4), STEADY, seed=0)
    assert [arrival.at_s for arrival in arranged] == [i + 1 for i in range(20)]


def test_arrivals_wait_where_no_conversation_is_due():
    arranged = interleave(conversations(1, 3, think_time_s=10.0), STEADY, seed=0)
    assert [arrival.at_s for arrival in arranged] == [1.0, 11.0, 21.0]


def test_conversations_mix_from_begin_to_end():
    arranged = interleave(conversations(50, 10), STEADY, seed=3)
    sessions = [arrival.conversation.session for arrival in arranged]
    tenths = [len(set(sessions[i : i + 50])) for i in range(0, len(sessions), 50)]
    assert min(tenths) > 20


@given(
    turns=st.lists(st.integers(1, 6), min_size=1, max_size=8),
    think_time_s=st.sampled_from([0.0, 0.3, 4.0]),
    seed=st.integers(0, 99),
    how=st.sampled_from([interleave, start_sessions]),
)
def test_every_turn_comes_once_in_order_and_after_its_think_time(turns, think_time_s, seed, how):
    given_ones = [
        conversations(1, count, think_time_s)[0]._replace(session=f"s{i}")
        for i, count in enumerate(turns)
    ]
    arranged = how(given_ones, Arrivals(), seed)
    times = [arrival.at_s for arrival in arranged]
    assert times == sorted(times)
    for conversation in given_ones:
        mine = [a for a in arranged if a.conversation.session == conversation.session]
        assert [arrival.turn for arrival in mine] == list(range(len(conversation.turns)))
        for before, after in itertools.pairwise(mine):
            assert after.at_s >= before.at_s + think_time_s - 1e-9


def test_paced_sessions_offer_the_rate_of_requests_that_was_asked_for():
    arranged = arrange(Chat(users=3000, turns=5, think_time_s=1.0), Arrivals(request_rate=8.0), 0)
    assert len(arranged) / arranged[-1].at_s == pytest.approx(8.0, rel=0.06)


def test_single_turns_arrive_by_the_process():
    arranged = arrange(Rag(num_prompts=30), STEADY, 0)
    assert [arrival.at_s for arrival in arranged] == [i + 1 for i in range(30)]
