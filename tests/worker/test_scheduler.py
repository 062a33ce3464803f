"""What is computed in which step."""

import pytest

from tests.worker.recording_runner import Rig
from tests.worker.scheduling import Counting, last, prompt_of, shapes
from worker.engine_config import EngineConfig


def test_a_prompt_is_computed_in_chunks_and_sampled_after_its_last():
    rig = Rig(chunk_tokens=4)
    rig.add("a", prompt_of(10), max_tokens=3)
    rig.drain()
    assert shapes(rig) == [
        {"a": (0, 4, False)},
        {"a": (4, 4, False)},
        {"a": (8, 2, True)},
        {"a": (10, 1, True)},
        {"a": (11, 1, True)},
    ]


@pytest.mark.parametrize("chunk", [0, 1, 3, 4, 5, 16, 1000])
@pytest.mark.parametrize("budget", [1, 3, 16, 100])
def test_outputs_do_not_depend_on_how_prompts_are_cut(chunk, budget):
    rig = Rig(chunk_tokens=chunk, token_budget=budget)
    rig.add("a", prompt_of(21), max_tokens=6)
    rig.add("b", [*prompt_of(13), 5, 5], max_tokens=6)
    rig.add("c", prompt_of(21, first=3), max_tokens=6)
    rig.drain()


def test_decodes_come_first_then_prefills_begun_then_admissions():
    rig = Rig(token_budget=6)
    rig.add("decodes", prompt_of(3), max_tokens=10)
    rig.step()
    rig.add("prefills", prompt_of(9, first=3))
    rig.add("comes", prompt_of(9, first=4))
    rig.step()
    assert last(rig) == {"decodes": (3, 1, True), "prefills": (0, 5, False)}
    rig.step()
    assert last(rig) == {
        "decodes": (4, 1, True),
        "prefills": (5, 4, True),
        "comes": (0, 1, False),
    }


def test_a_small_budget_serves_who_was_first():
    rig = Rig(token_budget=1)
    rig.add("a", [1], max_tokens=3)
    rig.add("b", [3], max_tokens=3)
    rig.drain()
    assert [list(batch) for batch in shapes(rig)] == [["a"]] * 3 + [["b"]] * 3


def test_no_more_run_than_the_batch_takes():
    rig = Rig(max_batch_size=2)
    for number in range(5):
        rig.add(str(number), prompt_of(5, first=number))
    rig.step()
    assert list(last(rig)) == ["0", "1"]
    assert (rig.core.load().running, rig.core.load().waiting) == (2, 3)
    rig.drain()


def test_only_the_suffix_after_a_hit_is_computed():
    rig = Rig()
    rig.add("a", prompt_of(12))
    rig.drain()
    rig.add("b", [*prompt_of(12), 6, 6, 6])
    rig.step()
    assert last(rig) == {"b": (12, 3, True)}
    rig.drain()
    assert rig.hit_tokens("b") == 12


def test_a_batch_item_refers_to_the_live_block_table():
    rig = Rig()
    seen = []
    execute = rig.runner.execute
    rig.runner.execute = lambda batch: seen.append(batch[0].block_table) or execute(batch)
    rig.add("a", prompt_of(9))
    rig.step()
    assert seen[0] is rig.core._scheduler.running["a"].block_table


def test_a_prompt_that_does_not_fit_yet_keeps_those_behind_it_waiting():
    rig = Rig(capacity_blocks=8)
    rig.add("runs", prompt_of(16), max_tokens=4)
    rig.step()
    rig.add("large", prompt_of(20, first=3))
    rig.add("small", [4])
    rig.step()
    assert list(last(rig)) == ["runs"]
    rig.drain()
    first_seen = {}
    for step, batch in enumerate(shapes(rig)):
        for name in batch:
            first_seen.setdefault(name, step)
    assert first_seen["large"] <= first_seen["small"]
    assert rig.core.stats().preemptions == 0


