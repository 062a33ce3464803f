"""The runner: what goes in, what comes out, what is refused; and the pool's size."""

from dataclasses import replace

import pytest
import torch

from cluster.protocol import Sampling
from tests.worker.tiny_models import item, logits_of, tiny_config, tiny_model
from worker import kv_memory
from worker.kv_memory import blocks_that_fit, kv_block_bytes
from worker.runner import TorchRunner


def runner_of(kv_blocks=24, block_size=4, **changes):
    return TorchRunner(tiny_model(**changes), kv_blocks, block_size)


def test_answers_come_in_the_order_of_the_batch():
    """Items are laid out by kind and length; whoever asked gets their own token."""
    prompts = [[5, 6, 7], [8], list(range(10, 21)), [9], [30, 31]]
    tables = [[1], [2], [3, 4, 5], [6], [7]]
    alone = [
        runner_of().execute([item(prompt, 0, table)])[0]
        for prompt, table in zip(prompts, tables, strict=True)
    ]
    assert len(set(alone)) > 2
    batch = [
        item(prompt, 0, table, sample=index != 2)
        for index, (prompt, table) in enumerate(zip(prompts, tables, strict=True))
    ]
    expected = [None if index == 2 else token for index, token in enumerate(alone)]
    assert runner_of().execute(batch) == expected


def test_a_batch_that_samples_nothing_still_writes_its_keys():
    runner = runner_of()
    assert runner.execute([item([1, 2, 3, 4], 0, [3], sample=False)]) == [None]
    assert runner.pools[0][0][3].abs().sum() > 0
    assert runner.execute([]) == []


def test_only_the_slots_of_the_batch_are_written():
    runner = runner_of()
    runner.execute([item([1, 2, 3, 4, 5, 6], 0, [3, 8]), item([7], 5, [2, 9])])
    for pool in runner.pools[1]:
        written = pool.abs().sum(dim=(2, 3)) > 0
        slots = {(3, 0), (3, 1), (3, 2), (3, 3), (8, 0), (8, 1), (9, 1)}
        assert {tuple(slot) for slot in written.nonzero().tolist()} == slots


def test_a_table_may_be_longer_than_needed():
    short = runner_of().execute([item([1, 2, 3], 0, [3])])
    assert runner_of().execute([item([1, 2, 3], 0, [3, 4, 5, 6, 7])]) == short


def test_random_draws_follow_seed_and_output_index_not_the_batch():
    sampling = Sampling(max_tokens=9, temperature=1.5, seed=11)
    one = item([1, 2, 3], 0, [1], sampling=sampling, output_index=4)
    other = item([50], 0, [2], sampling=Sampling(max_tokens=9, top_p=0.5, seed=3))
    alone = runner_of().execute([one])[0]
    assert runner_of().execute([other, one])[1] == alone
    drawn = {runner_of().execute([replace(one, output_index=index)])[0] for index in range(12)}
    assert len(drawn) > 4


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (item([], 3, [1]), "has no token to compute"),
        (item([1, 2], 3, [1]), r"needs 2 blocks for 5 tokens, its table has 1"),
        (item([1], 0, [0]), r"slots 0 to 0 are outside"),
        (item([1], 0, [25]), r"slots 100 to 100 are outside the pool's 4 to 99"),
    ],
)
def test_items_that_would_spoil_the_pool_are_refused(entry, message):
    runner = runner_of()
    with pytest.raises(ValueError, match=message):
        runner.execute([entry])
    assert all(pool.abs().sum() == 0 for layer in runner.pools for pool in layer)


def test_the_metadata_describe_the_layout():
    step = runner_of().lay_out(
        [item([1, 2, 3], 2, [5, 6]), item([9], 0, [7]), item([8], 9, [1, 2, 3], sample=False)]
    )
    attention = step.attention
    assert step.token_ids.tolist() == [8, 9, 1, 2, 3]
    assert step.positions.tolist() == [9, 0, 2, 3, 4]
    assert step.logit_rows.tolist() == [1, 4]
    assert step.sampled == [1, 0]
    assert attention.decodes == 2
    assert attention.query_start_loc.tolist() == [0, 1, 2, 5]
    assert attention.seq_lens.tolist() == attention.context_lens == [10, 1, 5]
    assert attention.block_table.tolist() == [[1, 2, 3], [7, 0, 0], [5, 6, 0]]
    assert attention.slot_mapping.tolist() == [13, 28, 22, 23, 24]


def test_the_pool_is_finite_from_the_start():
    """Padding is read under a mask; a NaN there would leak through it."""
    runner = runner_of()
    assert all(torch.isfinite(pool).all() for layer in runner.pools for pool in layer)
    short, long = item([1], 0, [4]), item([2], 19, [5, 6, 7, 8, 9])
    assert all(torch.isfinite(logits).all() for logits in logits_of(runner, [short, long]))


def test_a_block_costs_keys_and_values_of_all_layers():
    config = tiny_config(layers=3, kv_heads=2, head_dim=8)
    assert kv_block_bytes(config, 16, torch.bfloat16) == 2 * 3 * 16 * 2 * 8 * 2
    pools = TorchRunner(tiny_model(layers=3), 7, 16).pools
    held = sum(pool.nbytes for layer in pools for pool in layer)
    assert held == 8 * kv_block_bytes(config, 16, torch.float32)


def test_a_cpu_pool_is_modest_and_never_more_than_fits(monkeypatch):
    config = tiny_config()
    block_bytes = kv_block_bytes(config, 16, torch.float32)
    blocks = blocks_that_fit(config, 16, torch.float32, "cpu", 0.85)
    assert 1 <= blocks < kv_memory.CPU_POOL_BYTES // block_bytes
    monkeypatch.setattr(kv_memory, "CPU_POOL_BYTES", 10 * block_bytes)
    assert blocks_that_fit(config, 16, torch.float32, "cpu", 0.85) == 9
    monkeypatch.setattr(kv_memory, "CPU_POOL_BYTES", block_bytes)
    with pytest.raises(MemoryError, match="cannot hold one block"):
        blocks_that_fit(config, 16, torch.float32, "cpu", 0.85)


def test_a_cuda_pool_takes_its_share_of_the_free_memory(monkeypatch):
    """No GPU is asked: only the arithmetic is checked."""
    config = tiny_config()
    block_bytes = kv_block_bytes(config, 16, torch.bfloat16)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000 * block_bytes, 0))
    assert blocks_that_fit(config, 16, torch.bfloat16, "cuda", 0.5) == 499
