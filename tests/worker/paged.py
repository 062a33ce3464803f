"""Attention over a scattered paged pool beside the plain formula, for every backend's tests."""

import random
from typing import NamedTuple

import torch

from tests.worker.tiny_models import item
from worker.attention.base import KvPool, Rows
from worker.attention.registry import attention_backend
from worker.step_layout import StepLayout


class Heads(NamedTuple):
    """Numbers of query and KV heads, elements of each."""

    query: int
    kv: int
    dim: int


HEADS = Heads(6, 2, 8)
CPU = torch.device("cpu")


class Paged:
    """A pool with sequences whose first tokens are stored, and the same as plain tensors."""

    def __init__(self, lengths, block_size, heads, dtype=torch.float32, seed=0):
        self.generator = torch.Generator().manual_seed(seed)
        self.block_size = block_size
        self.heads = heads
        self.dtype = dtype
        blocks = [-(-length // block_size) for length, _ in lengths]
        ids = list(range(1, sum(blocks) + 4))
        random.Random(seed).shuffle(ids)
        self.tables = [[ids.pop() for _ in range(count)] for count in blocks]
        pool_shape = (sum(blocks) + 4, block_size, heads.kv, heads.dim)
        # What no sequence has written is huge, not zero: seeing it would change the answer.
        self.pool = KvPool(*(torch.full(pool_shape, 1e4, dtype=dtype) for _ in range(2)))
        self.lengths = lengths
        self.keys = [self.random(length, heads.kv, heads.dim) for length, _ in lengths]
        self.values = [self.random(length, heads.kv, heads.dim) for length, _ in lengths]
        for table, keys, values, (length, rows) in zip(
            self.tables, self.keys, self.values, lengths, strict=True
        ):
            for position in range(length - rows):
                block, offset = table[position // block_size], position % block_size
                self.pool.keys[block, offset] = keys[position]
                self.pool.values[block, offset] = values[position]

    def random(self, *shape):
        return torch.randn(shape, generator=self.generator).to(self.dtype)

    def metadata(self, device=CPU):
        layout = StepLayout(self.block_size, len(self.pool.keys) - 1, device)
        batch = [
            item([0] * rows, length - rows, table)
            for (length, rows), table in zip(self.lengths, self.tables, strict=True)
        ]
        attention = layout(batch).on(device).attention
        laid_out = list(zip(attention.context_lens, attention.query_lens, strict=True))
        assert laid_out == self.lengths, "list the sequences in the order of the layout"
        return attention


def plain(query, keys, values):
    """`[rows, query_heads, dim]` at the end of `[context, kv_heads, dim]`, in fp64."""
    query, keys, values = query.double(), keys.double(), values.double()
    (rows, query_heads, dim), (context, kv_heads) = query.shape, keys.shape[:2]
    out = torch.empty_like(query)
    for row in range(rows):
        seen = context - rows + row + 1
        for head in range(query_heads):
            kv_head = head // (query_heads // kv_heads)
            scores = keys[:seen, kv_head] @ query[row, head] / dim**0.5
            out[row, head] = scores.softmax(0) @ values[:seen, kv_head]
    return out


def check(
    lengths,
    block_size,
    dtype=torch.float32,
    atol=1e-5,
    backend=None,
    heads=HEADS,
    query_scale=1.0,
):
    """`lengths` lists (context, rows of this step), in the order of the layout."""
    paged = Paged(lengths, block_size, heads, dtype)
    backend = backend or attention_backend("sdpa")
    queries = [paged.random(rows, heads.query, heads.dim) * query_scale for _, rows in lengths]
    new_keys = [
        keys[length - rows :] for keys, (length, rows) in zip(paged.keys, lengths, strict=True)
    ]
    new_values = [
        values[length - rows :]
        for values, (length, rows) in zip(paged.values, lengths, strict=True)
    ]
    plan = backend.plan(paged.metadata(), dtype)
    rows = Rows(torch.cat(queries), torch.cat(new_keys), torch.cat(new_values))
    answer = backend.attend(rows, paged.pool, plan)
    parts = answer.split([rows for _, rows in lengths])
    for part, query, keys, values in zip(parts, queries, paged.keys, paged.values, strict=True):
        torch.testing.assert_close(part.double(), plain(query, keys, values), atol=atol, rtol=atol)
    return plan
