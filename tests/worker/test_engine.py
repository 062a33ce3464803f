"""The engine's promises to a request, and the failures that other engines are known for."""

import pytest

from cluster.blocks import hash_blocks, join_hashes, pack_tokens
from tests.worker.recording_runner import ROOT, Rig
from tests.worker.scheduling import prompt_of


def hashes_of(tokens, root=ROOT, block_size=4):
    return hash_blocks(root, pack_tokens(tokens), block_size)


# Failures known from other engines


def test_a_hash_is_not_visible_before_its_block_is_written():
    rig = Rig(chunk_tokens=4)
    rig.add("a", prompt_of(12), max_tokens=1)
    seen = []
    execute = rig.runner.execute

    def watching(batch):
        seen.append(rig.core.cached_blocks())
        return execute(batch)

    rig.runner.execute = watching
    rig.drain()
    hashes = hashes_of(prompt_of(12))
    assert seen == [hashes[:0], hashes[:1], hashes[:2]]
    assert rig.core.cached_blocks() == hashes


def test_a_matched_block_is_not_evicted_to_make_room_for_the_same_request():
    """The pool is full of cached blocks, the matched one is the oldest of all."""
    rig = Rig(capacity_blocks=4)
    rig.add("a", prompt_of(4), max_tokens=1)
    rig.drain()
    rig.add("b", prompt_of(12, first=3), max_tokens=1)
    rig.drain()
    assert rig.core.load().cached_blocks == 4
    rig.add("c", [*prompt_of(4), *prompt_of(9, first=5)], max_tokens=1)
    rig.drain()
    assert rig.hit_tokens("c") == 4


def test_a_match_is_looked_up_again_at_every_attempt():
    """What was cached when the request came is evicted before it can be admitted."""
    rig = Rig(capacity_blocks=8)
    rig.add("stem", prompt_of(8), max_tokens=1)
    rig.drain()
    rig.add("runs", prompt_of(16, first=3), max_tokens=9, ignore_eos=True)
    rig.step()
    rig.add("waits", [*prompt_of(8), *prompt_of(12, first=4)], max_tokens=1)
    assert rig.core.load().pending_prefill_tokens == 12
    for _ in range(8):
        rig.step()
        rig.core.check()
    assert rig.core.load().waiting == 1
    rig.core.flush()
    assert rig.core.load().pending_prefill_tokens == 20
    rig.drain()
    assert rig.hit_tokens("waits") == 0


def test_a_match_grows_while_the_request_waits():
    rig = Rig(max_batch_size=1)
    rig.add("a", prompt_of(8), max_tokens=1)
    rig.add("b", [*prompt_of(8), 5], max_tokens=1)
    rig.drain()
    assert rig.hit_tokens("b") == 8


@pytest.mark.parametrize(("length", "hit"), [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8)])
def test_a_hit_on_the_full_prompt_leaves_its_last_block_to_compute(length, hit):
    rig = Rig()
    rig.add("a", prompt_of(length), max_tokens=5)
    rig.drain()
    rig.add("b", prompt_of(length), max_tokens=5)
    rig.drain()
    assert rig.hit_tokens("b") == hit
    assert rig.tokens["a"] == rig.tokens["b"]


@pytest.mark.parametrize("steps", range(9))
def test_a_cancel_at_any_step_gives_everything_back(steps):
    rig = Rig(chunk_tokens=3, max_batch_size=2)
    for name in ("first", "same", "other"):
        rig.add(name, prompt_of(10, first=7 if name == "other" else 1), max_tokens=4)
    for _ in range(steps):
        rig.step()
    for name in ("first", "same", "other"):
        if name not in rig.final:
            assert rig.cancel(name)
            rig.core.check()
        assert not rig.core.cancel(name)
    load = rig.core.load()
    assert (load.running, load.waiting, load.pending_prefill_tokens) == (0, 0, 0)
    assert load.free_blocks == rig.config.capacity_blocks
    assert rig.core.step() == []
    rig.add("again", prompt_of(10))
    rig.drain()


def test_a_cancelled_preempted_sequence_is_gone():
    rig = Rig(capacity_blocks=6)
    rig.add("early", prompt_of(4), max_tokens=16, ignore_eos=True)
    rig.add("late", prompt_of(4, first=3), max_tokens=16, ignore_eos=True)
    while not rig.core.stats().preemptions:
        rig.step()
    assert rig.cancel("late")
    rig.drain()


def test_one_of_several_that_share_a_prefix_ends_while_the_others_run():
    rig = Rig()
    rig.add("a", [*prompt_of(12), 3], max_tokens=1)
    rig.add("b", [*prompt_of(12), 4], max_tokens=9, ignore_eos=True)
    rig.add("c", [*prompt_of(12), 5], max_tokens=9, ignore_eos=True)
    rig.drain()
    assert rig.core.stats().reused_tokens == 24


def test_namespaces_never_share():
    rig = Rig()
    roots = [bytes([number]) * 32 for number in range(3)]
    for number, root in enumerate(roots):
        rig.add(str(number), prompt_of(12), root=root)
        rig.drain()
    assert [rig.hit_tokens(str(number)) for number in range(3)] == [0, 0, 0]
    for number, root in enumerate(roots):
        rig.add(f"again-{number}", prompt_of(12), root=root)
    rig.drain()
    assert [rig.hit_tokens(f"again-{number}") for number in range(3)] == [8, 8, 8]