def test_admission_leaves_a_block_for_each_that_runs():
    rig = Rig(capacity_blocks=5)
    rig.add("runs", prompt_of(4), max_tokens=6, ignore_eos=True)
    rig.step()
    rig.step()
    rig.add("next", prompt_of(12, first=3))
    rig.step()
    load = rig.core.load()
    assert (load.waiting, load.free_blocks) == (1, 3)  # they would do, but "runs" will want one
    rig.drain()
    assert rig.core.stats().preemptions == 0


def test_an_attempt_that_must_fail_leaves_the_order_of_eviction_as_it_was():
    """Who waits for room does not keep its own match fresh by looking at it in every step."""
    rig = Rig(capacity_blocks=12)
    rig.add("match", prompt_of(8), max_tokens=1)
    rig.drain()
    rig.add("newer", prompt_of(8, first=3), max_tokens=1)
    rig.drain()
    rig.add("runs", prompt_of(8, first=4), max_tokens=20, ignore_eos=True)
    rig.step()
    order = rig.core._pool.kept_blocks()
    assert len(order) == 4
    rig.add("waits", [*prompt_of(8), *prompt_of(28, first=5)])
    for _ in range(3):
        rig.step()
        assert rig.core.load().waiting == 1
    assert rig.core._pool.kept_blocks() == order
    rig.drain()


def test_alone_a_request_may_take_the_whole_pool():
    rig = Rig(capacity_blocks=3)
    rig.add("a", prompt_of(9), max_tokens=9, ignore_eos=True)
    rig.step()
    assert rig.core.load().free_blocks == 0
    rig.drain()


def test_the_latest_arrived_is_preempted_keeps_its_outputs_and_comes_back_first():
    rig = Rig(capacity_blocks=6, max_batch_size=2)
    rig.add("early", prompt_of(4), max_tokens=16, ignore_eos=True)
    rig.add("late", prompt_of(4, first=3), max_tokens=16, ignore_eos=True)
    rig.add("queued", prompt_of(4, first=4), max_tokens=2)
    while not rig.core.stats().preemptions:
        rig.step()
        rig.core.check()
    scheduler = rig.core._scheduler
    assert list(scheduler.running) == ["early"]
    assert list(scheduler.waiting) == ["late", "queued"]
    outputs = len(rig.tokens["late"])
    assert outputs >= 4
    victim = scheduler.waiting["late"]
    assert (victim.computed_tokens, victim.block_table, victim.settled_blocks) == (0, [], 0)
    while "late" not in last(rig):
        rig.step()
    start, count, sampled = last(rig)["late"]
    assert (start + count, sampled) == (4 + outputs, True)
    rig.drain()
    assert len(rig.tokens["late"]) == 16


def test_a_preempted_sequence_looks_its_hit_up_afresh():
    """What it had cached is evicted while it waits: it must compute everything again."""
    rig = Rig(capacity_blocks=6)
    rig.add("early", prompt_of(4), max_tokens=20, ignore_eos=True)
    rig.add("late", prompt_of(8, first=3), max_tokens=12, ignore_eos=True)
    while not rig.core.stats().preemptions:
        rig.step()
    while rig.core.load().waiting:
        rig.step()
        rig.core.check()
    start, count, _ = last(rig)["late"]
    cached = rig.core.stats().resumed_tokens
    assert (start, start + count) == (cached, 8 + len(rig.tokens["late"]) - last(rig)["late"][2])
    assert rig.core.stats().evictions > 0
    rig.drain()
    assert rig.hit_tokens("late") == 0


