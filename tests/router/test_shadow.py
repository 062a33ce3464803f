"""Shadow policies: their own caches, their own load, and no influence on what happens."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.blocks import hash_blocks
from cluster.protocol import HEADER_WORKER, Load
from router import shadow
from router.fleet import Fleet
from router.policies import PolicyError, parse_policy
from router.shadow import Shadows, parse_shadows
from tests.router.support import BLOCK_SIZE, NAMESPACE, Rig, card, chain_of, report

PROMPT = 41
CHAINS = [chain_of(range(start, start + PROMPT)) for start in (0, 1000, 2000)]


class Traffic:
    """A fleet with some workers, and requests whose live choice the test makes."""

    def __init__(self, *policies: str, workers: int = 2, **fields) -> None:
        self.fleet = Fleet()
        for number in range(workers):
            self.fleet.on_card(card(f"w{number}", **fields))
        rng = random.Random(1)
        self.shadows = Shadows([parse_policy(name) for name in policies], rng)
        self.number = 0

    def send(self, chain, chosen: int, prompt: int = PROMPT, end: bool = True) -> str:
        self.number += 1
        request_id = f"r{self.number}"
        found = self.fleet.candidates("tiny", chain, prompt)
        self.shadows.observe(self.fleet, request_id, chain, found, chosen)
        if end:
            self.shadows.began(request_id)
            self.shadows.ended(request_id)
        for arm in self.shadows.arms:
            arm.check()
        return request_id

    def view(self, policy: str):
        return next(view for view in self.shadows.views() if view.policy == policy)


def test_each_arm_finds_what_its_own_choices_would_have_cached():
    traffic = Traffic("round_robin", "locality")
    for _ in range(3):
        traffic.send(CHAINS[0], chosen=0)
    live, turns = traffic.view("live"), traffic.view("round_robin")
    assert (live.requests, live.prompt_tokens, live.agreed) == (3, 3 * PROMPT, 3)
    assert live.hit_tokens == 2 * 40
    assert live.computed_tokens == {"w0": 41 + 1 + 1, "w1": 0}
    assert live.imbalance == 2.0
    # w0, w1, w0: only the third finds its prefix
    assert (turns.hit_tokens, turns.agreed) == (40, 2)
    assert turns.computed_tokens == {"w0": 42, "w1": 41}
    assert turns.requests_to == {"w0": 2, "w1": 1}
    assert turns.imbalance == pytest.approx(42 / 41.5)
    assert traffic.view("locality").hit_tokens == 2 * 40


def test_what_workers_really_hold_does_not_help_a_shadow():
    traffic = Traffic("round_robin")
    traffic.fleet.on_report(report("w0", stored=CHAINS[0], load=Load(cached_blocks=10)))
    traffic.send(CHAINS[0], chosen=0)
    assert traffic.view("live").hit_tokens == traffic.view("round_robin").hit_tokens == 0


def test_an_arm_balances_by_its_own_load():
    traffic = Traffic("least_requests", workers=3)
    requests = [traffic.send(chain, chosen=0, end=False) for chain in CHAINS]
    assert traffic.view("least_requests").requests_to == {"w0": 1, "w1": 1, "w2": 1}
    assert traffic.view("live").requests_to == {"w0": 3}
    for request_id in requests:
        traffic.shadows.began(request_id)
        traffic.shadows.ended(request_id)
        traffic.shadows.ended(request_id)
    for arm in traffic.shadows.arms:
        assert not arm._at
        assert not any(ghost.unfinished for ghost in arm._ghosts.values())


def test_pictures_are_as_small_as_the_workers_caches():
    """10 blocks a prompt, room for 15: the third prompt finds the first one gone."""
    traffic = Traffic("round_robin", workers=1, capacity_blocks=15)
    for chain in (CHAINS[0], CHAINS[1], CHAINS[0]):
        traffic.send(chain, chosen=0)
    # of the first prompt the 5 blocks nearest to its root were left
    assert traffic.view("live").hit_tokens == 5 * 4
    (ghost,) = traffic.shadows.arms[0]._ghosts.values()
    assert len(ghost.cached) == 15


def test_a_bound_on_memory_makes_pictures_smaller(monkeypatch):
    monkeypatch.setattr(shadow, "MAX_BLOCKS", 8)
    traffic = Traffic("round_robin", workers=2)
    traffic.send(CHAINS[0], chosen=0)
    traffic.send(CHAINS[0], chosen=0)
    assert traffic.view("live").hit_tokens == 4 * 4


def test_a_new_epoch_begins_with_an_empty_picture():
    traffic = Traffic("round_robin", workers=1)
    traffic.send(CHAINS[0], chosen=0)
    traffic.fleet.on_card(card("w0", epoch=2))
    traffic.send(CHAINS[0], chosen=0)
    assert traffic.view("live").hit_tokens == 0
    open_one = traffic.send(CHAINS[0], chosen=0, end=False)
    traffic.fleet.on_gone("w0", "left")
    traffic.fleet.on_card(card("other"))
    traffic.send(CHAINS[0], chosen=0)
    assert traffic.view("live").hit_tokens == 40
    traffic.shadows.ended(open_one)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(1, 10), st.booleans()),
        max_size=40,
    ),
    st.integers(1, 25),
)
def test_pictures_stay_prefix_closed_and_equal_to_their_index(requests, capacity):
    traffic = Traffic("least_requests", workers=3, capacity_blocks=capacity)
    for which, chosen, blocks, end in requests:
        traffic.send(CHAINS[which][:blocks], chosen, prompt=4 * blocks + 1, end=end)
        for arm in traffic.shadows.arms:
            for ghost in arm._ghosts.values():
                assert len(ghost.cached) <= capacity
                for chain in CHAINS:
                    held = [block in ghost.cached for block in chain]
                    assert held == sorted(held, reverse=True)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", []),
        ("round_robin", ["round_robin"]),
        (" round_robin , locality:tie=0.1 ", ["round_robin", "locality:tie=0.1"]),
        ("locality:tie=0.1,round_robin,", ["locality:tie=0.1", "round_robin"]),
    ],
)
def test_shadow_policies_are_read_from_one_setting(text, names):
    assert [policy.name for policy in parse_shadows(text)] == names


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("best", "there is no policy 'best'"),
        ("locality,locality", "named twice"),
        ("locality:tie=0.1,more=2", "no parameter 'more'"),
    ],
)
def test_shadow_policies_that_cannot_be_had_are_refused(text, words):
    with pytest.raises(PolicyError, match=words):
        parse_shadows(text)


async def test_a_gateway_reports_its_shadows_and_sends_nothing_by_them():
    async with Rig(workers=2, policy="locality", shadow="round_robin") as rig:
        prompt = "one prompt of many tokens"
        first = (await rig.complete(prompt))[1][HEADER_WORKER]
        for _ in range(3):
            rig.fleet.on_report(
                report(first, stored=chain_of_requests(rig, first), load=Load(free_blocks=1000))
            )
            assert (await rig.complete(prompt))[1][HEADER_WORKER] == first
        status, _, body = await rig.get("/admin/shadow")
        assert status == 200
        live, turns = body["arms"]
        assert (live["policy"], turns["policy"]) == ("live", "round_robin")
        assert live["requests_to"] == {first: 4}
        assert turns["requests_to"] == {"w0": 2, "w1": 2}
        assert (live["hit_tokens"], turns["hit_tokens"]) == (3 * 24, 2 * 24)
        lines = rig.gateway.metrics.text().decode().splitlines()
        assert {
            'stemroute_shadow_requests_total{policy="round_robin"} 4.0',
            f'stemroute_shadow_hit_tokens_total{{policy="live"}} {3 * 24.0}',
            f'stemroute_shadow_hit_tokens_total{{policy="round_robin"}} {2 * 24.0}',
            'stemroute_shadow_imbalance{policy="live"} 2.0',
        } <= set(lines)
        assert not any(arm._at for arm in rig.gateway.dispatcher.shadows.arms)


def chain_of_requests(rig, name):
    (worker,) = [each for each in rig.workers if each.name == name]
    return hash_blocks(NAMESPACE.root(), worker.requests[-1].token_ids, BLOCK_SIZE)


async def test_without_shadows_there_is_nothing_to_report():
    async with Rig() as rig:
        await rig.complete()
        assert (await rig.get("/admin/shadow"))[2] == {"arms": []}
        assert b"stemroute_shadow" not in rig.gateway.metrics.text()


async def test_a_retry_is_the_same_request_for_a_shadow():
    async with Rig(workers=2, policy="round_robin", shadow="least_requests") as rig:
        rig.workers[0].answer = rig.workers[0].refuse(503)
        status, headers, _ = await rig.complete()
        assert (status, headers[HEADER_WORKER]) == (200, "w1")
        live, least = (await rig.get("/admin/shadow"))[2]["arms"]
        assert live["requests"] == least["requests"] == 1
        assert live["requests_to"] == {"w0": 1}
