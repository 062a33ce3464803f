"""A batch laid out flat: on the host in one buffer, then on the device in one copy."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch

from worker.attention.base import AttentionMetadata
from worker.batch import BatchItem
from worker.block_tables import BlockTables
from worker.staging import staging_buffer


class Step(NamedTuple):
    """A batch on the device.

    token_ids, positions  [rows]
    logit_rows            [sampled] the last row of each item that samples
    sampled               indices of those items in the batch, in the order of `logit_rows`
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    logit_rows: torch.Tensor
    attention: AttentionMetadata
    sampled: list[int]


class HostStep(NamedTuple):
    """A batch in layout order, on the host.

    flat     int64, pinned if the device is CUDA:
             token ids | positions | slots | lengths | logit rows | row starts | block tables
    sizes    of these parts
    sampled  indices in the batch of the items that sample, in the order of the layout
    The others are as in `AttentionMetadata`.
    """

    flat: torch.Tensor
    sizes: list[int]
    sampled: list[int]
    block_size: int
    decodes: int
    query_lens: list[int]
    context_lens: list[int]

    def on(self, device: torch.device) -> Step:
        """Copy the batch to `device`, queued behind its current work."""
        parts = torch.split_with_sizes(self.flat.to(device, non_blocking=True), self.sizes)
        token_ids, positions, slots, lengths, logit_rows, row_starts, tables = parts
        return Step(
            token_ids=token_ids,
            positions=positions,
            logit_rows=logit_rows,
            attention=AttentionMetadata(
                query_start_loc=row_starts,
                seq_lens=lengths,
                block_table=tables.view(len(self.query_lens), -1),
                slot_mapping=slots,
                block_size=self.block_size,
                decodes=self.decodes,
                query_lens=self.query_lens,
                context_lens=self.context_lens,
            ),
            sampled=self.sampled,
        )


class StepLayout:
    """Lays out batches for one pool, whose usable blocks are 1 to `capacity_blocks`."""

    def __init__(self, block_size: int, capacity_blocks: int, device: torch.device) -> None:
        self.block_size = block_size
        self._capacity_blocks = capacity_blocks
        self._device = device
        self._tables = BlockTables(block_size)

    def __call__(self, batch: Sequence[BatchItem], pad_to: int = 0) -> HostStep:
        """Flatten a batch: decodes first, longest context first, then prefill chunks.

        A batch of single tokens may be padded to `pad_to` sequences: those added compute token 0
        at position 0 of block 0, which no request reads.
        Raises ValueError for an item that is empty, exceeds its block table or writes outside the
        pool.
        """
        size = self.block_size
        order = sorted(range(len(batch)), key=lambda index: _place(batch[index]))
        items = [batch[index] for index in order]
        query_lens = [len(item.token_ids) for item in items]
        context_lens = [item.start + len(item.token_ids) for item in items]
        used = [-(-context // size) for context in context_lens]
        self._check(items, used)
        widest = max(used)
        self._tables.begin(widest)
        table_rows = [
            self._tables.update(item.block_table, item.start, count)
            for item, count in zip(items, used, strict=True)
        ]
        decodes = query_lens.count(1)
        padding = max(0, pad_to - len(items))
        assert not padding or decodes == len(items), "only single tokens are padded"
        query_lens += [1] * padding
        context_lens += [1] * padding
        starts = [0, *accumulate(query_lens)]
        rows, sequences = starts[-1], len(query_lens)
        sampled = [index for index in order if batch[index].sample]
        sizes = [rows, rows, rows, sequences, len(sampled), sequences + 1, sequences * widest]
        flat = staging_buffer(sum(sizes), self._device)
        # Views of the one buffer that is copied.
        token_ids, positions, slots, lengths, logit_rows, row_starts, flat_tables = (
            part.numpy() for part in torch.split_with_sizes(flat, sizes)
        )
        tables = flat_tables.reshape(sequences, widest)
        tables[: len(items)] = self._tables.take(table_rows, widest)
        tables[len(items) :] = 0
        token_ids[:decodes] = [item.token_ids[0] for item in items[:decodes]]
        positions[:decodes] = [item.start for item in items[:decodes]]
        blocks = tables[np.arange(decodes), positions[:decodes] // size]
        slots[:decodes] = blocks * size + positions[:decodes] % size
        for place in range(decodes, len(items)):
            first, last = starts[place], starts[place + 1]
            token_ids[first:last] = items[place].token_ids
            here = np.arange(items[place].start, context_lens[place])
            positions[first:last] = here
            slots[first:last] = tables[place, here // size] * size + here % size
        used_rows = rows - padding
        token_ids[used_rows:] = positions[used_rows:] = slots[used_rows:] = 0
        self._check_slots(slots[:used_rows].min(), slots[:used_rows].max())
        logit_rows[:] = [starts[place + 1] - 1 for place, item in enumerate(items) if item.sample]
        row_starts[:] = starts
        lengths[:] = context_lens
        return HostStep(
            flat=flat,
            sizes=sizes,
            sampled=sampled,
            block_size=size,
            decodes=decodes + padding,
            query_lens=query_lens,
            context_lens=context_lens,
        )

    @staticmethod
    def _check(items: list[BatchItem], used: list[int]) -> None:
        for item, count in zip(items, used, strict=True):
            if not item.token_ids:
                raise ValueError(f"request {item.request_id} has no token to compute in this step")
            if count > len(item.block_table):
                raise ValueError(
                    f"request {item.request_id} needs {count} blocks for "
                    f"{item.start + len(item.token_ids)} tokens, its table has "
                    f"{len(item.block_table)}"
                )

    def _check_slots(self, least: int, greatest: int) -> None:
        first, end = self.block_size, (self._capacity_blocks + 1) * self.block_size
        if least < first or greatest >= end:
            raise ValueError(
                f"slots {least} to {greatest} are outside the pool's {first} to {end - 1}"
            )


def _place(item: BatchItem) -> tuple[bool, int]:
    """Sort key: decodes before chunks, the longest context first."""
    return len(item.token_ids) > 1, -item.start
