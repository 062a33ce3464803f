"""Decodes padded to fixed sizes over fixed tensors answer as unpadded ones do.

Replay is eager here: the same launches over the same tensors as a CUDA graph's, so what a graph
would read stale, or not read at all, shows on a CPU too.
"""

import random
from dataclasses import replace

import pytest
import torch

from cluster.protocol import Sampling
from tests.worker.small_engine import BLOCK, MODEL, SmallEngine, tokens_of
from tests.worker.static_attention import StaticBackend
from tests.worker.tiny_models import item, random_tensors, tiny_config, tiny_model
from worker.decode_graphs import eager, padded_sizes
from worker.models import LlamaModel
from worker.runner import TorchRunner


class Counting:
    """Eager capture that counts what it captured and replayed."""

    def __init__(self):
        self.captured = self.replayed = 0

    def __call__(self, compute):
        self.captured += 1
        again = eager(compute)

        def replay():
            self.replayed += 1
            again()

        return replay


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    torch.set_num_threads(1)


def graph_runner(model=MODEL, blocks=64, block_size=BLOCK, capture=eager, max_batch_size=8):
    runner = TorchRunner(model, blocks, block_size)
    runner._backend = StaticBackend()
    runner.capture_decodes(max_batch_size, model.config.context_tokens, capture)
    return runner


def graph_engine(**fields):
    """A small engine whose decodes are replayed, and the capture that counts them."""
    capture = Counting()
    engine = SmallEngine(**fields)
    engine.runner = graph_runner(blocks=engine.config.capacity_blocks, capture=capture)
    engine.core._runner = engine.runner
    return engine, capture


def test_sizes_are_few_and_end_with_the_largest_batch():
    assert padded_sizes(1) == [1]
    assert padded_sizes(3) == [1, 2, 3]
    assert padded_sizes(8) == [1, 2, 4, 8]
    assert padded_sizes(20) == [1, 2, 4, 8, 16, 20]
    assert padded_sizes(64) == [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64]


def test_each_size_is_captured_once_and_planned_once():
    capture = Counting()
    runner = graph_runner(capture=capture)
    assert capture.captured == runner._backend.plans == 4
    runner.execute([item([5], 0, [1]), item([6], 0, [2]), item([7], 0, [3])])
    assert (capture.captured, capture.replayed, runner._backend.plans) == (4, 1, 4)


@pytest.mark.parametrize("count", range(1, 9))
def test_padding_changes_no_answer(count):
    """Ragged contexts; batches of all sizes, of which some are padded and some are not."""
    prompts = [tokens_of(index, 3 + 7 * index) for index in range(count)]
    tables = [[1 + 8 * index + block for block in range(8)] for index in range(count)]
    answers = []
    for runner in (TorchRunner(MODEL, 64, BLOCK), graph_runner()):
        tokens = runner.execute(
            [item(prompt, 0, table) for prompt, table in zip(prompts, tables, strict=True)]
        )
        steps = [tokens]
        for step in range(3):
            tokens = runner.execute(
                [
                    item([token], len(prompt) + step, table)
                    for token, prompt, table in zip(tokens, prompts, tables, strict=True)
                ]
            )
            steps.append(tokens)
        answers.append(steps)
    assert answers[0] == answers[1]


def test_batches_that_grow_and_shrink_and_change_places():
    """Requests of all lengths come and go, so a request is in another row in almost every step."""
    engine, capture = graph_engine(blocks=120)
    rng = random.Random(3)
    for index in range(12):
        engine.add(f"r{index}", tokens_of(index, rng.randint(1, 40)), max_tokens=rng.randint(1, 20))
        for _ in range(rng.randint(0, 4)):
            engine.step()
    engine.drain()
    assert capture.replayed > 15


def test_preempted_requests_come_back_with_other_blocks():
    engine, capture = graph_engine(blocks=16)
    for index in range(5):
        engine.add(f"r{index}", tokens_of(index, 17), max_tokens=35)
    engine.drain()
    assert engine.core.stats().preemptions >= 2
    assert capture.replayed > 15


def test_blocks_replaced_by_equal_cached_ones_are_followed():
    """Requests with the same prompt fill equal blocks; all but one give theirs up."""
    engine, capture = graph_engine()
    for index in range(4):
        engine.add(f"r{index}", tokens_of(1, 10), max_tokens=20)
    engine.drain()
    assert engine.core.stats().duplicates > 4
    assert capture.replayed > 15


