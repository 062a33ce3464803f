"""Every policy's formula against cases computed by hand."""

import random
from collections import Counter

import numpy as np
import pytest
from msgspec import structs

from router.policies import parse_policy, with_room
from tests.router.candidates import candidates, choose
from tests.router.support import chain_of

INF = float("inf")

SHARED = candidates(
    hit=[0, 800], pending=[0, 600], running=[2, 4], s_per_token=[1e-3] * 2, stay_s=1.5, in_flight=3
)
SHARED_BY_TWO = structs.replace(SHARED, sharing=1)  # of four requests, this one included
SHARED_BY_THREE = structs.replace(SHARED, sharing=2)

# policy, candidates, chosen (a set where chance decides), costs
CASES = [
    # power_of_two: of two workers both are drawn
    ("power_of_two", candidates(running=[3, 1], waiting=[0, 1]), {1}, [3, 2]),
    ("power_of_two", candidates(running=[7]), {0}, [7]),
    # least_tokens: pending prefill alone, then the batch
    ("least_tokens", candidates(pending=[50, 20, 20], running=[0, 9, 8]), {2}, [50, 20, 20]),
    # prefix_only: the longest hit, however busy; equal hits by batch, then pending
    ("prefix_only", candidates(hit=[64, 960], running=[0, 99]), {1}, [936, 40]),
    (
        "prefix_only",
        candidates(hit=[64, 64, 64], running=[2, 1, 1], pending=[0, 9, 8]),
        {2},
        [936, 936, 936],
    ),
    # vllm: 4 × waiting + running
    ("vllm", candidates(running=[9, 2, 0], waiting=[0, 2, 3]), {0}, [9, 10, 12]),
    # sglang, balanced (70 − 6 = 64 is not more than 64): best match of 320/1000 > 0.3
    ("sglang", candidates(hit=[0, 320], running=[6, 70]), {1}, [1000, 680]),
    # 71 − 6 = 65 > 64 and 71 > 1.5 × 6: load decides
    ("sglang", candidates(hit=[0, 320], running=[6, 71]), {0}, [6, 71]),
    # 265 − 200 = 65 > 64, but 265 ≤ 1.5 × 200: the match decides
    ("sglang", candidates(hit=[0, 320], running=[200, 265]), {1}, [1000, 680]),
    # a share of exactly 0.3 is not more than 0.3: least load
    ("sglang", candidates(hit=[0, 300], running=[1, 2]), {0}, [1, 2]),
    ("sglang:cache_threshold=0.2", candidates(hit=[0, 300], running=[1, 2]), {1}, [1000, 700]),
    ("sglang:balance_abs_threshold=4", candidates(hit=[0, 320], running=[1, 6]), {0}, [1, 6]),
    # dynamo: max(0, pending + 320 − hit)/16 + (100 − free)
    (
        "dynamo",
        candidates(prompt=320, hit=[0, 160], pending=[160, 160], free=[95, 80]),
        {0},
        [30 + 5, 20 + 20],
    ),
    (
        "dynamo:overlap_weight=2",
        candidates(prompt=320, hit=[0, 160], pending=[160, 160], free=[95, 80]),
        {1},
        [60 + 5, 40 + 20],
    ),
    # half the hit counts: (320 − 160 × 0.5)/16 = 15; never less than nothing
    (
        "dynamo:credit=0.5",
        candidates(prompt=320, hit=[0, 160], free=[100, 94]),
        {0},
        [20, 15 + 6],
    ),
    ("dynamo:credit=3", candidates(prompt=320, hit=[0, 160], free=[100, 99]), {1}, [20, 1]),
    ("dynamo", candidates(prompt=320, hit=[160, 160], running=[5, 0]), {0, 1}, [10, 10]),
    # llmd: 7 − 3 × matched/62 − 2 × (max − waiting)/(max − min) − 2 × free/100
    (
        "llmd",
        candidates(hit=[0, 496], waiting=[0, 4], free=[100, 50]),
        {0},
        [7 - 0 - 2 - 2, 7 - 1.5 - 0 - 1],
    ),
    (
        "llmd",
        candidates(hit=[0, 496, 992], waiting=[2, 3, 4], free=[0, 50, 50]),
        {2},
        [7 - 0 - 2 - 0, 7 - 1.5 - 1 - 1, 7 - 3 - 0 - 1],
    ),
    ("llmd:queue_weight=0", candidates(hit=[0, 496], waiting=[0, 9]), {1}, [3, 1.5]),
    # equal queues all score 1
    ("llmd", candidates(hit=[496, 496], waiting=[3, 3]), {0, 1}, [1.5, 1.5]),
    # aibrix: 9 − 0 = 9 > 8: load decides
    ("aibrix", candidates(hit=[0, 960], running=[0, 9]), {0}, [0, 9]),
    # mean 3, deviation √(62/4) = 3.94: 8 is over 6.94; the best of the others is the third
    (
        "aibrix",
        candidates(hit=[0, 0, 480, 960], running=[0, 1, 3, 8]),
        {2},
        [1000, 1000, 520, INF],
    ),
    # all equal: nobody is over the mean
    ("aibrix", candidates(hit=[0, 160], running=[4, 4]), {1}, [1000, 840]),
    ("aibrix:imbalance=2", candidates(hit=[0, 960], running=[0, 3]), {0}, [0, 3]),
    # additive: pending × batch − hit
    (
        "additive",
        candidates(hit=[0, 960, 960], pending=[0, 100, 500], running=[5, 9, 2]),
        {1},
        [0, 900 - 960, 1000 - 960],
    ),
    # with no speed measured ttft counts tokens, and marginal is locality
    ("ttft", candidates(hit=[0, 960], pending=[100, 980], running=[9, 0]), {1}, [1100, 1020]),
    # (100 + 1000) × 1, (980 + 40) × 5, (50 + 40) × 10; a stay in seconds changes nothing
    (
        "marginal",
        candidates(hit=[0, 960, 960], pending=[100, 980, 50], running=[0, 4, 9], stay_s=4),
        {2},
        [1100, 5100, 900],
    ),
    # in seconds: b = 1 ms and 2 ms a token, e = 1 µs a pair. New: 1000 with 500,000 pairs, and
    # 200 with (1000² − 800²)/2 = 180,000
    (
        "ttft",
        candidates(
            hit=[0, 800],
            pending=[100, 600],
            pending_pairs=[5000, 0],
            s_per_token=[1e-3, 2e-3],
            s_per_pair=[1e-6, 1e-6],
        ),
        {0},
        [0.1 + 0.005 + 1.0 + 0.5, 1.2 + 0.4 + 0.18],
    ),
    (
        "marginal",
        candidates(
            hit=[0, 800],
            pending=[100, 600],
            pending_pairs=[5000, 0],
            running=[1, 1],
            s_per_token=[1e-3, 2e-3],
            s_per_pair=[1e-6, 1e-6],
        ),
        {1},
        [0.105 + 2 * 1.5, 1.2 + 2 * 0.58],
    ),
    # requests stay 1.5 s, three are at each worker: 2 arrivals a second each. With 1 s and 0.2 s of
    # own prefill each second of the queue is waited by 3 and 1.4. The mean wait is 0.9 s: the queue
    # weighs 1.5 / 0.9 more
    (
        "marginal",
        candidates(
            hit=[0, 800], pending=[0, 600], running=[2, 4], s_per_token=[1e-3] * 2, stay_s=1.5
        ),
        {1},
        [1 * (3 + 2), 0.6 * 1.4 * 8 / 3 + 0.2 * (1.4 + 4)],
    ),
    # the hit saves ten others 0.8 s each, but it waits 6 s for it, and the mean wait is 3.6 s
    (
        "marginal",
        candidates(
            hit=[0, 800], pending=[0, 6000], running=[10, 10], s_per_token=[1e-3] * 2, stay_s=5
        ),
        {0},
        [1 * (3 + 10), 6 * 1.4 * (1 + 5 / 3.6) + 0.2 * (1.4 + 10)],
    ),
    # two of four requests, this one included, share what one worker of two holds: it suffices, and
    # the own prefill counts as a first token; the same with three of four
    (
        "marginal",
        structs.replace(SHARED, sharing=1),
        {1},
        [1 * 3 * 8 / 3 + 2, 0.8 * 1.4 * 8 / 3 + 0.2 * 4],
    ),
    (
        "marginal",
        structs.replace(SHARED, sharing=2),
        {1},
        [3 + 2, 0.6 * 1.4 * 8 / 3 + 0.2 * (1.4 + 4)],
    ),
    # before it is known how long requests stay, the queue weighs as much as anything
    (
        "marginal",
        candidates(hit=[0, 800], pending=[0, 6000], running=[10, 10], s_per_token=[1e-3] * 2),
        {1},
        [1 + 10, 6.2 + 2],
    ),
    # idle workers: nobody is held up
    (
        "marginal",
        candidates(hit=[0, 800], pending=[0, 0], s_per_token=[1e-3] * 2, stay_s=1.2),
        {1},
        [1, 0.2],
    ),
    # equal costs: the smaller batch
    (
        "marginal",
        candidates(hit=[0, 0], pending=[2000, 0], running=[0, 2], s_per_token=[1e-3] * 2),
        {0},
        [3, 3],
    ),
    # whoever has not measured counts as the median of the others: b = 2 ms, e = 0
    (
        "ttft",
        candidates(hit=[0, 0, 0, 900], s_per_token=[1e-3, 2e-3, 3e-3, 0], s_per_pair=[0, 0, 0, 9]),
        {3},
        [1.0, 2.0, 3.0, 0.2],
    ),
    ("ttft", candidates(hit=[0, 900], s_per_token=[0, 0], s_per_pair=[0, 0]), {1}, [1000, 100]),
]


