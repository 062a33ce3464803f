"""The quick way to a decision gives what the plain one gives, whatever came before."""

import random

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cluster.protocol import Load
from router.bitmask import Spread
from router.fleet import Fleet
from router.policies import parse_policy
from tests.router.support import BLOCK_SIZE, card, chain_of, report

WORKERS = [f"w{number}" for number in range(12)]

tokens = st.lists(st.integers(0, 1), min_size=1, max_size=8)
workers = st.sampled_from(WORKERS)
loads = st.builds(
    Load,
    pending_prefill_tokens=st.integers(0, 60),
    running=st.integers(0, 4),
    free_blocks=st.just(1000),
)
events = st.one_of(
    st.tuples(st.just("store"), workers, tokens, loads),
    st.tuples(st.just("store_all"), st.integers(1, len(WORKERS)), tokens, loads),
    st.tuples(st.just("evict"), workers, tokens, loads),
    st.tuples(st.just("ask"), st.none(), tokens, st.none()),
    st.tuples(st.just("end"), st.integers(0, 20), tokens, st.none()),
    st.tuples(st.just("state"), workers, st.sampled_from(["ready", "draining"]), st.none()),
)


def chain_for(each: list[int]) -> list[bytes]:
    return chain_of([token for token in each for _ in range(BLOCK_SIZE)])


LONGEST = [chain_for([number >> place & 1 for place in range(8)]) for number in range(256)]
"""Every chain that is as long as can be; all others begin one of these."""


def leading(held, chain) -> int:
    return next((i for i, block in enumerate(chain) if block not in held), len(chain))


def plain_hit(held, claims, chain, prompt: int) -> int:
    """Tokens of `chain` that a worker with the set `held` and the claimed chains will hold."""
    depths = [leading(held, chain), *(leading(set(claimed), chain) for claimed in claims)]
    return min(max(depths), (prompt - 1) // BLOCK_SIZE) * BLOCK_SIZE


@pytest.mark.parametrize("few", [24, 2, 0])
@settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.lists(events, max_size=40))
def test_hits_loads_and_choices_equal_plain_ones(monkeypatch, few, script):
    for module in ("prefix_index", "bitmask"):
        monkeypatch.setattr(f"router.{module}.FEW", few)
    monkeypatch.setattr("router.bitmask.VERY_FEW", min(few, 4))
    fleet, policy = Fleet(clock=lambda: 0.0), parse_policy("locality")
    held = {worker: set() for worker in WORKERS}
    load = {worker: Load(free_blocks=1000) for worker in WORKERS}
    ready = dict.fromkeys(WORKERS, True)
    live = []
    for worker in WORKERS:
        fleet.on_card(card(worker))
    names = {member.slot: member.card.worker for member in fleet.members()}

    def tell(worker, **what):
        state = "ready" if ready[worker] else "draining"
        fleet.on_report(report(worker, load=load[worker], state=state, **what))

    def store(worker, chain, new_load):
        held[worker].update(chain)
        load[worker] = new_load
        tell(worker, stored=chain)

    for number, (action, who, what, new_load) in enumerate(script):
        if action == "store":
            store(who, chain_for(what), new_load)
        elif action == "store_all":
            for worker in WORKERS[:who]:
                store(worker, chain_for(what), new_load)
        elif action == "evict":
            last = chain_for(what)[-1]
            through = [chain for chain in LONGEST if last in chain]
            gone = {block for chain in through for block in chain[chain.index(last) :]}
            held[who] -= gone
            load[who] = new_load
            tell(who, evicted=list(gone))
        elif action == "state":
            ready[who] = what == "ready"
            tell(who)
        elif action == "end" and live:
            fleet.release(live.pop(who % len(live))[0])
        elif action == "ask":
            chain, prompt = chain_for(what), len(what) * BLOCK_SIZE
            found = fleet.candidates("tiny", chain, prompt)
            if found is None:
                assert not any(ready.values())
                continue
            asked = [names[slot] for slot in found.columns.slots.tolist()]
            assert asked == [worker for worker in WORKERS if ready[worker]]
            costs = []
            for place, worker in enumerate(asked):
                mine = [booking for booking, _ in live if booking.member.card.worker == worker]
                claims = [claimed for booking, claimed in live if booking in mine]
                hit = plain_hit(held[worker], claims, chain, prompt)
                unnamed = sum(booking.new_tokens for booking in mine)
                pending = load[worker].pending_prefill_tokens + unnamed
                batch = load[worker].running + len(mine)
                assert found.hit_tokens[place] == hit
                assert found.columns.pending_tokens[place] == pending
                assert found.columns.batch[place] == batch
                costs.append((pending + max(1, prompt - hit)) * (batch + 1))
            assert found.best_hit_tokens == max(found.hit_tokens)
            decision = policy.choose(found, random.Random(number))
            assert decision.costs.tolist() == costs
            assert decision.chosen == plain_choice(costs, found, random.Random(number))
            booking = fleet.book(
                found.columns.slots.item(decision.chosen),
                f"r{number}",
                chain,
                prompt,
                found.hit_tokens.item(decision.chosen),
            )
            live.append((booking, chain))
        fleet.check()


def plain_choice(costs, found, rng) -> int:
    """The tie rule, entry by entry."""
    near = [i for i, cost in enumerate(costs) if cost <= min(costs) + 0.01 * min(costs)]
    for column in (found.columns.batch.tolist(), found.columns.pending_tokens.tolist()):
        near = [i for i in near if column[i] == min(column[j] for j in near)]
    return near[0] if len(near) == 1 else near[rng.randrange(len(near))]


groups = st.lists(st.tuples(st.integers(0, 9), st.sets(st.integers(0, 69))), max_size=6)


@pytest.mark.parametrize("few", [24, 2, 0])
@settings(
    max_examples=100,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.lists(groups, min_size=1, max_size=4), st.integers(1, 16))
def test_arrays_are_what_their_groups_say(monkeypatch, few, several, unit):
    for name in ("FEW", "VERY_FEW"):
        monkeypatch.setattr(f"router.bitmask.{name}", few)
    spread = Spread()
    for number, each in enumerate(several * 2):
        wanted = np.zeros(70, dtype=np.int64)
        disjoint, taken = [], set()
        for depth, slots in each:
            disjoint.append((depth, sum(1 << slot for slot in slots - taken)))
            wanted[list(slots - taken)] = depth * unit
            taken |= slots
        disjoint.sort(reverse=True)
        assert spread.array(disjoint, 70, unit).tolist() == wanted.tolist(), number
