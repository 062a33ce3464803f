"""The fleet: who may serve, what each holds, and load that cannot leak."""

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.protocol import Load
from router.fleet import Fleet, FleetCheckError
from tests.router.support import BLOCK_SIZE, NAMESPACE, card, chain_of, report

PROMPT = 40
CHAIN = chain_of(range(PROMPT))


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def fleet(clock):
    fleet = Fleet(clock=clock)
    yield fleet
    fleet.check()


def ask(fleet, chain=CHAIN, prompt=PROMPT, excluded=()):
    return fleet.candidates("tiny", chain, prompt, excluded)


def hits(fleet, **kwargs):
    found = ask(fleet, **kwargs)
    names = [fleet.at(int(slot)).card.worker for slot in found.slots]
    return dict(zip(names, found.hit_tokens.tolist(), strict=True))


def names(fleet, **kwargs):
    found = ask(fleet, **kwargs)
    return set() if found is None else {fleet.at(int(s)).card.worker for s in found.slots}


def slot_of(fleet, worker):
    return next(m.slot for m in fleet.members() if m.card.worker == worker)


def test_only_ready_workers_of_the_model_are_candidates(fleet):
    fleet.on_card(card("a"))
    fleet.on_card(card("b", state="starting"))
    fleet.on_card(card("c", state="draining"))
    fleet.on_card(card("d", state="failed"))
    fleet.on_card(card("e", model="other"))
    assert names(fleet) == {"a"}
    fleet.on_report(report("b", state="ready"))
    fleet.on_report(report("a", state="draining"))
    assert names(fleet) == {"b"}
    assert fleet.known_models() == ["other", "tiny"]
    fleet.on_gone("b", "left")
    assert ask(fleet) is None
    assert fleet.group("nothing") is None


def test_published_blocks_are_hits_and_the_last_token_never_is(fleet):
    fleet.on_card(card("a"))
    fleet.on_card(card("b"))
    fleet.on_snapshot("a", 1, CHAIN)
    fleet.on_report(report("b", stored=CHAIN[:3]))
    assert hits(fleet) == {"a": PROMPT - BLOCK_SIZE, "b": 12}  # 40 tokens: at most 39, 9 blocks
    assert hits(fleet, prompt=41) == {"a": 40, "b": 12}
    fleet.on_report(report("a", evicted=CHAIN[5:]))
    fleet.on_report(report("a", evicted=CHAIN[5:]))
    assert hits(fleet) == {"a": 20, "b": 12}
    fleet.on_snapshot("a", 1, CHAIN[:1])
    assert hits(fleet) == {"a": 4, "b": 12}


def test_a_report_says_whether_the_index_agrees(fleet):
    fleet.on_card(card("a"))
    agrees = report("a", stored=CHAIN[:3], load=Load(cached_blocks=3))
    assert fleet.on_report(agrees) is True
    assert fleet.on_report(report("a", stored=CHAIN[:4], load=Load(cached_blocks=5))) is False
    assert fleet.on_report(report("stranger", load=Load(cached_blocks=5))) is True


def test_load_is_the_last_report_plus_own_requests_that_no_report_has_named(fleet):
    fleet.on_card(card("a"))
    slot = slot_of(fleet, "a")
    fleet.on_report(
        report("a", load=Load(pending_prefill_tokens=100, running=2, waiting=1, free_blocks=50))
    )
    first = fleet.book(slot, "r1", CHAIN, PROMPT, hit_tokens=0)
    second = fleet.book(slot, "r2", CHAIN, PROMPT, hit_tokens=36)
    found = ask(fleet)
    assert found.pending_tokens.tolist() == [100 + 40 + 4]
    assert (found.running.tolist(), found.waiting.tolist()) == ([2], [3])
    assert found.batch.tolist() == [5]
    assert found.free_blocks.tolist() == [50]

    fleet.on_report(report("a", load=Load(pending_prefill_tokens=140, waiting=1), received=["r1"]))
    assert ask(fleet).pending_tokens.tolist() == [140 + 4]
    assert ask(fleet).batch.tolist() == [2]
    fleet.release(second)  # failed before any report named it
    assert ask(fleet).pending_tokens.tolist() == [140]
    fleet.release(first)
    fleet.release(first)
    assert ask(fleet).batch.tolist() == [1]
    fleet.on_report(report("a", load=Load()))
    assert ask(fleet).batch.tolist() == [0]
    assert fleet.requests_total == 2