@pytest.mark.parametrize(("policy", "given", "chosen", "costs"), CASES)
def test_formula(policy, given, chosen, costs):
    assert choose(policy, given).costs.tolist() == pytest.approx(costs)
    assert {choose(policy, given, seed).chosen for seed in range(40)} == chosen


def test_random_gives_everyone_an_equal_share_whatever_they_hold():
    policy, rng = parse_policy("random"), random.Random(3)
    given = candidates(hit=[960, 0, 0, 0], running=[0, 9, 9, 9])
    counts = Counter(policy.choose(given, rng).chosen for _ in range(4000))
    assert set(counts) == {0, 1, 2, 3}
    assert max(counts.values()) < 1.2 * min(counts.values())


def test_power_of_two_draws_two_and_the_busiest_never_wins():
    policy, rng = parse_policy("power_of_two"), random.Random(3)
    given = candidates(running=[0, 1, 2, 3])
    counts = Counter()
    for _ in range(3000):
        decision = policy.choose(given, rng)
        assert np.isfinite(decision.costs).sum() == 2
        counts[decision.chosen] += 1
    assert 3 not in counts
    # of the six pairs, three have the idlest, two the next, one the third
    assert [round(counts[entry] / 500) for entry in range(3)] == [3, 2, 1]


def test_dynamo_with_a_temperature_draws_from_the_softmax():
    policy, rng = parse_policy("dynamo:temperature=0.5"), random.Random(3)
    given = candidates(prompt=320, hit=[320, 160, 0], free=[100, 100, 100])
    counts = Counter(policy.choose(given, rng).chosen for _ in range(20000))
    # costs 0, 10, 20: weights e⁰, e⁻¹, e⁻²
    weights = np.exp([0.0, -1.0, -2.0])
    shares = [counts[entry] / 20000 for entry in range(3)]
    assert shares == pytest.approx((weights / weights.sum()).tolist(), abs=0.01)
    even = candidates(prompt=320, hit=[0, 0])
    assert {policy.choose(even, rng).chosen for _ in range(40)} == {0, 1}


