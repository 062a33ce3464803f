"""Shadow policies: their own caches, their own load, and no influence on what happens."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.blocks import hash_blocks
from cluster.protocol import HEADER_WORKER, Load
from router import shadow
from router.dispatch import Dispatcher
from router.fleet import Fleet
from router.metrics import Metrics
from router.policies import PolicyError, parse_policy
from router.shadow import Shadows, parse_shadows
from router.tokenization import Prompt
from tests.router.support import BLOCK_SIZE, NAMESPACE, FakeStatus, Rig, card, chain_of, report

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
        self.shadows.observe(self.fleet, request_id, found, chosen)
        if end:
            self.shadows.began(request_id)
            self.shadows.ended(request_id)
        for arm in self.shadows.arms:
            arm.check()
        return request_id

    def view(self, policy: str):
        return next(view for view in self.shadows.views() if view.policy == policy)

    def ends(self, *request_ids: str) -> None:
        for request_id in request_ids:
            self.shadows.ended(request_id)
            for arm in self.shadows.arms:
                arm.check()


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


@pytest.mark.parametrize("policy", ["dynamo", "llmd"])
def test_a_shadow_does_not_flee_blocks_that_it_placed_nowhere(policy):
    """The worker is full of what others sent; this arm's own requests have ended."""
    traffic = Traffic(policy)
    traffic.send(CHAINS[0][:5], chosen=0, prompt=21)
    (first,) = traffic.view(policy).requests_to
    traffic.fleet.on_report(report(first, load=Load(free_blocks=3, running=9)))
    for chain in (CHAINS[0], chain_of([*range(20), *range(500, 521)])):  # half of it is there
        traffic.send(chain, chosen=0)
    assert traffic.view(policy).requests_to == {first: 3}


def test_what_a_shadow_placed_takes_its_blocks_until_it_ends():
    """41 new tokens are 11 blocks: dynamo sees those used where it put an answer that goes on."""
    traffic = Traffic("dynamo")
    went_on = []
    for chain in CHAINS[:2]:
        went_on.append(traffic.send(chain, chosen=0, end=False))
        traffic.shadows.began(went_on[-1])
    assert traffic.view("dynamo").requests_to == {"w0": 1, "w1": 1}
    first = traffic.shadows.arms[1]._at[went_on[0]].worker
    traffic.ends(went_on[0])
    traffic.send(CHAINS[2], chosen=0)
    assert traffic.view("dynamo").requests_to[first] == 2


def test_requests_that_share_a_prefix_take_its_blocks_once():
    """19 more take a block each beside the shared ten, and dynamo stays where the prefix is:
    3 × 1 / 4 + 10 + 19 < 3 × 41 / 4. Taken anew by each, they would drive it away with the third.
    """
    traffic = Traffic("dynamo:overlap_weight=3")
    requests = []
    for _ in range(20):
        requests.append(traffic.send(CHAINS[0], chosen=0, end=False))
        traffic.shadows.began(requests[-1])
    (held,) = traffic.view("dynamo:overlap_weight=3").requests_to.values()
    assert held == 20
    # two more, of which the first is a tie
    requests += [traffic.send(CHAINS[0], chosen=0, end=False) for _ in range(2)]
    assert len(traffic.view("dynamo:overlap_weight=3").requests_to) == 2
    traffic.ends(*requests)
    for arm in traffic.shadows.arms:
        assert not any(ghost.taken_blocks for ghost in arm._ghosts.values())


def test_a_worker_that_is_full_in_a_shadows_picture_is_left_out_of_it():
    """15 blocks, of which 11 are taken: 41 more tokens do not fit where their prefix is."""
    traffic = Traffic("prefix_only", capacity_blocks=15)
    longer = chain_of([*range(PROMPT - 1), *range(500, 541)])
    first = traffic.send(CHAINS[0], chosen=0, end=False)
    traffic.send(longer, chosen=0, prompt=81)
    assert traffic.view("prefix_only").requests_to == {"w0": 1, "w1": 1}
    traffic.ends(first)
    traffic.send(CHAINS[0], chosen=0)
    assert max(traffic.view("prefix_only").requests_to.values()) == 2


def test_a_shadow_whose_workers_are_all_full_still_places_what_was_placed():
    traffic = Traffic("prefix_only", workers=1, capacity_blocks=11)
    for chain in CHAINS:
        traffic.send(chain, chosen=0, end=False)
    assert traffic.view("prefix_only").requests_to == {"w0": 3}