def test_two_requests_with_one_id_count_as_the_later(fleet):
    fleet.on_card(card("a"))
    first = fleet.book(slot_of(fleet, "a"), "r", CHAIN, PROMPT, hit_tokens=0)
    second = fleet.book(slot_of(fleet, "a"), "r", CHAIN, PROMPT, hit_tokens=36)
    assert ask(fleet).batch.tolist() == [1]
    fleet.check()
    fleet.release(first)
    fleet.check()
    fleet.release(second)
    assert ask(fleet).batch.tolist() == [0]
    fleet.check()


def test_measured_speeds_and_pairs_reach_the_candidates(fleet):
    fleet.on_card(card("a"))
    fleet.on_card(card("b"))
    load = Load(
        pending_prefill_tokens=100,
        pending_prefill_pairs=9000,
        prefill_s_per_token=1e-4,
        prefill_s_per_pair=1e-8,
        free_blocks=50,
    )
    fleet.on_report(report("b", load=load))
    booking = fleet.book(slot_of(fleet, "b"), "r", CHAIN, PROMPT, hit_tokens=20)
    found = ask(fleet)
    assert found.s_per_token.tolist() == [0.0, 1e-4]
    assert found.s_per_pair.tolist() == [0.0, 1e-8]
    # tokens 20 to 40 look at (40² − 20²)/2 pairs
    assert found.pending_pairs.tolist() == [0, 9000 + 600]
    assert (found.free_blocks - found.room_blocks).tolist() == [0, 5]
    assert found.chain == CHAIN
    fleet.release(booking)
    fleet.on_card(card("b", epoch=2))
    assert ask(fleet).s_per_token.tolist() == [0.0, 0.0]


def test_a_workers_key_is_the_same_in_every_fleet(fleet):
    other = Fleet()
    for name in ("a", "b"):
        fleet.on_card(card(name))
    for name in ("b", "a"):
        other.on_card(card(name))
    mine, theirs = ask(fleet).worker_keys.tolist(), ask(other).worker_keys.tolist()
    assert mine == theirs[::-1]
    assert mine[0] != mine[1]


def test_load_holds_while_no_report_comes(fleet):
    fleet.on_card(card("a"))
    bookings = [
        fleet.book(slot_of(fleet, "a"), f"r{i}", CHAIN, PROMPT, hit_tokens=0) for i in range(5)
    ]
    assert ask(fleet).batch.tolist() == [5]
    for booking in bookings:
        fleet.release(booking)
    assert ask(fleet).batch.tolist() == [0]
    assert ask(fleet).pending_tokens.tolist() == [0]


def test_blocks_of_requests_in_flight_count_as_coming(fleet, clock):
    fleet.on_card(card("a"))
    fleet.on_card(card("b"))
    booking = fleet.book(slot_of(fleet, "b"), "r", CHAIN, PROMPT, hit_tokens=0)
    assert hits(fleet) == {"a": 0, "b": 36}
    fleet.on_report(report("b", stored=CHAIN))
    fleet.release(booking)
    assert hits(fleet) == {"a": 0, "b": 36}
    assert len(fleet.coming) == 0

    longer = chain_of(range(80))
    fleet.book(slot_of(fleet, "b"), "r2", longer, 80, hit_tokens=40)
    assert hits(fleet, chain=longer, prompt=80) == {"a": 0, "b": 76}
    clock.now += 61.0
    assert hits(fleet, chain=longer, prompt=80) == {"a": 0, "b": 40}


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


def test_a_request_that_fails_takes_its_expected_blocks_along(fleet):
    fleet.on_card(card("a"))
    fleet.release(fleet.book(slot_of(fleet, "a"), "r", CHAIN, PROMPT, hit_tokens=0))
    assert hits(fleet) == {"a": 0}


def test_a_new_epoch_forgets_blocks_and_load(fleet):
    fleet.on_card(card("a"))
    fleet.on_report(report("a", stored=CHAIN[:5], load=Load(pending_prefill_tokens=9, running=3)))
    booking = fleet.book(slot_of(fleet, "a"), "r", CHAIN, PROMPT, hit_tokens=20)
    fleet.on_card(card("a", epoch=2))
    assert hits(fleet) == {"a": 0}
    # a flush in the same process: what is on its way there still arrives
    assert ask(fleet).pending_tokens.tolist() == [20]
    fleet.on_report(report("a", epoch=1, stored=CHAIN, load=Load(running=7)))  # late
    fleet.on_snapshot("a", 1, CHAIN)
    fleet.on_card(card("a", epoch=1, state="failed"))
    assert hits(fleet) == {"a": 0}
    assert ask(fleet).running.tolist() == [0]
    fleet.on_card(card("a", epoch=3, address="http://elsewhere.invalid:1"))
    assert ask(fleet).batch.tolist() == [0]
    fleet.release(booking)


