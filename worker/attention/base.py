"""The interface of attention over the paged KV pool, and the pool's layout.

Block 0 of the pool is padding: it pads block tables, and the rows that pad a replayed step write to
it. A token's slot is `block * block_size + offset`.

In a step the sequences that compute one token (decodes) come first, longest context first,
then those that compute several (prefill chunks); `query_start_loc` marks where each begins:

    rows  0 ...... decodes | chunk of sequence d | chunk of sequence d+1 | ...
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Generic, NamedTuple, TypeVar

import torch


class KvPool(NamedTuple):
    """One layer's keys and values, each `[blocks + 1, block_size, kv_heads, head_dim]`."""

    keys: torch.Tensor
    values: torch.Tensor


class Rows(NamedTuple):
    """One layer's projections of the step's rows.

    query       [rows, query_heads, head_dim], rotated
    key, value  [rows, kv_heads, head_dim], keys rotated
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor


class AttentionMetadata(NamedTuple):
    """Where the step's rows belong, built once per step and used by every layer.

    On the device (integers, views of the step's single upload):
    query_start_loc  [sequences + 1]  first row of each sequence, then the number of rows
    seq_lens         [sequences]      tokens of each sequence, those of this step included
    block_table      [sequences, widest]  blocks of each sequence, padded with 0
    slot_mapping     [rows]           slot of each row's key and value

    On the host, so that planning needs no synchronisation:
    block_size       tokens in a block
    decodes          number of leading sequences that compute exactly one token
    query_lens       rows of each sequence
    context_lens     tokens of each sequence, those of this step included
    """

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    block_size: int
    decodes: int
    query_lens: list[int]
    context_lens: list[int]


PlanT = TypeVar("PlanT")


class AttentionBackend(ABC, Generic[PlanT]):
    """Causal grouped-query attention of the step's rows over all tokens up to each row.

    replayable_decodes   a plan for decodes reads only the metadata's device tensors later, so that
                         a CUDA graph can replay it on other contents
    """

    name: str
    replayable_decodes = False

    @abstractmethod
    def plan(self, step: AttentionMetadata, dtype: torch.dtype) -> PlanT:
        """Prepare what all layers of one step share: masks, index lists, launch sizes.

        `dtype` is the dtype of queries and pool.
        """

    @abstractmethod
    def attend(self, rows: Rows, pool: KvPool, plan: PlanT) -> torch.Tensor:
        """Write the rows' keys and values to the pool, then attend. Returns `[rows, query_heads,
        head_dim]`.

        Slots beyond a sequence's tokens have no effect on it, even if they hold NaN.
        """


def write_kv(rows: Rows, pool: KvPool, slot_mapping: torch.Tensor) -> None:
    """Store the rows' keys and values in their slots `[rows]`."""
    pool.keys.view(-1, *pool.keys.shape[2:]).index_copy_(0, slot_mapping, rows.key)
    pool.values.view(-1, *pool.values.shape[2:]).index_copy_(0, slot_mapping, rows.value)