def test_padding_writes_to_block_0_only():
    runner = graph_runner(blocks=6)
    for layer in runner.pools:
        for pool in layer:
            pool.zero_()
    runner.execute([item([5], 0, [3]), item([6], 1, [5]), item([7], 0, [2])])
    for pool in runner.pools[1]:
        written = (pool.abs().sum(dim=(2, 3)) > 0).nonzero().tolist()
        assert written == [[0, 0], [2, 0], [3, 0], [5, 1]]
        assert torch.isfinite(pool).all()


def test_random_draws_are_those_of_an_unpadded_step():
    sampling = Sampling(max_tokens=9, temperature=1.5, top_p=0.9, top_k=20, seed=11)
    batch = [
        item([5], 0, [1], sampling=sampling, output_index=4),
        item([6], 0, [2]),
        item([7], 0, [3], sampling=sampling, output_index=5),
    ]
    plain, replayed = TorchRunner(MODEL, 8, BLOCK), graph_runner(blocks=8)
    for step in range(6):
        entries = [replace(entry, output_index=step + index) for index, entry in enumerate(batch)]
        assert replayed.execute(entries) == plain.execute(entries)


def test_steps_that_are_not_of_decodes_only_are_computed_as_ever():
    capture = Counting()
    runner = graph_runner(capture=capture)
    runner.execute([item([5, 6], 0, [1]), item([7], 0, [2])])
    assert runner.execute([item([5], 2, [1], sample=False)]) == [None]
    runner.execute([item([5], 0, [1 + index]) for index in range(9)])  # more than captured
    assert capture.replayed == 0


def test_adopted_weights_are_those_that_a_replay_computes_with():
    model, other = tiny_model(seed=1), tiny_model(seed=2)
    runner = graph_runner(model)
    batch = [item([5], 0, [1]), item([9], 0, [2]), item([11], 0, [3])]
    before = runner.execute(batch)
    with torch.inference_mode():
        model.adopt(other)
    after = runner.execute(batch)
    assert after == TorchRunner(other, 8, BLOCK).execute(batch)
    assert after != before


def test_new_weights_on_an_accelerator_arrive_where_the_old_ones_are():
    """A graph knows addresses. The device "meta" stands for an accelerator: it is not the host."""
    device = torch.device("meta")
    config = tiny_config()
    model = LlamaModel(config, random_tensors(config), torch.float32, device)
    other = LlamaModel(config, random_tensors(config), torch.float32, "cpu", runs_on=device)
    before = list(model.parameters())
    with torch.inference_mode():
        model.adopt(other)
    after = list(model.parameters())
    assert len(before) == len(after) == len(list(other.parameters())) > 10
    assert all(mine is same for mine, same in zip(before, after, strict=True))


def test_a_backend_that_plans_by_length_is_refused():
    runner = TorchRunner(MODEL, 8, BLOCK)
    assert not runner.replayable_decodes
    with pytest.raises(ValueError, match=r"sdpa cannot be captured.*use triton"):
        runner.capture_decodes(8, 64, eager)


def test_the_triton_kernels_replay_with_one_launch_configuration():
    """Interpreted: a batch padded to 4, with keys split as for the longest context."""
    pytest.importorskip("triton", reason="the triton backend needs the package triton")
    from worker.attention import triton

    if not triton.triton.knobs.runtime.interpret:
        pytest.skip("TRITON_INTERPRET is not 1: the kernels would be compiled for a GPU")
    model = tiny_model(context_tokens=512, layers=1, query_heads=2, kv_heads=1)
    plain = TorchRunner(model, 101, 16)
    replayed = TorchRunner(model, 101, 16, "triton")
    replayed.capture_decodes(4, 512, eager)
    tables = [list(range(1, 33)), list(range(70, 80)), [100]]
    prompts = [tokens_of(1, 300), tokens_of(2, 15), [3]]
    first = [item(prompt, 0, table) for prompt, table in zip(prompts, tables, strict=True)]
    assert plain.execute(first) is not None
    for ours, theirs in zip(replayed.pools, plain.pools, strict=True):
        for pool, source in zip(ours, theirs, strict=True):
            pool.copy_(source)
    for step in range(2):
        batch = [
            item([7 + step], len(prompt) + step, table)
            for prompt, table in zip(prompts, tables, strict=True)
        ]
        assert replayed.execute(batch) == plain.execute(batch)