@pytest.mark.parametrize("policy", ["prefix_only", "dynamo"])
def test_a_worker_that_is_really_full_is_not_left_out_of_a_shadows_choice(policy):
    fleet, shadows = Fleet(), Shadows([parse_policy(policy)], random.Random(1))
    for worker in ("w0", "w1"):
        fleet.on_card(card(worker))
    live = parse_policy("prefix_only")
    metrics = Metrics(fleet, FakeStatus)
    dispatcher = Dispatcher(fleet, live, metrics, random.Random(1), shadows)

    def place(request_id: str) -> str:
        prompt = Prompt(bytes(4 * PROMPT), CHAINS[0], NAMESPACE)
        placement = dispatcher.place("tiny", prompt, request_id)
        fleet.release(placement.booking)
        shadows.began(request_id)
        shadows.ended(request_id)
        return placement.worker

    place("r0")
    (first,) = shadows.views()[1].requests_to
    other = "w1" if first == "w0" else "w0"
    fleet.on_report(report(first, load=Load(free_blocks=0, running=9)))
    assert [place(f"r{number}") for number in (1, 2)] == [other, other]
    assert shadows.views()[1].requests_to == {first: 3}


@pytest.mark.parametrize("policy", ["ttft", "marginal"])
def test_the_quadratic_part_of_what_is_pending_counts_in_a_shadow(policy):
    """One prompt of 160 tokens takes as long as eleven of 41: 0.16 + 1.28 s and 0.04 + 0.08 s."""
    traffic = Traffic(policy)
    load = Load(free_blocks=1000, prefill_s_per_token=1e-3, prefill_s_per_pair=1e-4)
    for worker in ("w0", "w1"):
        traffic.fleet.on_report(report(worker, load=load))
    traffic.send(chain_of(range(5000, 5160)), chosen=0, prompt=160, end=False)
    for number in range(5):
        traffic.send(chain_of(range(100 * number, 100 * number + 41)), chosen=0, end=False)
    # 164 tokens in four prompts are more than 160 in one, but sooner done
    assert sorted(traffic.view(policy).requests_to.values()) == [1, 5]


def test_another_request_with_the_same_id_takes_the_place_of_the_first():
    traffic = Traffic("round_robin")
    for _ in range(2):
        request_id = traffic.send(CHAINS[0], chosen=0, end=False)
        traffic.number = 0
    traffic.ends(request_id)
    for arm in traffic.shadows.arms:
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
    unfinished: list[str] = []
    for which, chosen, blocks, end in requests:
        chain = CHAINS[which][:blocks]
        unfinished.append(traffic.send(chain, chosen, prompt=4 * blocks + 1, end=False))
        if end:  # another one, mostly
            traffic.ends(unfinished.pop(blocks % len(unfinished)))
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
        ("locality,locality", "given twice"),
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
            'stemroute_gateway_shadow_requests_total{policy="round_robin"} 4.0',
            f'stemroute_gateway_shadow_hit_tokens_total{{policy="live"}} {3 * 24.0}',
            f'stemroute_gateway_shadow_hit_tokens_total{{policy="round_robin"}} {2 * 24.0}',
            'stemroute_gateway_shadow_imbalance_ratio{policy="live"} 2.0',
        } <= set(lines)
        assert not any(arm._at for arm in rig.gateway.dispatcher.shadows.arms)


def chain_of_requests(rig, name):
    (worker,) = [each for each in rig.workers if each.name == name]
    return hash_blocks(NAMESPACE.root(), worker.requests[-1].token_ids, BLOCK_SIZE)


async def test_without_shadows_there_is_nothing_to_report():
    async with Rig() as rig:
        await rig.complete()
        assert (await rig.get("/admin/shadow"))[2] == {"arms": []}
        assert b"stemroute_gateway_shadow" not in rig.gateway.metrics.text()


async def test_a_retry_is_the_same_request_for_a_shadow():
    async with Rig(workers=2, policy="round_robin", shadow="least_requests") as rig:
        rig.workers[0].answer = rig.workers[0].refuse(503)
        status, headers, _ = await rig.complete()
        assert (status, headers[HEADER_WORKER]) == (200, "w1")
        live, least = (await rig.get("/admin/shadow"))[2]["arms"]
        assert live["requests"] == least["requests"] == 1
        assert live["requests_to"] == {"w0": 1}