def test_no_eviction_is_told_while_the_content_is_still_cached():
    """Both compute the same last block at once; the published set has it exactly once."""
    rig = Rig(capacity_blocks=6)
    rig.add("a", prompt_of(4), max_tokens=1)
    rig.add("b", prompt_of(4), max_tokens=1)
    rig.drain()
    assert rig.core.stats().duplicates == 1
    assert rig.published == set(hashes_of(prompt_of(4)))
    rig.add("c", prompt_of(16, first=3), max_tokens=1)
    rig.drain()
    assert set(hashes_of(prompt_of(4))) <= rig.published
    assert rig.core.stats().evictions == 0


# Collisions


def constant_hash(parent, packed):
    return b"same hash, always"[:16]


def test_a_collision_is_a_miss_is_counted_and_never_a_wrong_answer():
    rig = Rig(hash_block=constant_hash)
    rig.add("a", prompt_of(8), max_tokens=6)
    rig.drain()
    rig.add("b", prompt_of(8, first=3), max_tokens=6)
    rig.drain()
    assert rig.hit_tokens("b") == 0
    assert rig.core.stats().collisions > 0
    rig.add("c", prompt_of(9), max_tokens=6)
    rig.drain()
    assert rig.hit_tokens("c") == 4  # only the first block of "a" could enter


def test_a_collision_between_namespaces_is_a_miss():
    rig = Rig(hash_block=lambda parent, packed: packed)
    rig.add("a", prompt_of(9))
    rig.drain()
    rig.add("b", prompt_of(9), root=b"q" * 32)
    rig.drain()
    assert rig.hit_tokens("b") == 0
    assert rig.core.stats().collisions > 0


# What is cached


def test_full_blocks_of_the_answer_serve_the_next_turn():
    rig = Rig()
    rig.add("turn 1", prompt_of(6), max_tokens=7, ignore_eos=True)
    rig.drain()
    history = prompt_of(6) + rig.tokens["turn 1"]
    rig.add("turn 2", [*history, 3, 3], max_tokens=1)
    rig.drain()
    assert rig.hit_tokens("turn 2") == 12


@pytest.mark.parametrize(("max_tokens", "blocks"), [(4, 1), (5, 2)])
def test_the_newest_token_is_not_computed_so_its_block_is_not_cached(max_tokens, blocks):
    rig = Rig()
    rig.add("a", prompt_of(4), max_tokens=max_tokens, ignore_eos=True)
    rig.drain()
    assert rig.core.load().cached_blocks == blocks


def test_precomputed_hashes_serve_like_computed_ones():
    rig = Rig()
    rig.add("a", prompt_of(10), block_hashes=join_hashes(hashes_of(prompt_of(10))))
    rig.drain()
    rig.add("b", prompt_of(10))
    rig.drain()
    assert rig.hit_tokens("b") == 8


def test_without_prefix_caching_nothing_is_cached_or_reused():
    rig = Rig(prefix_caching=False)
    for name in ("a", "b"):
        rig.add(name, prompt_of(12), block_hashes=join_hashes(hashes_of(prompt_of(12))))
        rig.drain()
    assert rig.hit_tokens("b") == 0
    assert rig.core.cached_blocks() == []


# Flush


def test_a_flush_empties_the_cache_while_a_request_goes_on():
    rig = Rig(chunk_tokens=4)
    rig.add("before", prompt_of(8), max_tokens=1)
    rig.drain()
    rig.add("a", prompt_of(20, first=3), max_tokens=12, ignore_eos=True)
    for _ in range(3):
        rig.step()
    rig.core.flush()
    assert rig.core.cached_blocks() == []
    assert rig.publish() == set()
    rig.drain()
    assert rig.core.cached_blocks() == []  # nothing of "a" would have its parents
    rig.add("b", prompt_of(20, first=3), max_tokens=1)
    rig.drain()
    assert rig.hit_tokens("b") == 0
    assert rig.core.cached_blocks() == hashes_of(prompt_of(20, first=3))


def test_what_is_computed_afresh_after_a_flush_is_cached_beside_a_running_request():
    rig = Rig()
    rig.add("old", prompt_of(8), max_tokens=10, ignore_eos=True)
    rig.step()
    rig.core.flush()
    rig.add("new", prompt_of(8), max_tokens=1)
    rig.step()
    assert rig.hit_tokens("new") == 0
    rig.add("newer", prompt_of(9), max_tokens=1)
    rig.drain()
    assert rig.hit_tokens("newer") == 8


def test_a_sequence_preempted_after_a_flush_caches_again():
    rig = Rig(capacity_blocks=6)
    rig.add("early", prompt_of(4), max_tokens=12, ignore_eos=True)
    rig.add("late", prompt_of(4, first=3), max_tokens=12, ignore_eos=True)
    rig.step()
    rig.core.flush()
    rig.drain()
    assert rig.core.stats().preemptions > 0
    late = prompt_of(4, first=3) + rig.tokens["late"]
    assert set(rig.core.cached_blocks()) == set(hashes_of(late[:-1]))
