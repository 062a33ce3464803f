"""How requests end: answered, refused, or failed, and what is counted of it."""

import pytest

from cluster.protocol import RequestError
from tests.worker.recording_runner import VOCABULARY, Rig
from tests.worker.scheduling import prompt_of
from worker.block_pool import InvariantError


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


def test_where_nothing_can_be_computed_the_batch_ends_with_errors_and_the_engine_goes_on():
    rig = Rig(max_batch_size=2, chunk_tokens=4)
    rig.add("a", prompt_of(12))
    rig.add("b", prompt_of(12, first=3))
    rig.add("c", prompt_of(12, first=4))
    rig.step()
    outputs = rig.fail()
    assert [(o.request_id, o.finish_reason) for o in outputs] == [("a", "error"), ("b", "error")]
    assert all("fell over" in o.error for o in outputs)
    assert isinstance(rig.core.last_failure, RuntimeError)
    assert rig.core.load().cached_blocks == 2  # of the first step only
    assert rig.core.dead_steps == 1
    rig.drain()
    assert rig.final["c"].finish_reason == "length"
    assert rig.core.stats().failed_steps == 1
    assert rig.core.dead_steps == 0


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