def test_a_gone_worker_leaves_nothing_and_its_slot_is_used_again(fleet):
    fleet.on_card(card("a"))
    fleet.on_card(card("b"))
    slot = slot_of(fleet, "a")
    fleet.on_report(report("a", stored=CHAIN, load=Load(running=3)))
    booking = fleet.book(slot, "r", CHAIN, PROMPT, hit_tokens=36)
    fleet.on_gone("a", "no lease")
    fleet.on_gone("a", "no lease")
    fleet.check()
    assert names(fleet) == {"b"}
    assert len(fleet.index) == 0
    fleet.on_card(card("c"))
    assert slot_of(fleet, "c") == slot
    assert hits(fleet) == {"b": 0, "c": 0}
    fleet.release(booking)
    assert ask(fleet).batch.tolist() == [0, 0]
    assert fleet.in_flight == 0


def test_a_suspect_is_left_out_until_its_next_report_or_a_while(fleet, clock):
    fleet.on_card(card("a"))
    fleet.on_card(card("b"))
    fleet.suspect("a")
    fleet.suspect("nobody")
    assert names(fleet) == {"b"}
    fleet.on_report(report("a"))
    assert names(fleet) == {"a", "b"}
    fleet.suspect("a")
    clock.now += 5.1
    assert names(fleet) == {"a", "b"}


def test_excluded_workers_are_no_candidates(fleet):
    for worker in "abc":
        fleet.on_card(card(worker))
    assert names(fleet, excluded=["a", "x"]) == {"b", "c"}
    assert ask(fleet, excluded=["a", "b", "c"]) is None


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"block_size": 32}, "block_size 32 instead of 4"),
        ({"weights": "w2"}, "weights 'w2' instead of 'w1'"),
        ({"kv_dtype": "bfloat16"}, "kv_dtype 'bfloat16' instead of 'float32'"),
    ],
)
def test_workers_that_do_not_match_the_first_are_refused_with_the_reason(fleet, change, word):
    fleet.on_card(card("a"))
    fleet.on_card(card("b", namespace=msgspec.structs.replace(NAMESPACE, **change)))
    fleet.on_card(card("c"))
    assert names(fleet) == {"a", "c"}
    assert list(fleet.refused()) == ["b"]
    assert word in fleet.refused()["b"]
    # a rolling update ends: the last of the old ones goes, the new one is the measure now
    fleet.on_report(report("a", state="draining"))
    assert names(fleet) == {"c"}
    fleet.on_gone("c", "left")
    assert names(fleet) == {"b"}
    assert list(fleet.refused()) == ["a"]


def test_the_context_is_what_every_worker_can_hold(fleet):
    fleet.on_card(card("a", context_tokens=100))
    fleet.on_card(card("b", context_tokens=300, capacity_blocks=20))
    assert fleet.group("tiny").context_tokens == 80
    fleet.on_gone("b", "left")
    assert fleet.group("tiny").context_tokens == 100


def test_many_workers_keep_their_own_rows(fleet):
    for number in range(70):
        fleet.on_card(card(f"w{number:02}"))
        fleet.on_report(
            report(f"w{number:02}", load=Load(running=number), stored=CHAIN[: number % 9])
        )
    found = ask(fleet)
    assert found.running.tolist() == list(range(70))
    assert found.hit_tokens.tolist() == [4 * (n % 9) for n in range(70)]


def test_the_listener_hears_of_epochs_and_states(fleet):
    heard = []
    fleet.listener = lambda: heard.append(len(heard))
    fleet.on_card(card("a"))
    fleet.on_report(report("a"))
    assert len(heard) == 1
    fleet.on_report(report("a", state="draining"))
    fleet.on_gone("a", "left")
    assert len(heard) == 3


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
                place = who % len(found.slots)
                booking = fleet.book(
                    int(found.slots[place]),
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
            fleet.suspect(who)
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
