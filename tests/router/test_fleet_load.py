"""Load that cannot leak: the last report plus what no report has named yet."""

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.protocol import Load
from router.fleet import Fleet, FleetCheckError
from tests.router.asking import CHAIN, PROMPT, Clock, ask, slot_of
from tests.router.support import NAMESPACE, card, report


def test_load_is_the_last_report_plus_own_requests_that_no_report_has_named(fleet):
    fleet.on_card(card("a"))
    slot = slot_of(fleet, "a")
    fleet.on_report(
        report("a", load=Load(pending_prefill_tokens=100, running=2, waiting=1, free_blocks=50))
    )
    first = fleet.book(slot, "r1", CHAIN, PROMPT, hit_tokens=0)
    second = fleet.book(slot, "r2", CHAIN, PROMPT, hit_tokens=36)
    found = ask(fleet)
    assert found.columns.pending_tokens.tolist() == [100 + 40 + 4]
    assert (found.columns.running.tolist(), found.columns.waiting.tolist()) == ([2], [3])
    assert found.columns.batch.tolist() == [5]
    assert found.columns.free_blocks.tolist() == [50]

    fleet.on_report(report("a", load=Load(pending_prefill_tokens=140, waiting=1), received=["r1"]))
    assert ask(fleet).columns.pending_tokens.tolist() == [140 + 4]
    assert ask(fleet).columns.batch.tolist() == [2]
    fleet.release(second)  # failed before any report named it
    assert ask(fleet).columns.pending_tokens.tolist() == [140]
    fleet.release(first)
    fleet.release(first)
    assert ask(fleet).columns.batch.tolist() == [1]
    fleet.on_report(report("a", load=Load()))
    assert ask(fleet).columns.batch.tolist() == [0]
    assert fleet.requests_total == 2


def test_two_requests_with_one_id_count_as_the_later(fleet):
    fleet.on_card(card("a"))
    first = fleet.book(slot_of(fleet, "a"), "r", CHAIN, PROMPT, hit_tokens=0)
    second = fleet.book(slot_of(fleet, "a"), "r", CHAIN, PROMPT, hit_tokens=36)
    assert ask(fleet).columns.batch.tolist() == [1]
    fleet.check()
    fleet.release(first)
    fleet.check()
    fleet.release(second)
    assert ask(fleet).columns.batch.tolist() == [0]
    fleet.check()


def test_load_holds_while_no_report_comes(fleet):
    fleet.on_card(card("a"))
    bookings = [
        fleet.book(slot_of(fleet, "a"), f"r{i}", CHAIN, PROMPT, hit_tokens=0) for i in range(5)
    ]
    assert ask(fleet).columns.batch.tolist() == [5]
    for booking in bookings:
        fleet.release(booking)
    assert ask(fleet).columns.batch.tolist() == [0]
    assert ask(fleet).columns.pending_tokens.tolist() == [0]


def test_how_long_requests_stay_is_told_from_those_of_the_model_that_are_in_flight(fleet, clock):
    fleet.on_card(card("a"))
    fleet.on_card(card("b"))
    fleet.on_card(card("c", model="other"))
    assert ask(fleet).stay_s == 0
    flying = []
    for number in range(400):  # four a second, each for two seconds
        worker = "ab"[number % 2]
        flying.append(fleet.book(slot_of(fleet, worker), f"r{number}", CHAIN, PROMPT, 0))
        if number >= 8:
            fleet.release(flying[number - 8])
            fleet.release(flying[number - 8])
        clock.now += 0.25
    assert ask(fleet).stay_s == pytest.approx(2, rel=0.02)
    assert fleet.candidates("other", CHAIN, PROMPT).stay_s == 0
    fleet.on_report(report("a", load=Load(running=50)))  # sent by others: nothing of ours
    assert ask(fleet).stay_s == pytest.approx(2, rel=0.02)
    for booking in flying:
        fleet.release(booking)
    assert ask(fleet).stay_s == 0


def test_a_request_that_outlives_its_models_workers_is_counted_with_none_that_follow(fleet, clock):
    fleet.on_card(card("a"))
    booking = fleet.book(slot_of(fleet, "a"), "r", CHAIN, PROMPT, 0)
    fleet.on_gone("a", "gone")
    fleet.on_card(card("b"))
    assert ask(fleet).stay_s == 0
    fleet.release(booking)
    fleet.book(slot_of(fleet, "b"), "r2", CHAIN, PROMPT, 0)
    assert ask(fleet).stay_s > 0


def test_check_names_a_row_that_drifted():
    fleet = Fleet()
    fleet.on_card(card("a"))
    fleet._table.rows[0, 0] += 1
    with pytest.raises(FleetCheckError, match=r"a: row \[1, .*bookings \[0, "):
        fleet.check()


workers = st.sampled_from(["a", "b", "c"])
loads = st.builds(
    Load,
    pending_prefill_tokens=st.integers(0, 500),
    running=st.integers(0, 9),
    waiting=st.integers(0, 9),
    free_blocks=st.integers(0, 99),
)
events = st.one_of(
    st.tuples(st.just("card"), workers, st.integers(0, 1), st.sampled_from([4, 8])),
    st.tuples(st.just("report"), workers, loads, st.sampled_from(["ready", "draining"])),
    st.tuples(st.just("book"), st.integers(0, 99), st.integers(1, 12), st.none()),
    st.tuples(st.just("release"), st.integers(0, 99), st.none(), st.none()),
    st.tuples(st.just("gone"), workers, st.none(), st.none()),
    st.tuples(st.just("suspect"), workers, st.none(), st.none()),
    st.tuples(st.just("wait"), st.integers(0, 12), st.none(), st.none()),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(events, max_size=40), st.randoms(use_true_random=False))
def test_whatever_happens_no_load_leaks(script, chance):
    clock = Clock()
    fleet = Fleet(clock=clock)
    epochs: dict[str, int] = {}
    sent: dict[str, list] = {}
    live = []
    for number, (action, who, first, second) in enumerate(script):
        if action == "card":
            epochs[who] = epochs.get(who, 1) + first
            namespace = msgspec.structs.replace(NAMESPACE, block_size=second)
            fleet.on_card(card(who, epoch=epochs[who], namespace=namespace))
        elif action == "report" and who in epochs:
            named = [b.request_id for b in sent.get(who, []) if chance.random() < 0.5]
            stored = [h for b in sent.get(who, []) if b.claim for h in b.claim.chain]
            fleet.on_report(
                report(who, epochs[who], load=first, state=second, received=named, stored=stored)
            )
        elif action == "book":
            found = fleet.candidates("tiny", CHAIN[:first], first * 4)
            if found is not None:
                place = who % len(found.columns.slots)
                booking = fleet.book(
                    int(found.columns.slots[place]),
                    f"r{number}",
                    CHAIN[:first],
                    first * 4,
                    int(found.hit_tokens[place]),
                )
                sent.setdefault(booking.member.card.worker, []).append(booking)
                live.append(booking)
        elif action == "release" and live:
            fleet.release(live.pop(who % len(live)))
        elif action == "gone":
            fleet.on_gone(who, "test")
        elif action == "suspect":
            fleet.trust.suspect(who, "test")
        elif action == "wait":
            clock.now += who
        fleet.check()
    for booking in live:
        fleet.release(booking)
    for member in fleet.members():
        fleet.on_report(report(member.card.worker, member.card.epoch))
        assert fleet.load_of(member) == Load(free_blocks=1000)
    fleet.check()
    assert fleet.in_flight == 0
    assert len(fleet.coming) == 0
    assert not np.any(fleet._table.rows[:3])