CHAINS = [chain_of([number] * 32, block_size=16) for number in range(400)]
KEYS = [random.Random(number).getrandbits(63) for number in range(10)]


def home(chain, keys, slots=None, batch=None):
    given = candidates(
        prompt=40,
        running=batch or [0] * len(keys),
        slots=slots,
        worker_keys=keys,
        chain=chain,
    )
    return keys[choose("consistent_hash:prefix_tokens=32", given).chosen]


def test_consistent_hash_sends_a_prefix_to_the_same_worker_at_every_gateway():
    for chain in CHAINS[:50]:
        assert home(chain, KEYS) == home(chain, KEYS[::-1], slots=list(range(5, 15)))
    shares = Counter(home(chain, KEYS) for chain in CHAINS)
    assert len(shares) == 10
    assert max(shares.values()) < 2 * 40


def test_consistent_hash_moves_only_what_a_lost_worker_had():
    before = {i: home(chain, KEYS) for i, chain in enumerate(CHAINS)}
    after = {i: home(chain, KEYS[1:]) for i, chain in enumerate(CHAINS)}
    assert {i for i in before if before[i] != after[i]} == {
        i for i in before if before[i] == KEYS[0]
    }


def test_consistent_hash_looks_at_the_beginning_only():
    one = [*CHAINS[0], b"x" * 16]
    other = [*CHAINS[0], b"y" * 16]
    assert home(one, KEYS) == home(other, KEYS)