def test_a_victim_that_was_planned_already_is_taken_out_of_the_step():
    """ "other" arrived after "held" but runs before it, so it is planned first and preempted."""
    rig = Rig(capacity_blocks=10, chunk_tokens=4)
    rig.add("holder", [*prompt_of(8), 3], max_tokens=1)
    rig.add("held", [*prompt_of(8), 4], max_tokens=20, ignore_eos=True)
    rig.add("other", prompt_of(4, first=5), max_tokens=30, ignore_eos=True)
    while not rig.core.stats().preemptions:
        rig.step()
        rig.core.check()
    assert last(rig).keys() == {"held"}
    assert list(rig.core._scheduler.waiting) == ["other"]
    rig.drain()


class TestLoad:
    def test_pending_prefill_tokens_at_every_stage(self):
        rig = Rig(chunk_tokens=4, max_batch_size=1)
        rig.add("a", prompt_of(10), max_tokens=3)
        pending = [rig.core.load().pending_prefill_tokens]
        for _ in range(4):
            rig.step()
            pending.append(rig.core.load().pending_prefill_tokens)
        assert pending == [10, 6, 2, 0, 0]
        rig.drain()
        rig.add("b", [*prompt_of(10), 5, 5], max_tokens=1)
        assert rig.core.load().pending_prefill_tokens == 4  # eight of twelve are cached
        rig.cancel("b")
        assert rig.core.load().pending_prefill_tokens == 0

    def test_what_is_recomputed_after_preemption_is_pending(self):
        rig = Rig(capacity_blocks=6)
        rig.add("early", prompt_of(4), max_tokens=16, ignore_eos=True)
        rig.add("late", prompt_of(4, first=3), max_tokens=16, ignore_eos=True)
        while not rig.core.stats().preemptions:
            rig.step()
        tokens = 4 + len(rig.tokens["late"])
        pending = rig.core.load().pending_prefill_tokens
        assert 0 < pending <= tokens
        assert (tokens - pending) % 4 == 0

    def test_what_another_computes_is_not_pending_twice(self):
        rig = Rig(chunk_tokens=4)
        rig.add("a", [*prompt_of(16), 3])
        rig.add("b", [*prompt_of(16), 4])
        assert rig.core.load().pending_prefill_tokens == 34
        rig.step()
        assert rig.core.load().pending_prefill_tokens == 13 + 1

    def test_blocks_free_and_cached(self):
        rig = Rig(capacity_blocks=10)
        rig.add("a", prompt_of(9), max_tokens=9, ignore_eos=True)
        rig.step()
        load = rig.core.load()
        assert (load.running, load.waiting, load.free_blocks, load.cached_blocks) == (1, 0, 7, 2)
        rig.drain()
        load = rig.core.load()
        assert (load.running, load.free_blocks, load.cached_blocks) == (0, 10, 4)

    def test_load_does_not_look_into_the_queue(self):
        rig = Rig()
        for number in range(20):
            rig.add(str(number), prompt_of(9, first=number))
        rig.core._cache.probe = None
        assert rig.core.load().pending_prefill_tokens == 180


def test_an_attempt_at_admission_looks_at_few_blocks_of_a_long_prompt():
    rig = Rig(capacity_blocks=5000, context_tokens=20_000, token_budget=20_000, block_size=4)
    rig.add("a", prompt_of(16_000), max_tokens=1)
    rig.drain()
    rig.add("large", prompt_of(16_400), max_tokens=1)
    hashes = Counting(rig.core._scheduler.waiting["large"].hashes)
    probe = rig.core._cache.probe(hashes, len(hashes))
    assert probe.cached == 4000
    assert hashes.looks < 40


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("block_size", 0),
        ("capacity_blocks", 0),
        ("context_tokens", 0),
        ("max_batch_size", 0),
        ("token_budget", 0),
        ("max_waiting", 0),
        ("chunk_tokens", -1),
    ],
)
def test_sizes_that_cannot_work_are_refused(field, value):
    sizes = {
        "block_size": 4,
        "capacity_blocks": 4,
        "context_tokens": 4,
        "max_batch_size": 4,
        "token_budget": 4,
    }
    with pytest.raises(ValueError, match=field):
        EngineConfig(**(sizes | {field: value}))
