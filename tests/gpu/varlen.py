"""torch's `varlen_attn` over the paged pool: other kernels' answer to compare `triton` with.

It can be no backend of a worker: it reads pages of multiples of 256 tokens only, in half precision
only. Its keys are never split, since that left rows of paged batches unwritten (pytorch#194167).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import pad

from worker.attention.base import AttentionBackend, AttentionMetadata, KvPool, Rows, write_kv

PAGE_MULTIPLE = 256
DTYPES = (torch.float16, torch.bfloat16)


class VarlenPlan(NamedTuple):
    """A step as `varlen_attn` wants it; tensors are int32, shapes as in `AttentionMetadata`.

    key_start_loc       [sequences + 1] where keys would begin if they lay side by side
    longest_query, longest_context  of one sequence, in tokens
    """

    slot_mapping: torch.Tensor
    query_start_loc: torch.Tensor
    key_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    longest_query: int
    longest_context: int


class VarlenBackend(AttentionBackend[VarlenPlan]):
    """CUDA only."""

    name = "varlen"

    def plan(self, step: AttentionMetadata, dtype: torch.dtype) -> VarlenPlan:
        """Convert the metadata. Raises ValueError for blocks and dtypes that it cannot read."""
        if step.block_size % PAGE_MULTIPLE:
            raise ValueError(
                f"varlen reads blocks of multiples of {PAGE_MULTIPLE} tokens, not {step.block_size}"
            )
        if dtype not in DTYPES:
            raise ValueError(f"varlen computes in float16 and bfloat16, not in {dtype}")
        seq_lens = step.seq_lens.int()
        return VarlenPlan(
            slot_mapping=step.slot_mapping,
            query_start_loc=step.query_start_loc.int(),
            key_start_loc=pad(seq_lens.cumsum(0, dtype=torch.int32), (1, 0)),
            seq_lens=seq_lens,
            block_table=step.block_table.int(),
            longest_query=max(step.query_lens),
            longest_context=max(step.context_lens),
        )

    def attend(self, rows: Rows, pool: KvPool, plan: VarlenPlan) -> torch.Tensor:
        """See `AttentionBackend.attend`. Raises ValueError without CUDA."""
        query = rows.query
        if not query.is_cuda:
            raise ValueError(f"varlen needs a CUDA device, not {query.device}")
        write_kv(rows, pool, plan.slot_mapping)
        return varlen_attn(
            query.contiguous(),
            pool.keys,
            pool.values,
            plan.query_start_loc,
            plan.key_start_loc,
            plan.longest_query,
            plan.longest_context,
            window_size=(-1, 0),
            enable_gqa=query.shape[1] != rows.key.shape[1],
            seqused_k=plan.seq_lens,
            block_table=plan.block_table,
            num_splits=1,
        )
