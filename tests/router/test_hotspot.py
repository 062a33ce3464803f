"""A hot prefix: without the guard its first holder drowns, with it the holders multiply."""

import random
from collections import Counter

import numpy as np

from router.policies import parse_policy
from router.policies.hotspot import covers
from tests.router.candidates import candidates
from tests.router.support import chain_of

WORKERS = 8
HOT = chain_of(range(512), block_size=16)  # a prefix of 32 blocks


class Burst:
    """A fleet whose load is not seen during the burst (as between two reports of a slow bus).

    Each worker that was sent the hot prefix holds it from then on.
    """

    def __init__(self, policy: str) -> None:
        self.policy, self.rng = parse_policy(policy), random.Random(5)
        self.holders: set[int] = set()
        self.counts: Counter[int] = Counter()
        self.number = 0

    def hot(self) -> int:
        self.number += 1
        tail = chain_of([self.number] * 32, root=HOT[-1], block_size=16)
        hit = [512 if worker in self.holders else 0 for worker in range(WORKERS)]
        chosen = self._choose(hit, [*HOT, *tail], prompt=550)
        self.holders.add(chosen)
        self.counts[chosen] += 1
        return chosen

    def cold(self) -> int:
        self.number += 1
        chain = chain_of([self.number] * 544, root=b"cold", block_size=16)
        return self._choose([0] * WORKERS, chain, prompt=550)

    def _choose(self, hit, chain, prompt):
        given = candidates(prompt=prompt, hit=hit, running=[3] * WORKERS, chain=chain)
        return self.policy.choose(given, self.rng).chosen


def test_without_the_guard_a_burst_stays_with_its_first_holder():
    burst = Burst("locality")
    for _ in range(200):
        burst.hot()
    assert len(burst.counts) == 1


def test_with_the_guard_a_burst_spreads_until_its_holders_cover_it():
    burst = Burst("locality:guard=1")
    order = [burst.hot() for _ in range(200)]
    assert len(burst.holders) == WORKERS
    # 2 |M| stubborn requests and one that leaves the holders out, for |M| = 1 … 7
    assert len(set(order[: 1 + sum(2 * held + 1 for held in range(1, WORKERS))])) == WORKERS
    late = Counter(order[100:])
    assert max(late.values()) < 2 * 100 / WORKERS


def test_the_guard_stops_where_the_holders_share_covers_the_prefixs_share():
    # the prefix makes up a third of the traffic: 3 of 8 workers cover it, 2 do not
    burst = Burst("locality:guard=1")
    for _ in range(400):
        burst.hot()
        burst.cold()
        burst.cold()
    assert len(burst.holders) == 3


def test_a_prefix_within_its_share_is_followed_always():
    burst = Burst("locality:guard=1")
    for _ in range(20):  # others first, so that the burst is no burst
        burst.cold()
    for number in range(1, 300):
        if number % 10:
            burst.cold()
        else:
            burst.hot()
    assert len(burst.holders) == 1  # a tenth of the traffic, an eighth of the workers


def test_what_the_guard_leaves_out_costs_infinity_and_is_forgotten_with_the_window():
    policy, rng = parse_policy("locality:guard=1"), random.Random(0)
    hit = [512, 0, 0, 0]
    given = candidates(prompt=550, hit=hit, running=[3] * 4, chain=HOT)
    decisions = [policy.choose(given, rng) for _ in range(3)]
    assert [decision.chosen for decision in decisions[:2]] == [0, 0]
    assert np.isinf(decisions[2].costs[0])
    assert decisions[2].chosen != 0
    cold = candidates(prompt=550, hit=[0] * 4, chain=HOT)
    for _ in range(300):
        policy.choose(cold, rng)
    assert not policy.state.counts
    assert not policy.state.stubborn
    assert len(policy.state.arrivals) == 256


def test_without_the_guard_nothing_is_remembered():
    policy, rng = parse_policy("locality"), random.Random(0)
    policy.choose(candidates(hit=[512, 0], chain=HOT), rng)
    assert not policy.state.arrivals


def test_holders_suffice_up_to_their_share_of_the_workers():
    assert covers(held=2, workers=8, mine=64, arrivals=256)
    assert not covers(held=2, workers=8, mine=65, arrivals=256)
    assert covers(held=8, workers=8, mine=256, arrivals=256)
    assert not covers(held=7, workers=8, mine=256, arrivals=256)
