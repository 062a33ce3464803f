"""Memory kept for steps and graphs: figures computed by hand, and what torch really takes."""

import msgspec
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cluster.protocol import Sampling
from tests.worker.tiny_models import item, tiny_config, tiny_model
from worker.attention.base import AttentionBackend, write_kv
from worker.kv_memory import blocks_that_fit, kv_block_bytes
from worker.models import ModelConfig, Rope
from worker.runner import TorchRunner
from worker.sampler import Draw, sample
from worker.step_memory import (
    SAMPLING_BYTES,
    StepLimits,
    graph_bytes,
    row_bytes,
    splits_of_sizes,
    step_bytes,
)

LLAMA_8B = ModelConfig(
    family="llama",
    vocab_size=128_256,
    hidden_size=4096,
    intermediate_size=14_336,
    layers=32,
    query_heads=32,
    kv_heads=8,
    head_dim=128,
    rms_eps=1e-5,
    rope=Rope(theta=500_000.0),
    context_tokens=8192,
    tied_embeddings=False,
)
LIMITS = StepLimits(token_budget=2048, max_batch_size=256, blocks_of_sequence=512)


def test_a_row_of_an_8b_model():
    """Elements: residual 3 x 4096, qkv 6144, heads 5120, attended 4096, MLP 4 x 14336; 2 bytes
    each. 256 angles of 4 bytes. The rotation, 12 x 5120 + 2 x (5120 + 28672) bytes, is more than
    the MLP's 114688."""
    assert row_bytes(LLAMA_8B, torch.bfloat16) == 2 * 27_648 + 129_024 + 1024 == 185_344


def test_a_step_of_an_8b_model():
    """Inputs 8 x (3 x 2048 + 256 x 1027), 2048 rows, 256 x 128256 logits of 40 bytes: 1.6 GiB."""
    expected = 8 * 269_056 + 2048 * 185_344 + 256 * 128_256 * 40
    assert expected == 2_152_448 + 379_584_512 + 1_313_341_440
    assert step_bytes(LLAMA_8B, torch.bfloat16, LIMITS) == expected


def test_the_graphs_of_an_8b_model():
    """Two sizes, to be computed by hand: 8 (split in 4) and 256 (not split)."""
    inputs = 8 * ((5 * 8 + 1) + (5 * 256 + 1) + 256 * 513)
    logits, sums = 4 * 256 * 128_256, 4 * (8 * 4) * 32 * 130
    scratch = 256 * (185_344 + 6 * 128_256)
    expected = inputs + logits + sums + scratch
    assert expected == 1_061_200 + 131_334_144 + 532_480 + 244_449_280
    assert graph_bytes(LLAMA_8B, torch.bfloat16, LIMITS, {8: 4, 256: 1}) == expected


def test_graphs_of_more_sequences_than_the_budget_lets_in_are_counted():
    few = LIMITS._replace(token_budget=64, max_batch_size=64)
    of_256 = {8: 4, 256: 1}
    assert graph_bytes(LLAMA_8B, torch.bfloat16, few, of_256) == graph_bytes(
        LLAMA_8B, torch.bfloat16, LIMITS, of_256
    )


def test_small_batches_are_split_among_the_processors():
    splits = splits_of_sizes(LLAMA_8B, 64, 8192, 132)
    assert list(splits)[:4] == [1, 2, 4, 8]
    assert (splits[1], splits[8], splits[64]) == (32, 4, 1)


def test_what_steps_take_is_left_out_of_the_pool(monkeypatch):
    """No GPU is asked: 1,000 blocks are free, of which steps take 200."""
    config = tiny_config()
    block = kv_block_bytes(config, 16, torch.bfloat16)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1000 * block, 2000 * block))
    assert blocks_that_fit(config, 16, torch.bfloat16, "cuda", 0.5, 200 * block) == 399
    with pytest.raises(MemoryError, match="reserved for steps"):
        blocks_that_fit(config, 16, torch.bfloat16, "cuda", 0.5, 1001 * block)


class NoGather(AttentionBackend):
    """Takes the memory that triton takes: the answer's."""

    name = "none"

    def plan(self, step, dtype):
        return step.slot_mapping

    def attend(self, rows, pool, plan):
        write_kv(rows, pool, plan)
        return torch.empty(rows.query.shape, dtype=rows.query.dtype)


class LiveTensors(TorchDispatchMode):
    """Counts the bytes of the tensors that operators made and that are still referenced.

    Unlike an allocator's figures these do not depend on the processor: what a kernel allocates for
    itself while it runs differs between instruction sets, and the step is not charged for it.
    """

    def __init__(self):
        super().__init__()
        self.peak = 0
        self._live = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {id_ for id_, _ in storages((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for id_, storage in storages(result):
            if id_ not in given:
                self._live[id_] = (StorageWeakRef(storage), storage.nbytes())
        self._live = {id_: live for id_, live in self._live.items() if not live[0].expired()}
        self.peak = max(self.peak, sum(nbytes for _, nbytes in self._live.values()))
        return result


def storages(values):
    """Identity and storage of each tensor among the values."""
    tensors = [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]
    return [(tensor.untyped_storage()._cdata, tensor.untyped_storage()) for tensor in tensors]


def peak_bytes(compute):
    """Most memory of the host that torch held at once beyond what it held before."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        compute()
    events = [
        event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"
    ]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


@pytest.mark.parametrize("changes", [{}, {"intermediate_size": 512}, {"query_heads": 16}])
def test_a_step_takes_no_more_than_was_computed_and_not_much_less(changes):
    torch.set_num_threads(1)
    model = tiny_model(dtype=torch.bfloat16, hidden_size=64, head_dim=16, **changes)
    rows, blocks = 256, 40
    runner = TorchRunner(model, blocks, 16)
    runner._backend = NoGather()
    prompt = item([1] * rows, 0, list(range(1, 17)))
    runner.execute([prompt])  # what is made once
    with LiveTensors() as live:
        runner.execute([prompt])
    peak = live.peak
    computed = step_bytes(model.config, torch.bfloat16, StepLimits(rows, 1, 16))
    assert 0.6 * computed < peak <= computed


def test_sampling_takes_no_more_than_was_computed():
    torch.set_num_threads(1)
    rows, vocabulary = 16, 20_000
    draws = [Draw(Sampling(max_tokens=9, temperature=1.0, top_p=0.9, seed=3), 0)] * rows
    with_top_k = [replace_sampling(draw, top_k=15_000) for draw in draws]
    for given in (draws, with_top_k):
        logits = torch.zeros(rows, vocabulary)
        logits += torch.arange(vocabulary) * 1e-6  # the nucleus is large: all has to be sorted
        likeliest = logits.argmax(dim=-1)
        peak = logits.nbytes + peak_bytes(lambda: sample(logits, given, likeliest))  # noqa: B023
        assert 0.5 * SAMPLING_BYTES < peak / logits.numel() <= SAMPLING_BYTES


def replace_sampling(draw, **changes):
    return Draw(msgspec.structs.replace(draw.sampling, **changes), draw.output_index)