def test_consistent_hash_passes_over_whoever_has_more_than_its_bounded_share():
    first = KEYS.index(home(CHAINS[0], KEYS))
    # 99 requests + this one: at most 1.25 × 100 / 10 = 12.5, rounded up, each
    batch = [0] * 10
    batch[first] = 12
    batch[(first + 1) % 10] = 87
    assert home(CHAINS[0], KEYS, batch=batch) == KEYS[first]
    batch[first], batch[(first + 1) % 10] = 13, 86
    assert home(CHAINS[0], KEYS, batch=batch) != KEYS[first]


def test_consistent_hash_keeps_every_worker_within_its_bound():
    policy, rng, batch = parse_policy("consistent_hash"), random.Random(0), [0] * 10
    for number in range(200):  # one hot prefix
        given = candidates(prompt=40, running=batch, worker_keys=KEYS, chain=CHAINS[7])
        batch[policy.choose(given, rng).chosen] += 1
        assert max(batch) <= -(-1.25 * (number + 1) // 10)


def test_consistent_hash_without_a_full_block_takes_the_least_requests():
    given = candidates(prompt=10, running=[2, 1, 3])
    assert choose("consistent_hash", given).chosen == 1


def test_a_worker_has_room_for_the_blocks_that_it_lacks():
    # 100 tokens are 7 blocks; with 48 of them cached, 52 tokens are 4
    given = candidates(prompt=100, hit=[0, 0, 48, 48], running=[1] * 4, free=[7, 6, 4, 3])
    assert with_room(given).tolist() == [True, False, True, False]
    booked = candidates(
        prompt=100, running=[1] * 3, free=[9, 9, 9], room_blocks=[9, 7, 6], capacity=9
    )
    assert with_room(booked).tolist() == [True, True, False]


def test_an_idle_worker_always_has_room():
    given = candidates(prompt=100, running=[0, 1], free=[0, 0], capacity=4)
    assert with_room(given).tolist() == [True, False]


def test_where_all_have_room_nothing_is_narrowed():
    assert with_room(candidates(prompt=100, running=[9, 9], free=[7, 8])) is None
    assert with_room(candidates(prompt=100, hit=[48, 96], running=[9, 9], free=[4, 1])) is None


def test_candidates_can_be_narrowed():
    given = candidates(
        hit=[0, 16, 32], running=[1, 2, 3], s_per_token=[1, 2, 3], chain=CHAINS[0], free=[7, 8, 9]
    )
    kept = given.only(np.array([True, False, True]))
    assert kept.columns.slots.tolist() == [0, 2]
    assert kept.hit_tokens.tolist() == [0, 32]
    assert kept.columns.free_blocks.tolist() == [7, 9]
    assert kept.columns.s_per_token.tolist() == [1, 3]
    assert (kept.chain, kept.best_hit_tokens, kept.prompt_tokens) == (CHAINS[0], 32, 1000)
