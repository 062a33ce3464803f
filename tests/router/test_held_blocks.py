"""A worker's blocks stay in the order of their storing, whatever is evicted and comes again."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cluster.blocks import MAX_DEPTH, depth_of
from router.held_blocks import HeldBlocks

digits = st.integers(0, 9)
depths = st.sampled_from([0, 1, 2, 300, MAX_DEPTH])
block = st.builds(lambda n, depth: b"%014d" % n + depth.to_bytes(2, "little"), digits, depths)
blocks = st.lists(block, max_size=6, unique=True)
steps = st.lists(st.tuples(st.sampled_from(["store", "evict", "deepest", "read"]), blocks))


@pytest.mark.parametrize("at_least", [0, 3, 256])
@settings(
    max_examples=200,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(steps, st.booleans())
def test_it_holds_what_an_ordered_set_would(monkeypatch, at_least, script, alike):
    monkeypatch.setattr("router.held_blocks.MIN_GONE", at_least)
    held, model = HeldBlocks(), {}
    for action, these in script:
        if alike:  # hashes whose beginnings are the same
            these = [b"ab" + block[2:] for block in these]
        if action == "store":
            new = [block for block in these if block not in model]
            held.store(new)
            model.update(dict.fromkeys(new))
        elif action == "evict":
            known = [block for block in these if block in model]
            held.evict(known)
            model = {block: None for block in model if block not in these}
        elif action == "deepest":
            count = min(len(these), len(model))
            by_depth = sorted(enumerate(model), key=lambda each: (depth_of(each[1]), each[0]))
            deepest = {block for _, block in by_depth[len(model) - count :]}
            assert set(held.drop_deepest(count)) == deepest
            model = {block: None for block in model if block not in deepest}
        else:
            assert list(held.blocks()) == list(model)
        assert held.count == len(model)
    assert list(held.blocks()) == list(model)


def test_evicted_blocks_do_not_pile_up():
    held = HeldBlocks()
    for number in range(10_000):
        block = number.to_bytes(16, "big")
        held.store([block])
        held.evict([block])
    assert held._stored <= 512
    assert held.blocks() == []


def test_hashes_of_another_size_are_refused():
    with pytest.raises(ValueError, match="16 bytes"):
        HeldBlocks().store([b"short"])
    assert HeldBlocks().count == 0
