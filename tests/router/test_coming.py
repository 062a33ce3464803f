"""Blocks on their way count until they are announced, their request ends, or time is up."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.coming import ComingBlocks, ComingCheckError, common_prefix
from tests.router.support import chain_of

A = chain_of(range(24))
B = A[:3] + chain_of(range(12, 24), root=b"other")


def held_by(coming: ComingBlocks, slot: int) -> set[bytes]:
    return {block for block, mask in coming.masks.items() if mask >> slot & 1}


def test_a_claim_begins_behind_what_is_held():
    coming = ComingBlocks(10.0)
    coming.claim(1, A, 2, now=0.0)
    assert held_by(coming, 1) == set(A[2:])
    assert held_by(coming, 0) == set()


def test_an_announced_block_is_no_longer_coming_and_does_not_return():
    coming = ComingBlocks(10.0)
    first = coming.claim(0, A, 0, now=0.0)
    coming.claim(0, A, 6, now=0.0)
    coming.stored(0, A[:4])
    coming.end(first)
    assert held_by(coming, 0) == set(A[4:])
    coming.check()


def test_what_an_ended_request_leaves_passes_to_those_that_share_it():
    coming = ComingBlocks(10.0)
    first = coming.claim(0, A, 0, now=0.0)
    coming.claim(0, B, 3, now=0.0)
    elsewhere = coming.claim(1, A, 0, now=0.0)
    coming.end(first)
    assert held_by(coming, 0) == set(B)
    coming.end(elsewhere)
    assert held_by(coming, 1) == set()
    coming.check()


def test_a_later_claim_outlives_the_announcing_and_evicting_of_an_earlier_one():
    coming = ComingBlocks(10.0)
    first = coming.claim(0, A, 0, now=0.0)
    coming.stored(0, A)
    coming.claim(0, A, 0, now=0.0)  # evicted meanwhile: claimed anew
    coming.end(first)
    assert held_by(coming, 0) == set(A)
    coming.check()


def test_claims_expire_in_order():
    coming = ComingBlocks(10.0)
    coming.claim(0, A, 0, now=0.0)
    coming.claim(0, B, 3, now=5.0)
    coming.expire(9.9)
    assert held_by(coming, 0) == set(A) | set(B)
    coming.expire(10.0)
    assert held_by(coming, 0) == set(B)
    coming.expire(15.0)
    assert len(coming) == 0
    assert not coming._claims
    assert not coming._deadlines


def test_memory_is_bounded():
    coming = ComingBlocks(10.0, max_blocks=4)
    claim = coming.claim(0, A, 0, now=0.0)
    assert held_by(coming, 0) == set(A[:4])
    coming.claim(1, A, 0, now=0.0)
    assert len(coming) == 4
    coming.check()
    coming.end(claim)
    assert len(coming) == 0


def test_common_prefix():
    assert common_prefix(A, B) == 3
    assert common_prefix(A, A) == len(A)
    assert common_prefix(A, []) == 0


def test_check_names_a_mask_without_an_owner():
    coming = ComingBlocks(10.0)
    coming.masks[A[0]] = 1
    with pytest.raises(ComingCheckError, match="masks name 1 blocks"):
        coming.check()


chains = st.lists(st.integers(0, 1), min_size=1, max_size=6).map(
    lambda tokens: chain_of(tokens, block_size=1)
)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("claim"), st.integers(0, 1), chains),
        st.tuples(st.just("end"), st.integers(0, 20), st.none()),
        st.tuples(st.just("stored"), st.integers(0, 1), chains),
        st.tuples(st.just("drop"), st.integers(0, 1), st.none()),
    ),
    max_size=30,
)


@settings(max_examples=200, deadline=None)
@given(steps)
def test_coming_is_what_requests_in_flight_still_lack(script):
    coming, live = ComingBlocks(10.0), []
    announced: dict[int, set[bytes]] = {0: set(), 1: set()}
    for action, number, chain in script:
        if action == "claim":
            there = announced[number] | held_by(coming, number)
            held = 0
            while held < len(chain) and chain[held] in there:
                held += 1
            live.append(coming.claim(number, chain, held, now=0.0))
        elif action == "end" and live:
            claim = live.pop(number % len(live))
            coming.end(claim)
            coming.end(claim)
        elif action == "stored":
            announced[number].update(chain)
            coming.stored(number, chain)
        elif action == "drop":
            coming.drop(number)
            live = [claim for claim in live if claim.slot != number]
        coming.check()
        for slot in (0, 1):
            wanted = {block for claim in live if claim.slot == slot for block in claim.chain}
            assert held_by(coming, slot) == wanted - announced[slot]
