"""The fleet: who may serve, what each holds, and load that cannot leak."""

import msgspec
import pytest

from cluster.protocol import Load
from router.fleet import Fleet
from tests.router.asking import CHAIN, PROMPT, ask, hits, names, slot_of
from tests.router.support import BLOCK_SIZE, NAMESPACE, card, chain_of, report


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
    assert found.columns.s_per_token.tolist() == [0.0, 1e-4]
    assert found.columns.s_per_pair.tolist() == [0.0, 1e-8]
    # tokens 20 to 40 look at (40² − 20²)/2 pairs
    assert found.columns.pending_pairs.tolist() == [0, 9000 + 600]
    assert (found.columns.free_blocks - found.columns.room_blocks).tolist() == [0, 5]
    assert found.chain == CHAIN
    fleet.release(booking)
    fleet.on_card(card("b", epoch=2))
    assert ask(fleet).columns.s_per_token.tolist() == [0.0, 0.0]


def test_a_workers_key_is_the_same_in_every_fleet(fleet):
    other = Fleet()
    for name in ("a", "b"):
        fleet.on_card(card(name))
    for name in ("b", "a"):
        other.on_card(card(name))
    mine, theirs = ask(fleet).columns.worker_keys.tolist(), ask(other).columns.worker_keys.tolist()
    assert mine == theirs[::-1]
    assert mine[0] != mine[1]


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


def test_requests_in_flight_that_share_what_is_held_are_told(fleet):
    for worker in ("w0", "w1"):
        fleet.on_card(card(worker))
    fleet.on_report(report("w0", stored=CHAIN[:1]))
    other = CHAIN[:1] + chain_of(range(100, 116))
    bookings = [fleet.book(slot_of(fleet, "w1"), f"r{i}", other, PROMPT, 0) for i in range(3)]
    found = ask(fleet)
    assert (found.in_flight, found.sharing, found.best_hit_tokens) == (3, 3, BLOCK_SIZE)
    bookings.append(fleet.book(slot_of(fleet, "w0"), "r3", CHAIN, PROMPT, 0))
    found = ask(fleet)  # that one brings all the others of the prompt, which no other request has
    assert (found.in_flight, found.sharing, found.best_hit_tokens) == (4, 1, PROMPT - BLOCK_SIZE)
    for booking in bookings:
        fleet.release(booking)
    found = ask(fleet)
    assert (found.in_flight, found.sharing, found.best_hit_tokens) == (0, 0, BLOCK_SIZE)


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
    assert ask(fleet).columns.pending_tokens.tolist() == [20]
    fleet.on_report(report("a", epoch=1, stored=CHAIN, load=Load(running=7)))  # late
    fleet.on_snapshot("a", 1, CHAIN)
    fleet.on_card(card("a", epoch=1, state="failed"))
    assert hits(fleet) == {"a": 0}
    assert ask(fleet).columns.running.tolist() == [0]
    fleet.on_card(card("a", epoch=3, address="http://elsewhere.invalid:1"))
    assert ask(fleet).columns.batch.tolist() == [0]
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
    assert ask(fleet).columns.batch.tolist() == [0, 0]
    assert fleet.in_flight == 0


def test_a_suspect_is_left_out_until_its_next_report_or_a_while(fleet, clock):
    fleet.on_card(card("a"))
    fleet.on_card(card("b"))
    fleet.trust.suspect("a", "it refused a connection")
    fleet.trust.suspect("nobody", "it refused a connection")
    assert names(fleet) == {"b"}
    fleet.on_report(report("a"))
    assert names(fleet) == {"a", "b"}
    fleet.trust.suspect("a", "it refused a connection")
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
    assert found.columns.running.tolist() == list(range(70))
    assert found.hit_tokens.tolist() == [4 * (n % 9) for n in range(70)]


def test_listeners_are_told_of_epochs_and_states(fleet):
    heard = []
    fleet.changed.subscribe(lambda: heard.append(len(heard)))
    fleet.on_card(card("a"))
    fleet.on_report(report("a"))
    assert len(heard) == 1
    fleet.on_report(report("a", state="draining"))
    fleet.on_gone("a", "left")
    assert len(heard) == 3


def test_a_listener_that_has_unsubscribed_is_told_nothing_more(fleet):
    heard = []
    unsubscribe = fleet.room.subscribe(lambda: heard.append("first"))
    fleet.room.subscribe(lambda: heard.append("second"))
    fleet.on_card(card("a"))
    unsubscribe()
    fleet.on_report(report("a"))
    assert heard == ["first", "second", "second"]
