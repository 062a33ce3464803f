"""The engine's promises to a request, and the failures that other engines are known for."""

import pytest

from cluster.blocks import hash_blocks, join_hashes, pack_tokens
from cluster.protocol import RequestError
from tests.worker.recording_runner import ROOT, VOCABULARY, Rig
from worker.engine import InvariantError


def prompt_of(length, first=1):
    return [first] + [2] * (length - 1)


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


# How requests end


def test_finish_reasons():
    rig = Rig(context_tokens=20, eos_token_ids=list(range(VOCABULARY)))
    rig.add("stop", prompt_of(5), max_tokens=9)
    rig.add("length", prompt_of(5), max_tokens=9, ignore_eos=True)
    rig.add("context", prompt_of(15), max_tokens=99, ignore_eos=True)
    rig.drain()
    assert {name: output.finish_reason for name, output in rig.final.items()} == {
        "stop": "stop",
        "length": "length",
        "context": "length",
    }
    assert {name: len(tokens) for name, tokens in rig.tokens.items()} == {
        "stop": 1,
        "length": 9,
        "context": 5,
    }


def test_an_end_token_as_last_token_is_a_stop():
    rig = Rig(eos_token_ids=list(range(VOCABULARY)))
    rig.add("a", prompt_of(5), max_tokens=1)
    rig.drain()
    assert rig.final["a"].finish_reason == "stop"


def test_a_pool_smaller_than_the_context_bounds_a_sequence():
    rig = Rig(capacity_blocks=3)
    rig.add("a", prompt_of(11), max_tokens=99, ignore_eos=True)
    rig.drain()
    assert rig.final["a"].finish_reason == "length"
    assert len(rig.tokens["a"]) == 1
    with pytest.raises(RequestError, match=r"12 tokens.*11 at most"):
        rig.add("b", prompt_of(12))


@pytest.mark.parametrize(
    ("prompt", "fields", "status", "says"),
    [
        ([], {}, 400, "empty"),
        (prompt_of(200), {}, 400, "200 tokens.*199 at most"),
        ([1], {"max_tokens": 0}, 400, "max_tokens"),
        ([1], {"root": b"short"}, 500, "namespace root"),
        (prompt_of(8), {"block_hashes": b"h" * 16}, 500, "1 block hashes for 2"),
        (prompt_of(8), {"block_hashes": b"h" * 15}, 500, "multiple of 16"),
    ],
)
def test_a_request_that_cannot_run_is_refused_and_leaves_no_trace(prompt, fields, status, says):
    rig = Rig(capacity_blocks=100)
    with pytest.raises(RequestError, match=says) as refused:
        rig.add("a", prompt, **fields)
    assert refused.value.status == status
    assert not rig.core.has_work()
    assert rig.core.take_changes().received == []
    rig.add("a", [1, 2])
    rig.drain()


def test_an_id_in_use_is_refused_and_free_again_afterwards():
    rig = Rig()
    rig.add("a", prompt_of(5))
    with pytest.raises(RequestError, match="in use"):
        rig.core.add(rig.requests["a"][0])
    rig.drain()
    rig.core.add(rig.requests["a"][0])
    assert rig.core.has_work()


def test_a_full_queue_is_a_429():
    rig = Rig(max_waiting=2, max_batch_size=1)
    rig.add("a", [1])
    rig.add("b", [1])
    with pytest.raises(RequestError) as refused:
        rig.add("c", [1])
    assert (refused.value.status, refused.value.code) == (429, "queue_full")
    rig.step()
    rig.add("c", [1])
    rig.drain()


def test_a_failing_runner_ends_its_batch_with_errors_and_the_engine_goes_on():
    rig = Rig(max_batch_size=2, chunk_tokens=4)
    rig.add("a", prompt_of(12))
    rig.add("b", prompt_of(12, first=3))
    rig.add("c", prompt_of(12, first=4))
    rig.step()
    rig.runner.fail_next = RuntimeError("out of memory")
    outputs = rig.step()
    assert [(o.request_id, o.finish_reason) for o in outputs] == [("a", "error"), ("b", "error")]
    assert all("out of memory" in o.error for o in outputs)
    assert isinstance(rig.core.last_failure, RuntimeError)
    assert rig.core.load().cached_blocks == 2  # of the first step only
    rig.drain()
    assert rig.final["c"].finish_reason == "length"
    assert rig.core.stats().failed_steps == 1


@pytest.mark.parametrize("answer", [[], [None], [1, 1]])
def test_a_runner_that_answers_wrongly_is_a_failure_not_a_hang(answer):
    rig = Rig()
    rig.add("a", prompt_of(5))
    rig.strict = False
    rig.runner.execute = lambda batch: answer
    (output,) = rig.step()
    assert output.finish_reason == "error"
    assert isinstance(rig.core.last_failure, InvariantError)
    rig.drain()


def test_work_that_cannot_be_scheduled_raises_instead_of_hanging():
    rig = Rig()
    rig.add("a", prompt_of(5))
    rig.core._scheduler.waiting.clear()
    with pytest.raises(InvariantError, match="nothing can be scheduled"):
        rig.step()


def test_received_names_every_request_once():
    rig = Rig()
    rig.add("a", [1])
    rig.add("b", [1])
    assert rig.core.take_changes().received == ["a", "b"]
    rig.cancel("a")
    rig.add("c", [1])
    assert rig.core.take_changes().received == ["c"]
    assert rig.core.take_changes().received == []


def test_statistics_add_up():
    rig = Rig(chunk_tokens=5)
    prompts = {
        "cold": prompt_of(18),
        "same": prompt_of(18),
        "part": [*prompt_of(9), 4, 4, 4, 4],
        "other": prompt_of(7, first=5),
    }
    for name, prompt in prompts.items():
        rig.add(name, prompt, max_tokens=2, ignore_eos=True)
        rig.drain()
    stats = rig.core.stats()
    assert (stats.hits, stats.partial_hits, stats.misses) == (1, 1, 2)
    assert stats.reused_tokens == 16 + 8
    tokens = sum(len(prompt) for prompt in prompts.values())
    assert stats.computed_prompt_tokens + stats.reused_tokens == tokens
    assert stats.generated_tokens == 8
    assert (stats.preemptions, stats.collisions, stats.resumed_tokens) == (0, 0, 0)
    assert stats.steps == len(rig.runner.batches)


def test_the_recording_runner_sees_a_wrong_block_table():
    """The net under all these tests: a swapped block must not go unseen."""
    rig = Rig()
    rig.add("a", prompt_of(12), max_tokens=4, ignore_eos=True)
    rig.step()
    table = rig.core._scheduler.running["a"].block_table
    table[0], table[1] = table[1], table[0]
    with pytest.raises(AssertionError, match="wrong KV at 0"):
        rig.step()
