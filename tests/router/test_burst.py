"""A burst of one new prefix gathers where that is cheaper, though no worker has announced it."""

import random

import pytest

from cluster.blocks import hash_blocks, pack_tokens
from cluster.protocol import Load
from router.dispatch import Dispatcher
from router.fleet import Fleet
from router.metrics import Metrics
from router.policies import parse_policy
from router.tokenization import Prompt
from tests.router.support import BLOCK_SIZE, NAMESPACE, FakeStatus, card, report

PREFIX = list(range(1, 513))


def prompt(number, prefix=PREFIX):
    packed = pack_tokens([*prefix, *[1000 + number] * 32])
    return Prompt(packed, hash_blocks(b"root", packed, BLOCK_SIZE), NAMESPACE)


class Pool:
    def __init__(self, policy, workers=4):
        self.fleet = Fleet(clock=lambda: 0.0)
        for number in range(workers):
            self.fleet.on_card(card(f"w{number}", capacity_blocks=10_000, context_tokens=5000))
            self.load(f"w{number}", running=4)
        metrics = Metrics(self.fleet, FakeStatus)
        self.dispatcher = Dispatcher(self.fleet, parse_policy(policy), metrics, random.Random(3))
        self.sent = 0

    def load(self, worker, **load):
        received = load.pop("received", [])
        self.fleet.on_report(report(worker, load=Load(free_blocks=9000, **load), received=received))

    def send(self, asked):
        self.sent += 1
        return self.dispatcher.place("tiny", asked, f"r{self.sent}")


def test_marginal_gathers_a_burst_where_computing_the_prefix_again_holds_up_many():
    # 0.54 s of prefill anywhere, which hold up forty requests; 0.03 s where the first went
    pool = Pool("marginal")
    for number in range(4):
        pool.load(f"w{number}", running=40, prefill_s_per_token=1e-3)
    placements = [pool.send(prompt(number)) for number in range(6)]
    assert len({placement.worker for placement in placements}) == 1
    assert [placement.predicted_hit_tokens for placement in placements] == [0, *[512] * 5]


def test_marginal_stops_gathering_when_the_wait_outgrows_the_saving():
    pool = Pool("marginal")
    placements = [pool.send(prompt(number)) for number in range(100)]
    assert {placement.worker for placement in placements} == {"w0", "w1", "w2", "w3"}
    # by far most find the prefix
    assert sum(placement.predicted_hit_tokens == 0 for placement in placements) == 4


@pytest.mark.parametrize("policy", ["locality", "marginal"])
def test_a_prefix_that_is_computed_but_not_announced_is_a_hit(policy):
    pool = Pool(policy)
    first = pool.send(prompt(0))
    pool.load(first.worker, running=5, received=["r1"])  # nothing pending, nothing stored yet
    for number in range(1, 3):
        placement = pool.send(prompt(number))
        assert placement.worker == first.worker
        pool.load(first.worker, running=5 + number, received=[f"r{number + 1}"])


@pytest.mark.parametrize("policy", ["locality", "marginal"])
def test_different_prefixes_spread(policy):
    pool = Pool(policy)
    placements = [pool.send(prompt(0, [500 * n + t for t in range(512)])) for n in range(4)]
    assert {placement.worker for placement in placements} == {"w0", "w1", "w2", "w3"}


def test_a_request_that_failed_leaves_nothing_to_gather_at():
    pool = Pool("marginal")
    first = pool.send(prompt(0))
    pool.fleet.release(first.booking)
    assert pool.send(prompt(1)).predicted_hit_tokens == 0


def test_unequal_workers_share_by_their_measured_speed():
    """Two workers, one three times as quick: it gets three times the tokens."""
    pool = Pool("marginal", workers=2)
    for worker, s_per_token in (("w0", 1e-4), ("w1", 3e-4)):
        pool.load(worker, prefill_s_per_token=s_per_token)
    counts = {"w0": 0, "w1": 0}
    for number in range(40):
        asked = prompt(0, [500 * number + t for t in range(512)])
        counts[pool.send(asked).worker] += 1
    assert 2.0 <= counts["w0"] / counts["w1"] <= 4.0
