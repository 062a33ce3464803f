"""A request that cannot be computed hurts itself alone."""

import pytest
import torch

from cluster.blocks import hash_blocks, pack_tokens
from cluster.protocol import RequestError
from tests.worker.recording_runner import Rig
from tests.worker.small_engine import BLOCK, MODEL, MODEL_CONFIG, ROOT, SmallEngine, tokens_of
from tests.worker.tiny_models import item, random_tensors
from worker.batch import NOT_FINITE
from worker.engine import NOT_FINITE_REASON, STARVED_STEPS_TO_FAIL
from worker.models import LlamaModel
from worker.runner import TorchRunner


def rig_of(count: int, max_tokens: int = 9) -> Rig:
    """So many requests, all of which decode."""
    rig = Rig()
    for number in range(count):
        rig.add(f"r{number}", [number + 1, 2, 3], max_tokens=max_tokens, ignore_eos=True)
    rig.step()
    return rig


def ends(rig: Rig) -> set[str]:
    return {output.finish_reason for output in rig.final.values()}


# A step that raises


@pytest.mark.parametrize("victim", range(8))
def test_who_raises_fails_and_the_others_go_on(victim):
    rig = rig_of(8)
    rig.runner.bad[f"r{victim}"] = ValueError("not this one")
    outputs = {output.request_id: output for output in rig.step()}
    failed = outputs.pop(f"r{victim}")
    assert (failed.finish_reason, failed.token_ids) == ("error", [])
    assert "not this one" in failed.error
    assert [len(output.token_ids) for output in outputs.values()] == [1] * 7
    rig.drain()  # compares every answer with what it is when nothing fails
    assert ends(rig) == {"error", "length"}


def test_those_that_prefill_and_those_that_decode_are_told_apart():
    rig = rig_of(2)
    rig.add("prefill", [5] * 20)
    rig.add("another", [6] * 20)
    rig.runner.bad = {"r1": ValueError("a"), "prefill": ValueError("b")}
    failed = [output.request_id for output in rig.step() if output.error]
    assert failed == ["r1", "prefill"]
    rig.drain()
    assert rig.final["another"].finish_reason == "length"


@pytest.mark.parametrize("count", [1, 3])
def test_a_failure_that_does_not_come_back_harms_nobody(count):
    rig = rig_of(count)
    execute, errors = rig.runner.execute, [RuntimeError("a hiccup")]

    def once(batch):
        if errors:
            raise errors.pop()
        return execute(batch)

    rig.runner.execute = once
    assert len(rig.step()) == count
    assert rig.core.stats().failed_steps == 1
    rig.drain()
    assert ends(rig) == {"length"}


def test_a_request_that_raises_alone_does_not_make_the_engine_look_dead():
    rig = rig_of(1)
    rig.runner.bad["r0"] = ValueError("not this one")
    rig.step()
    assert rig.core.dead_steps == 0
    rig.add("r1", [1, 2, 3])
    rig.step()
    rig.fail()
    assert rig.core.dead_steps == 1


# A step for which memory does not suffice


def test_a_step_that_is_too_large_is_computed_in_parts():
    rig = Rig(token_budget=64)
    rig.add("a", [1] * 20)
    rig.add("b", [2] * 20)
    rig.runner.room = 6
    rig.step()
    assert max(sum(len(i.token_ids) for i in batch) for batch in rig.runner.batches) <= 6
    rig.drain()
    assert ends(rig) == {"length"}
    assert rig.core.stats().preemptions == 0


def test_who_finds_no_memory_is_preempted_and_comes_back():
    rig = rig_of(3)
    rig.runner.bad["r1"] = MemoryError("no room")
    outputs = rig.step()
    assert [output.request_id for output in outputs] == ["r0", "r2"]
    assert rig.core.stats().preemptions == 1
    rig.runner.bad.clear()
    rig.drain()
    assert ends(rig) == {"length"}


def test_where_memory_suffices_for_nobody_one_fails_at_a_time():
    rig = rig_of(3)
    rig.runner.room = 0
    (output,) = rig.step()
    assert (output.request_id, output.finish_reason) == ("r0", "error")
    assert "no room" in output.error
    rig.runner.room = 100
    rig.drain()
    assert [rig.final[name].finish_reason for name in ("r1", "r2")] == ["length"] * 2


