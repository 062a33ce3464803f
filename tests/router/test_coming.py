"""Blocks on their way count until their request ends or time is up."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.coming import ComingBlocks, ComingCheckError
from tests.router.support import chain_of

A = chain_of(range(24))  # 6 blocks
B = A[:3] + chain_of(range(12, 24), root=b"other")


def depths(coming, chain, slots=0b1111, size=8):
    found = np.zeros(size, dtype=np.int64)
    coming.raise_depths(found, [], chain, slots)
    coming.check()
    return found.tolist()


def test_a_claim_counts_for_its_worker_and_for_what_is_shared():
    coming = ComingBlocks(10.0)
    coming.claim(1, A, now=0.0)
    assert depths(coming, A) == [0, 6, 0, 0, 0, 0, 0, 0]
    assert depths(coming, A[:4]) == [0, 4, 0, 0, 0, 0, 0, 0]
    assert depths(coming, B) == [0, 3, 0, 0, 0, 0, 0, 0]
    assert depths(coming, [*A, b"longer"])[1] == 6
    assert depths(coming, chain_of([9] * 24)) == [0] * 8
    assert depths(coming, []) == [0] * 8
    assert depths(coming, A, slots=0b1101) == [0] * 8


def test_what_is_held_deeper_already_stays():
    coming = ComingBlocks(10.0)
    coming.claim(0, A[:4], now=0.0)
    found = np.array([2, 1])
    assert coming.raise_depths(found, [(2, 0b01), (1, 0b10)], A, 0b11) == 4
    assert found.tolist() == [4, 1]
    found = np.array([5, 1])
    assert coming.raise_depths(found, [(5, 0b01), (1, 0b10)], A, 0b11) == 0
    assert found.tolist() == [5, 1]


def test_the_longest_claim_of_a_worker_counts_and_what_ends_leaves_the_others():
    coming = ComingBlocks(10.0)
    first = coming.claim(0, A, now=0.0)
    second = coming.claim(0, A[:2], now=0.0)
    third = coming.claim(2, B, now=0.0)
    assert depths(coming, A)[:3] == [6, 0, 3]
    assert (coming.depth(0, A), coming.depth(1, A), coming.depth(2, A)) == (6, 0, 3)
    coming.end(first)
    coming.end(first)
    assert depths(coming, A)[:3] == [2, 0, 3]
    coming.end(third)
    assert depths(coming, A)[:3] == [2, 0, 0]
    coming.end(second)
    assert len(coming) == 0
    assert not coming._root.children


def test_a_look_up_is_forgotten_when_a_claim_ends():
    coming = ComingBlocks(10.0)
    first = coming.claim(0, A, now=0.0)
    assert depths(coming, B)[:2] == [3, 0]
    coming.end(first)
    coming.claim(1, B, now=0.0)
    assert depths(coming, B)[:2] == [0, 6]
    assert depths(coming, A)[:2] == [0, 3]


def test_many_workers_at_once():
    coming = ComingBlocks(10.0)
    claims = [coming.claim(slot, A if slot % 2 else B, now=0.0) for slot in range(100)]
    found = depths(coming, A, (1 << 100) - 1, 128)
    assert found == [3, 6] * 50 + [0] * 28
    for claim in claims[1::2]:
        coming.end(claim)
    assert depths(coming, A, (1 << 100) - 1, 128) == [3, 0] * 50 + [0] * 28


def test_claims_expire_in_order():
    coming = ComingBlocks(10.0)
    coming.claim(0, A, now=0.0)
    coming.claim(0, B, now=5.0)
    coming.expire(9.9)
    assert coming.depth(0, A) == 6
    coming.expire(10.0)
    assert coming.depth(0, A) == 3
    coming.expire(15.0)
    assert len(coming) == 0
    assert not coming._deadlines


def test_memory_is_bounded():
    coming = ComingBlocks(10.0, max_blocks=8)
    first = coming.claim(0, A, now=0.0)
    refused = coming.claim(1, B, now=0.0)
    assert depths(coming, B)[:2] == [3, 0]
    coming.end(refused)
    coming.end(first)
    coming.claim(1, B, now=0.0)
    assert coming.depth(1, B) == 6


def test_a_prompt_without_a_full_block_claims_nothing():
    coming = ComingBlocks(10.0)
    coming.end(coming.claim(0, [], now=0.0))
    assert len(coming) == 0


def test_check_names_what_the_tree_has_too_much():
    coming = ComingBlocks(10.0)
    claim = coming.claim(0, A, now=0.0)
    claim.chain = A[:5]
    with pytest.raises(ComingCheckError, match="5 blocks are claimed, but the tree has 6"):
        coming.check()


chains = st.lists(st.integers(0, 1), min_size=1, max_size=7).map(
    lambda tokens: chain_of(tokens, block_size=1)
)
slots = st.sampled_from([0, 1, 70])
steps = st.lists(
    st.one_of(
        st.tuples(st.just("claim"), slots, chains),
        st.tuples(st.just("look, claim"), slots, chains),
        st.tuples(st.just("end"), st.integers(0, 20), st.none()),
        st.tuples(st.just("drop"), slots, st.none()),
    ),
    max_size=40,
)


def common(one, other):
    return next(
        (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )


@settings(max_examples=300, deadline=None)
@given(steps, st.lists(chains, min_size=1, max_size=4))
def test_depths_are_the_longest_prefixes_of_requests_in_flight(script, queries):
    coming, live = ComingBlocks(10.0), []
    for action, number, chain in script:
        if "look" in action:  # as a decision does; and once too often before another's claim
            depths(coming, chain)
            if number:
                live.append((0, chain[:-1], coming.claim(0, chain[:-1], now=0.0)))
        if "claim" in action:
            live.append((number, chain, coming.claim(number, chain, now=0.0)))
        elif action == "end" and live:
            coming.end(live.pop(number % len(live))[2])
        elif action == "drop":
            coming.drop(number)
            live = [entry for entry in live if entry[0] != number]
        coming.check()
        for query in [*queries, *(entry[1] for entry in live[:2])]:
            found = depths(coming, query, (1 << 71) - 1, 72)
            wanted = [0] * 72
            for slot, claimed, _ in live:
                wanted[slot] = max(wanted[slot], common(claimed, query))
            assert found == wanted
            assert [coming.depth(slot, query) for slot in (0, 1, 70)] == [
                wanted[slot] for slot in (0, 1, 70)
            ]
            shared = [common(claimed, query) for _, claimed, _ in live]
            for depth in range(1, len(query) + 1):
                assert coming.sharing(query, depth) == sum(each >= depth for each in shared)
            assert coming.sharing(query, 0) == 0
    for _, _, claim in live:
        coming.end(claim)
    coming.check()
    assert len(coming) == 0
