"""The prefix index finds what plain sets would find."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from router.held_blocks import HeldBlocks
from router.prefix_index import IndexCheckError, PrefixIndex
from tests.router.support import chain_of

A = chain_of(range(40))
SIZE = 128

# chains over a tiny alphabet share prefixes often; block size 1 makes each token a block
chains = st.lists(st.integers(0, 2), max_size=9).map(lambda tokens: chain_of(tokens, block_size=1))
slots = st.sampled_from([0, 1, 2, 7, 63, 64, 100])
operations = st.lists(
    st.tuples(st.sampled_from(["store", "evict", "replace", "drop", "ask"]), slots, chains),
    max_size=25,
)


def naive_depth(held: set[bytes], chain: list[bytes]) -> int:
    depth = 0
    while depth < len(chain) and chain[depth] in held:
        depth += 1
    return depth


def extends(chain: list[bytes], block: bytes, others: list[list[bytes]]) -> set[bytes]:
    """`block` and everything that continues it in the known chains."""
    found = {block}
    for other in [chain, *others]:
        if block in other:
            found.update(other[other.index(block) :])
    return found


@pytest.mark.parametrize("few", [8, 0])
@settings(
    max_examples=200,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(operations, st.lists(chains, min_size=1, max_size=6))
def test_depths_equal_those_of_plain_sets(monkeypatch, few, steps, queries):
    for module in ("prefix_index", "bitmask"):  # 0: every slot is one of many
        monkeypatch.setattr(f"router.{module}.FEW", few)
    index, model = PrefixIndex(), {}
    seen = [chain for _, _, chain in steps]
    for action, slot, chain in steps:
        held = model.setdefault(slot, set())
        if action == "store":
            index.store(slot, chain)
            index.store(slot, chain)
            held.update(chain)
        elif action == "evict" and chain:
            gone = extends(chain, chain[-1], seen)  # a leaf goes with all that continues it
            index.evict(slot, gone)
            index.evict(slot, gone)
            held -= gone
        elif action == "replace":
            index.replace(slot, chain)
            model[slot] = set(chain)
        elif action == "drop":
            index.drop(slot)
            model[slot] = set()
        elif action == "ask" and chain:  # what it remembers of this is no truth for what comes
            limit = max(1, slot % len(chain))
            depths = index.depths(chain, sum(1 << each for each in model), SIZE, limit, unit=16)
            for each, blocks in model.items():
                assert depths[each] == 16 * min(limit, naive_depth(blocks, chain))
        index.check()
    asked = sum(1 << slot for slot in model)
    for query in (queries + seen) * 2:
        depths = index.depths(query, asked, SIZE)
        assert {slot: depths[slot] for slot in model} == {
            slot: naive_depth(held, query) for slot, held in model.items()
        }
        assert depths.sum() == sum(depths[slot] for slot in model)
    for slot, held in model.items():
        assert index.blocks_of(slot) == held
        assert index.count(slot) == len(held)


def test_slots_outside_the_mask_are_not_reported():
    index = PrefixIndex()
    index.store(3, A)
    index.store(5, A)
    assert index.depths(A, 1 << 5, 8).tolist() == [0, 0, 0, 0, 0, 10, 0, 0]
    assert index.depths(A, 0, 8).tolist() == [0] * 8


def test_a_block_that_is_named_twice_is_evicted_once():
    index = PrefixIndex()
    index.store(0, [*A, *A])
    index.store(0, A)
    assert (index.count(0), index.pairs) == (10, 10)
    index.evict(0, [A[9], A[9], A[8], b"unknown"])
    assert (index.count(0), index.pairs) == (8, 8)
    index.check()
    index.store(0, A)
    assert index.depths(A, 1, 1).tolist() == [10]
    index.check()


def test_many_slots_of_one_depth_and_an_empty_chain():
    index = PrefixIndex()
    for slot in range(100):
        index.store(slot, A[: 3 + slot % 2])
    depths = index.depths(A, (1 << 100) - 1, 128)
    assert depths[:100].tolist() == [3, 4] * 50
    assert not depths[100:].any()
    assert not index.depths([], (1 << 100) - 1, 128).any()


def closed(index, slot, chains):
    """Whether what the index holds of `chains` for a slot is a prefix of each."""
    return all(
        naive_depth(index.blocks_of(slot), chain)
        == sum(block in index.blocks_of(slot) for block in chain)
        for chain in chains
    )


def test_beyond_its_bound_the_index_drops_the_deepest_blocks_and_says_so():
    index = PrefixIndex(max_pairs=25)
    other = chain_of(range(100, 140))
    index.store(0, A)
    index.store(1, A)
    assert index.problem == ""
    index.store(0, other)  # 10 + 10 + 10
    assert index.pairs == 25
    assert index.depths(other, 0b11, 2).tolist() == [7, 0]  # equally deep: the latest stored go
    assert index.depths(A, 0b11, 2).tolist() == [8, 10]
    assert (index.count(0), index.dropped(0), index.dropped(1)) == (15, 5, 0)
    assert "leaves out 5 cached blocks" in index.problem
    assert "gateway.index_max_pairs" in index.problem
    index.check()
    # the worker evicts what the index no longer had, then what it had
    index.evict(0, other[7:])
    assert (index.count(0), index.dropped(0)) == (15, 2)
    index.evict(0, A[8:])
    assert (index.count(0), index.dropped(0), index.problem) == (15, 0, "")
    index.evict(0, other[:7])
    index.store(1, other[:3])
    assert index.depths(other, 0b11, 2).tolist() == [0, 3]
    index.check()


def test_a_full_index_still_learns_where_new_prefixes_begin():
    index, prefixes = PrefixIndex(max_pairs=64), []
    for number in range(16):
        prefix = chain_of([number] * 400)  # 25 blocks
        prefixes.append(prefix)
        index.store(0, prefix)
        assert index.depths(prefix, 1, 1).item() >= 3
    depths = [index.depths(prefix, 1, 1).item() for prefix in prefixes]
    assert set(depths) <= {3, 4, 5}
    assert sum(depths) == index.pairs == 63  # 64, and a 64th of it to spare
    index.check()


def test_it_looks_through_a_worker_once_for_many_blocks(monkeypatch):
    index, looks = PrefixIndex(max_pairs=6400), []
    drop = HeldBlocks.drop_deepest
    monkeypatch.setattr(
        HeldBlocks, "drop_deepest", lambda held, count: looks.append(count) or drop(held, count)
    )
    for block in chain_of(range(10_000), block_size=1):
        index.store(0, [block])
    assert len(looks) == -(-(10_000 - 6400) // 101)
    assert index.pairs <= 6400


def test_a_worker_with_little_is_not_kept_out_by_one_with_much():
    index = PrefixIndex(max_pairs=12)
    index.store(0, A)
    index.store(1, A)
    assert index.depths(A, 0b11, 2).tolist() == [6, 6]
    index.drop(0)
    index.replace(1, A)
    assert (index.count(1), index.dropped(1), index.problem) == (10, 0, "")
    index.check()


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(slots, chains), max_size=25),
    st.integers(1, 12),
)
def test_a_bounded_index_never_claims_more_than_a_worker_holds(stored, bound):
    index, model = PrefixIndex(max_pairs=bound), {}
    for slot, chain in stored:
        index.store(slot, chain)
        model.setdefault(slot, set()).update(chain)
        index.check()
        assert index.pairs <= bound
    asked = sum(1 << slot for slot in model)
    for _, query in stored:
        depths = index.depths(query, asked, SIZE)
        for slot, held in model.items():
            assert depths[slot] <= naive_depth(held, query)
            assert index.count(slot) + index.dropped(slot) >= len(held)
    for slot in model:
        assert closed(index, slot, [chain for _, chain in stored])


def test_a_set_with_a_hole_claims_a_boundary_and_never_more_than_it_holds():
    for hole in range(len(A)):
        for held in range(hole, len(A) + 1):
            index = PrefixIndex()
            index.store(0, [block for block in A[:held] if block != A[hole]])
            depth = int(index.depths(A, 1, 1)[0])
            assert depth <= held
            assert depth == 0 or index.holds(0, A[depth - 1])
            assert depth == len(A) or not index.holds(0, A[depth])


def test_check_names_a_mask_that_lies():
    index = PrefixIndex()
    index.store(0, A)
    index._shards[A[2][0]][A[2]] = 0b100
    with pytest.raises(IndexCheckError, match=f"1 of 10 blocks.*{A[2].hex()}"):
        index.check()
