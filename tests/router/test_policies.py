"""Policies choose what a person with pencil and paper would choose."""

import random
from collections import Counter

import pytest

from router.policies import PolicyError, available, parse_policy
from tests.router.candidates import candidates, choose


@pytest.mark.parametrize(
    ("given", "chosen", "costs"),
    [
        # (pending + new) × (batch + 1)
        pytest.param(
            candidates(hit=[0, 960], running=[0, 3]), 1, [1000, 40 * 4], id="a hit beats idleness"
        ),
        pytest.param(
            candidates(hit=[0, 960], running=[0, 30]),
            0,
            [1000, 40 * 31],
            id="unless its worker is too busy",
        ),
        pytest.param(
            candidates(hit=[480, 960], pending=[0, 600]),
            0,
            [520, 640],
            id="pending prefill weighs like new tokens",
        ),
        pytest.param(
            candidates(running=[1, 0], waiting=[0, 2]),
            0,
            [1000 * 2, 1000 * 3],
            id="waiting requests are part of the batch",
        ),
        pytest.param(
            candidates(prompt=16, hit=[16, 0], running=[0, 0]),
            0,
            [1, 16],
            id="at least one token is always new",
        ),
        pytest.param(
            # 995 × 3 = 2985 and 998 × 3 = 2994 are within 1 %
            candidates(hit=[5, 2, 0], running=[2, 1, 3], waiting=[0, 1, 0], pending=[0, 0, 0]),
            None,
            [2985, 2994, 4000],
            id="a near-tie of equal load is left to chance",
        ),
        pytest.param(
            # 2985 against 1494 × 2 = 2988: within 1 %, and the second has the smaller batch
            candidates(hit=[5, 0], running=[2, 1], pending=[0, 494]),
            1,
            [2985, 2988],
            id="a near-tie goes to the lower load",
        ),
    ],
)
def test_locality(given, chosen, costs):
    decision = choose("locality", given)
    assert decision.costs.tolist() == costs
    if chosen is not None:
        assert decision.chosen == chosen
    else:
        assert {choose("locality", given, seed).chosen for seed in range(40)} == {0, 1}


def test_locality_without_a_tie_share_takes_the_least_exactly():
    given = candidates(hit=[5, 0], running=[2, 1], pending=[0, 494])
    assert choose("locality:tie=0", given).chosen == 0


@pytest.mark.parametrize("policy", ["locality", "least_requests"])
def test_workers_of_equal_load_get_equal_shares(policy):
    given = candidates(running=[0] * 8)
    rng, chosen = random.Random(1), parse_policy(policy)
    counts = Counter(chosen.choose(given, rng).chosen for _ in range(4000))
    assert set(counts) == set(range(8))
    assert max(counts.values()) < 1.3 * min(counts.values())


def test_least_requests_counts_running_and_waiting_and_then_pending_tokens():
    decision = choose(
        "least_requests",
        candidates(hit=[999, 0, 0], running=[2, 1, 0], waiting=[0, 0, 1], pending=[0, 9, 8]),
    )
    assert decision.chosen == 2
    assert decision.costs.tolist() == [2, 1, 1]


def test_round_robin_takes_turns_by_slot_when_workers_come_and_go():
    policy, rng = parse_policy("round_robin"), random.Random(0)

    def turn(slots):
        return slots[policy.choose(candidates(slots=slots), rng).chosen]

    assert [turn([0, 1, 2]) for _ in range(4)] == [0, 1, 2, 0]
    assert turn([0, 2, 5]) == 2  # 1 has gone
    assert turn([0, 2, 5]) == 5
    assert turn([0, 2]) == 0
    assert turn([2]) == 2
    assert turn([0, 1]) == 0
    decision = policy.choose(candidates(slots=[0, 1, 2]), rng)
    assert decision.costs.tolist() == [2, 0, 1]


def test_each_policy_made_has_its_own_state():
    first, second = parse_policy("round_robin"), parse_policy("round_robin")
    rng, given = random.Random(0), candidates(slots=[0, 1])
    assert [first.choose(given, rng).chosen for _ in range(2)] == [0, 1]
    assert second.choose(given, rng).chosen == 0


def test_the_same_chance_gives_the_same_choice():
    given = candidates(running=[0] * 50)
    assert choose("locality", given, 7).chosen == choose("locality", given, 7).chosen


def test_no_candidate_is_an_error():
    with pytest.raises(ValueError, match="at least one"):
        choose("locality", candidates(slots=[]))


def test_names_and_parameters():
    assert set(available()) == {
        *("round_robin", "random", "least_requests", "power_of_two", "least_tokens", "vllm"),
        *("prefix_only", "consistent_hash", "sglang", "dynamo", "llmd", "aibrix"),
        *("additive", "ttft", "locality", "marginal"),
    }
    for name in available():
        assert parse_policy(name).name == name
    assert parse_policy(" locality: tie = 0.05 ").name == "locality:tie=0.05"
    assert parse_policy("locality:tie=0.05").parameters.tie == 0.05
    assert parse_policy("locality:guard=1").parameters.guard is True
    assert parse_policy("dynamo:overlap_weight=2.5").parameters.overlap_weight == 2.5


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "fastest",
            "there is no policy 'fastest': use one of round_robin, random, least_requests",
        ),
        ("", "there is no policy ''"),
        ("locality:tie", "'tie' is not of the form parameter=value"),
        ("locality:tie=1,tie=2", "given twice"),
        ("locality:weight=2", "has no parameter 'weight'; it has tie, guard"),
        ("round_robin:step=2", "has no parameter 'step'; it has none"),
        ("locality:tie=much", "tie"),
        ("locality:tie=-1", "tie"),
        ("locality:guard=perhaps", "guard"),
        ("consistent_hash:bound=0.9", "bound"),
        ("dynamo:temperature=-1", "temperature"),
    ],
)
def test_a_policy_that_cannot_be_had_is_explained(text, message):
    with pytest.raises(PolicyError, match=message):
        parse_policy(text)