def test_who_never_finds_memory_fails_while_others_are_computed():
    """Else it would have every step computed in parts for as long as others come."""
    rig = rig_of(2)
    rig.runner.bad["r1"] = MemoryError("no room")
    steps = 0
    while "r1" not in rig.final:
        rig.step()
        steps += 1
        if len(rig.core.decoding()) < 2:
            rig.add(f"another {steps}", [6, steps % 7, 3], max_tokens=9, ignore_eos=True)
        assert steps < 50
    assert "no room" in rig.final["r1"].error
    rig.drain()
    assert rig.core.stats().failed_steps == STARVED_STEPS_TO_FAIL


def test_memory_that_is_short_now_and_then_fails_nobody():
    rig = rig_of(3, max_tokens=20)
    for _ in range(STARVED_STEPS_TO_FAIL + 1):
        rig.runner.bad["r1"] = MemoryError("no room")
        rig.step()
        rig.runner.bad.clear()
        rig.step()
    rig.drain()
    assert ends(rig) == {"length"}
    assert rig.core.stats().preemptions == STARVED_STEPS_TO_FAIL + 1


def test_who_starves_beside_a_request_that_raises_does_not_fail():
    rig = rig_of(2)
    rig.runner.bad = {"r0": ValueError("not this one"), "r1": MemoryError("no room")}
    assert [output.request_id for output in rig.step()] == ["r0"]
    rig.runner.bad.clear()
    rig.drain()
    assert rig.final["r1"].finish_reason == "length"


def test_those_that_are_preempted_together_come_back_in_their_order():
    rig = rig_of(3)
    rig.runner.bad = {"r1": MemoryError("no room"), "r2": MemoryError("no room")}
    rig.step()
    assert list(rig.core._scheduler.waiting) == ["r1", "r2"]


def test_torch_without_memory_raises_a_memory_error(monkeypatch):
    torch.set_num_threads(1)
    runner = TorchRunner(MODEL, 8, BLOCK)
    for allocate in (
        lambda *_: torch.empty(1 << 60),
        lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("CUDA out of memory")),
    ):
        monkeypatch.setattr(LlamaModel, "forward", allocate)
        with pytest.raises(MemoryError, match="a step of 1 sequences"):
            runner.execute([item([1, 2], 0, [1])])
    monkeypatch.setattr(LlamaModel, "forward", lambda *_: torch.zeros(2, 3) @ torch.zeros(2, 3))
    with pytest.raises(RuntimeError, match="shapes"):
        runner.execute([item([1, 2], 0, [1])])


# Logits that are not finite


def test_who_computes_nan_is_computed_afresh_and_its_blocks_leave_the_cache():
    rig = Rig()
    rig.add("before", [1] * 16, max_tokens=2)
    rig.drain()
    rig.add("a", [1] * 16 + [2], max_tokens=6, ignore_eos=True)
    rig.runner.not_finite.add("a")
    assert rig.step() == []
    assert rig.core.load().cached_blocks == 0
    assert rig.publish() == set()
    rig.runner.not_finite.clear()
    rig.drain()
    assert rig.final["a"].finish_reason == "length"
    assert rig.core.load().cached_blocks == 0, "it caches nothing more"


def test_pins_of_blocks_that_leave_the_cache_end():
    rig = Rig(pin_share=0.5)
    for token in (1, 2):
        rig.add(f"before {token}", [token] * 16, max_tokens=2)
        rig.drain()
        assert rig.core.pin(ROOT, pack_tokens([token] * 16)) == 16
    rig.add("a", [1] * 16 + [2], max_tokens=2)
    rig.runner.not_finite.add("a")
    rig.step()
    assert rig.core.stats().pinned_blocks == rig.core.load().cached_blocks == 4
    rig.runner.not_finite.clear()
    rig.drain()


def test_who_computes_nan_again_fails_and_says_so():
    rig = rig_of(3)
    rig.runner.not_finite.add("r1")
    rig.step()
    outputs = {output.request_id: output for output in rig.step()}
    assert outputs["r1"].finish_reason == "error"
    assert outputs["r1"].error == NOT_FINITE_REASON
    rig.drain()
    assert ends(rig) == {"error", "length"}


