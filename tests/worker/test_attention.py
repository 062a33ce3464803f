"""Paged attention against the plain formula, over ragged batches in scattered blocks."""

import random

import pytest
import torch

from tests.worker.tiny_models import item, tiny_config
from worker.attention import attention_backend, sdpa
from worker.models import LlamaModel
from worker.runner import TorchRunner

QUERY_HEADS, KV_HEADS, HEAD_DIM = 6, 2, 8


class Paged:
    """A pool with sequences whose first tokens are stored, and the same as plain tensors."""

    def __init__(self, lengths, block_size, dtype=torch.float32, seed=0):
        self.generator = torch.Generator().manual_seed(seed)
        self.block_size = block_size
        self.dtype = dtype
        blocks = [-(-length // block_size) for length, _ in lengths]
        ids = list(range(1, sum(blocks) + 4))
        random.Random(seed).shuffle(ids)
        self.tables = [[ids.pop() for _ in range(count)] for count in blocks]
        pool_shape = (sum(blocks) + 4, block_size, KV_HEADS, HEAD_DIM)
        # What no sequence has written is huge, not zero: seeing it would change the answer.
        self.pools = [torch.full(pool_shape, 1e4, dtype=dtype) for _ in range(2)]
        self.lengths = lengths
        self.keys = [self.random(length, KV_HEADS, HEAD_DIM) for length, _ in lengths]
        self.values = [self.random(length, KV_HEADS, HEAD_DIM) for length, _ in lengths]
        for table, keys, values, (length, rows) in zip(
            self.tables, self.keys, self.values, lengths, strict=True
        ):
            for position in range(length - rows):
                block, offset = table[position // block_size], position % block_size
                self.pools[0][block, offset] = keys[position]
                self.pools[1][block, offset] = values[position]

    def random(self, *shape):
        return torch.randn(shape, generator=self.generator).to(self.dtype)

    def metadata(self):
        config = tiny_config(query_heads=QUERY_HEADS, kv_heads=KV_HEADS, head_dim=HEAD_DIM)
        runner = TorchRunner.__new__(TorchRunner)  # the layout needs no weights
        runner.block_size = self.block_size
        runner._capacity_blocks = len(self.pools[0]) - 1
        runner.model = LlamaModel.__new__(LlamaModel)
        runner.model.config, runner.model.device = config, torch.device("cpu")
        batch = [
            item([0] * rows, length - rows, table)
            for (length, rows), table in zip(self.lengths, self.tables, strict=True)
        ]
        attention = runner.lay_out(batch).attention
        laid_out = list(zip(attention.context_lens, attention.query_lens, strict=True))
        assert laid_out == self.lengths, "list the sequences in the order of the layout"
        return attention


def plain(query, keys, values):
    """`[rows, heads, dim]` at the end of `[context, kv_heads, dim]`, in fp64."""
    query, keys, values = query.double(), keys.double(), values.double()
    rows, context = len(query), len(keys)
    out = torch.empty_like(query)
    for row in range(rows):
        seen = context - rows + row + 1
        for head in range(QUERY_HEADS):
            kv_head = head // (QUERY_HEADS // KV_HEADS)
            scores = keys[:seen, kv_head] @ query[row, head] / HEAD_DIM**0.5
            out[row, head] = scores.softmax(0) @ values[:seen, kv_head]
    return out


def check(lengths, block_size, dtype=torch.float32, atol=1e-5, backend=None):
    """`lengths` lists (context, rows of this step), in the order of the layout."""
    paged = Paged(lengths, block_size, dtype)
    backend = backend or attention_backend("sdpa")
    queries = [paged.random(rows, QUERY_HEADS, HEAD_DIM) for _, rows in lengths]
    new_keys = [
        keys[length - rows :] for keys, (length, rows) in zip(paged.keys, lengths, strict=True)
    ]
    new_values = [
        values[length - rows :]
        for values, (length, rows) in zip(paged.values, lengths, strict=True)
    ]
    plan = backend.plan(paged.metadata(), dtype)
    answer = backend.attend(
        torch.cat(queries), torch.cat(new_keys), torch.cat(new_values), *paged.pools, plan
    )
    parts = answer.split([rows for _, rows in lengths])
    for part, query, keys, values in zip(parts, queries, paged.keys, paged.values, strict=True):
        torch.testing.assert_close(part.double(), plain(query, keys, values), atol=atol, rtol=atol)
    return plan


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_decodes_and_chunks_of_ragged_lengths(block_size):
    check(
        [(40, 1), (33, 1), (16, 1), (2, 1), (1, 1), (20, 2), (37, 21), (48, 48), (5, 5)],
        block_size,
    )


def test_a_suffix_sees_the_whole_prefix_and_no_later_token():
    check([(64, 16)], 16)
    check([(65, 64)], 16)
    check([(17, 2)], 16)


def test_a_first_chunk_needs_neither_pool_nor_mask():
    plan = check([(24, 24)], 16)
    assert plan.chunks[0].mask is None


def test_decodes_of_very_different_lengths_are_gathered_apart(monkeypatch):
    monkeypatch.setattr(sdpa, "PADDING_BLOCKS", 2)
    plan = check([(200, 1), (190, 1), (30, 1), (9, 1), (3, 1)], 4)
    assert [(group.first, group.last) for group in plan.decodes] == [(0, 2), (2, 3), (3, 5)]


def test_decodes_of_like_lengths_are_gathered_together():
    plan = check([(50, 1), (49, 1), (40, 1)], 4)
    assert [(group.first, group.last) for group in plan.decodes] == [(0, 3)]


def test_buffers_are_reused_for_batches_of_any_size():
    backend = attention_backend("sdpa")
    for lengths in ([(9, 1)], [(90, 1), (80, 1)], [(5, 2)], [(120, 3), (7, 7)], [(8, 1)]):
        check(lengths, 4, backend=backend)


def test_bfloat16():
    check([(40, 1), (7, 1), (37, 21), (12, 12)], 16, torch.bfloat16, atol=3e-2)


def test_an_unknown_backend_is_named():
    with pytest.raises(ValueError, match=r"'flash'.*sdpa"):
        attention_backend("flash")
