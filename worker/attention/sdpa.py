"""Gather, then `scaled_dot_product_attention`: the backend for CPUs, and the reference for others.

Decodes are batched: blocks of several sequences are gathered side by side, and the query heads that
share a KV head are folded into one group, so that keys are read once per group. Prefill chunks are
computed one sequence at a time.

A mask alone does not hide values that the former owner of a block left: 0 times NaN is NaN. So a
block is zeroed when a sequence starts to fill it, and a decode that is gathered beside longer ones
is padded with a block of its own.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from worker.attention.base import AttentionBackend, AttentionMetadata, KvPool, Rows, write_kv
from worker.staging import upload

PADDING_SHARE = 0.25
PADDING_BLOCKS = 64
"""Decodes share a gather while its padding is at most this share of the useful blocks, or so few
blocks that another call would cost more."""


class DecodeGroup(NamedTuple):
    """Decodes of similar context length: rows [first, last), gathered together.

    block_ids  [sequences * width], sequence after sequence
    mask       [sequences, 1, 1, width * block_size], 0 or -inf
    """

    first: int
    last: int
    block_ids: torch.Tensor
    mask: torch.Tensor


class Chunk(NamedTuple):
    """Prefill chunk of one sequence: rows [first, last) at the end of `context` tokens.

    mask is [rows, context], 0 or -inf, aligned bottom-right; None if the chunk is the whole
    context, which needs neither pool nor mask.
    """

    first: int
    last: int
    context: int
    block_ids: torch.Tensor
    mask: torch.Tensor | None


class SdpaPlan(NamedTuple):
    """Slots to write, and blocks to gather per group.

    begun  blocks whose first slots this step writes, but not their last; None if there are none
    """

    slot_mapping: torch.Tensor
    begun: torch.Tensor | None
    decodes: list[DecodeGroup]
    chunks: list[Chunk]


class SdpaBackend(AttentionBackend[SdpaPlan]):
    """Runs on every device of torch."""

    name = "sdpa"

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

    def plan(self, step: AttentionMetadata, dtype: torch.dtype) -> SdpaPlan:
        """Group the decodes by length and build the masks."""
        groups = []
        for first, last, width in _group_by_width(step):
            block_ids = _filled_up(step, first, last, width)
            positions = torch.arange(width * step.block_size, device=block_ids.device)
            absent = positions >= step.seq_lens[first:last, None]
            hidden = _additive(absent, dtype)[:, None, None, :]
            groups.append(DecodeGroup(first, last, block_ids.reshape(-1), hidden))
        chunks = []
        first = step.decodes
        for index in range(step.decodes, len(step.query_lens)):
            rows, context = step.query_lens[index], step.context_lens[index]
            block_ids = step.block_table[index, : -(-context // step.block_size)]
            mask: torch.Tensor | None = None
            if rows < context:
                later = torch.ones(rows, context, dtype=torch.bool, device=block_ids.device)
                mask = _additive(later.triu_(context - rows + 1), dtype)
            chunks.append(Chunk(first, first + rows, context, block_ids, mask))
            first += rows
        return SdpaPlan(step.slot_mapping, _begun(step), groups, chunks)

    def attend(self, rows: Rows, pool: KvPool, plan: SdpaPlan) -> torch.Tensor:
        """See `AttentionBackend.attend`."""
        if plan.begun is not None:
            pool.keys.index_fill_(0, plan.begun, 0.0)
            pool.values.index_fill_(0, plan.begun, 0.0)
        write_kv(rows, pool, plan.slot_mapping)
        query, key, value = rows
        out = torch.empty_like(query)
        kv_heads, head_dim = key.shape[1:]
        for group in plan.decodes:
            count = group.last - group.first
            folded = query[group.first : group.last].view(count, kv_heads, -1, head_dim)
            keys = self._gather("keys", pool.keys, group.block_ids, count)
            values = self._gather("values", pool.values, group.block_ids, count)
            # [count, kv_heads, group, head_dim] against [count, kv_heads, context, head_dim]
            answer = scaled_dot_product_attention(
                folded, keys.transpose(1, 2), values.transpose(1, 2), attn_mask=group.mask
            )
            out[group.first : group.last] = answer.reshape(count, -1, head_dim)
        for chunk in plan.chunks:
            count = chunk.last - chunk.first
            if chunk.mask is None:
                keys, values = key[chunk.first : chunk.last], value[chunk.first : chunk.last]
            else:
                keys = self._gather("keys", pool.keys, chunk.block_ids, 1)[0, : chunk.context]
                values = self._gather("values", pool.values, chunk.block_ids, 1)[0, : chunk.context]
            # [kv_heads, group, rows, head_dim] against [kv_heads, group (one view), context, ...]
            grouped = query[chunk.first : chunk.last].view(count, kv_heads, -1, head_dim)
            groups = grouped.shape[2]
            answer = scaled_dot_product_attention(
                grouped.permute(1, 2, 0, 3),
                keys.transpose(0, 1)[:, None].expand(-1, groups, -1, -1),
                values.transpose(0, 1)[:, None].expand(-1, groups, -1, -1),
                attn_mask=chunk.mask,
                is_causal=chunk.mask is None,
            )
            out[chunk.first : chunk.last] = answer.permute(2, 0, 1, 3).reshape(count, -1, head_dim)
        return out

    def _gather(
        self, name: str, pool: torch.Tensor, block_ids: torch.Tensor, sequences: int
    ) -> torch.Tensor:
        """Gather blocks side by side: `[sequences, tokens, kv_heads, head_dim]`.

        The target is reused between layers and steps: new memory costs one page fault per page.
        """
        buffer = self._buffers.get(name)
        size = block_ids.numel()
        if buffer is None or len(buffer) < size or buffer.shape[1:] != pool.shape[1:]:
            buffer = torch.empty(size + size // 4, *pool.shape[1:], dtype=pool.dtype).to(
                pool.device
            )
            self._buffers[name] = buffer
        torch.index_select(pool, 0, block_ids, out=buffer[:size])
        return buffer[:size].view(sequences, -1, *pool.shape[2:])


def _group_by_width(step: AttentionMetadata) -> list[tuple[int, int, int]]:
    """Split the decodes (longest first) into (first, last, blocks of the longest)."""
    widths = [-(-context // step.block_size) for context in step.context_lens[: step.decodes]]
    groups: list[tuple[int, int, int]] = []
    first, useful = 0, 0
    for index, width in enumerate(widths):
        padding = widths[first] * (index - first + 1) - (useful + width)
        if padding > max(PADDING_BLOCKS, PADDING_SHARE * (useful + width)):
            groups.append((first, index, widths[first]))
            first, useful = index, 0
        useful += width
    if widths:
        groups.append((first, len(widths), widths[first]))
    return groups


def _begun(step: AttentionMetadata) -> torch.Tensor | None:
    """Blocks that a sequence starts in this step and does not fill."""
    size = step.block_size
    ends = [
        (index, context // size)
        for index, (rows, context) in enumerate(
            zip(step.query_lens, step.context_lens, strict=True)
        )
        if 0 < context % size <= rows
    ]
    if not ends:
        return None
    sequences, columns = upload(np.array(ends).T, torch.int64, step.block_table.device)
    return step.block_table[sequences, columns]


def _filled_up(step: AttentionMetadata, first: int, last: int, width: int) -> torch.Tensor:
    """Blocks `[last - first, width]` of these sequences, padded with each one's first block."""
    block_ids = step.block_table[first:last, :width]
    used = -(-np.array(step.context_lens[first:last]) // step.block_size)
    if used.min() == width:
        return block_ids
    behind = np.arange(width) >= used[:, None]
    return torch.where(upload(behind, torch.bool, block_ids.device), block_ids[:, :1], block_ids)


def _additive(hidden: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """0 for visible keys, -inf for `hidden` ones."""
    mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
    return mask.masked_fill_(hidden, float("-inf"))