def test_those_who_share_blocks_with_it_go_on_and_cache_nothing_more():
    rig = Rig(chunk_tokens=8)
    rig.add("first", [1] * 16, max_tokens=20, ignore_eos=True)
    rig.drain()
    for name in ("a", "b"):
        rig.add(name, [1] * 16 + [3], max_tokens=20, ignore_eos=True)
    rig.step()
    rig.runner.not_finite.add("b")
    rig.step()
    rig.runner.not_finite.clear()
    assert rig.core.load().cached_blocks == 0
    rig.drain()
    assert ends(rig) == {"length"}
    assert rig.core.load().cached_blocks == 0


BAD_TOKEN = 9
STEM = [token for token in tokens_of(1, 5 * BLOCK) if token != BAD_TOKEN][: 4 * BLOCK]


def bad_token_engine(**fields) -> SmallEngine:
    """The embedding of one token is NaN."""
    torch.set_num_threads(1)
    tensors = random_tensors(MODEL_CONFIG, seed=5)
    tensors["model.embed_tokens.weight"][BAD_TOKEN] = float("nan")
    engine = SmallEngine(**fields)
    engine.runner.model = LlamaModel(MODEL_CONFIG, tensors, torch.float32)
    return engine


def fail(engine: SmallEngine, name: str) -> str:
    """Step until the request fails; the others go on. Returns why it failed."""
    reason = ""
    while not reason:
        for output in engine.core.step():
            if output.request_id == name:
                assert output.finish_reason == "error"
                reason = output.error
            else:
                engine.tokens[output.request_id] += output.token_ids
        engine.core.check()
    del engine.prompts[name], engine.tokens[name]
    return reason


@pytest.mark.parametrize("chunk_tokens", [0, BLOCK])
def test_nan_does_not_travel_through_a_shared_prefix(chunk_tokens):
    """In one chunk, rows before the bad token see NaN under the mask: 0 times NaN is NaN."""
    engine = bad_token_engine(chunk_tokens=chunk_tokens)
    engine.add("beside", [*STEM, 3])
    engine.add("bad", [*STEM[: 3 * BLOCK], BAD_TOKEN, *STEM[:BLOCK]])
    assert fail(engine, "bad") == NOT_FINITE_REASON
    engine.drain()
    engine.run("later", [*STEM[: 3 * BLOCK], 5, 6])


def test_nan_in_cached_blocks_harms_nobody():
    engine = SmallEngine()
    engine.run("first", [*STEM, 3])
    for pair in engine.runner.pools:
        for pool in pair:
            pool[engine.core._cache._blocks[hash_blocks(ROOT, pack_tokens(STEM), BLOCK)[1]]] = (
                float("nan")
            )
    assert engine.run("second", [*STEM, 4]) == len(STEM)
    assert engine.run("third", [*STEM, 5]) == 0
    assert engine.run("fourth", [*STEM, 6]) == len(STEM)


def test_a_row_of_logits_that_is_not_finite_is_told_apart_from_a_token():
    torch.set_num_threads(1)
    runner = bad_token_engine().runner
    batch = [item([1, 2], 0, [1]), item([BAD_TOKEN], 0, [2]), item([BAD_TOKEN, 4, 5], 0, [3])]
    sampled = runner.execute(batch)
    assert sampled[1:] == [NOT_FINITE] * 2
    assert sampled[0] == TorchRunner(MODEL, 8, BLOCK).execute(batch[:1])[0]


# Token ids


def test_a_token_id_beyond_the_embedding_is_refused():
    engine = SmallEngine(embedding_rows=MODEL_CONFIG.vocab_size)
    engine.run("last", [MODEL_CONFIG.vocab_size - 1])
    with pytest.raises(RequestError, match=r"token id 97; this model's ids end at 96") as refused:
        engine.add("beyond", [1, MODEL_CONFIG.vocab_size, 2])
    assert (refused.value.status, refused.value.param) == (400, "prompt")
    assert not engine.core.has_work()
