"""Run a step of the engine on torch: one forward pass for prefill chunks and decodes together."""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch

from worker.attention import AttentionBackend, AttentionMetadata, attention_backend
from worker.engine import BatchItem
from worker.kv_memory import new_pools
from worker.models.llama import LlamaModel
from worker.sampler import Draw, sample


class Step(NamedTuple):
    """A batch laid out flat, on the device.

    token_ids, positions  [rows]
    logit_rows            [sampled] the last row of each item that samples
    sampled               indices of those items in the batch, in the order of `logit_rows`
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    logit_rows: torch.Tensor
    attention: AttentionMetadata
    sampled: list[int]


class TorchRunner:
    """Implements `worker.engine.Runner` with a model and its KV pool on one device.

    kv_blocks  usable blocks; the pool has one more, block 0, as padding
    """

    def __init__(
        self, model: LlamaModel, kv_blocks: int, block_size: int, attention: str = "auto"
    ) -> None:
        self.model = model
        self.block_size = block_size
        self.pools = new_pools(model.config, kv_blocks, block_size, model.dtype, model.device)
        self._capacity_blocks = kv_blocks
        self._backend: AttentionBackend[object] = attention_backend(attention, model.device)

    @torch.inference_mode()
    def execute(self, batch: list[BatchItem]) -> list[int | None]:
        """One sampled token for each item with `sample`, None for the others.

        Raises ValueError for an item that is empty, that its block table does not cover or that
        writes outside the pool.
        """
        if not batch:
            return []
        step = self.lay_out(batch)
        answers: list[int | None] = [None] * len(batch)
        logits = self.forward(step)
        if step.sampled:
            draws = [
                Draw(batch[index].sampling, batch[index].output_index) for index in step.sampled
            ]
            for index, token in zip(step.sampled, sample(logits, draws), strict=True):
                answers[index] = token
        return answers

    @torch.inference_mode()
    def forward(self, step: Step) -> torch.Tensor:
        """Write the step's KV and return the logits `[sampled, vocabulary]` (fp32)."""
        plan = self._backend.plan(step.attention, self.model.dtype)
        return self.model.forward(
            step.token_ids, step.positions, self.pools, self._backend, plan, step.logit_rows
        )

    def lay_out(self, batch: list[BatchItem]) -> Step:
        """Flatten a batch: decodes first, longest context first, then prefill chunks.

        Everything goes to the device in one copy:

            token ids | positions | slots | logit rows | row starts | lengths | block tables
        """
        size = self.block_size
        order = sorted(range(len(batch)), key=lambda index: _place(batch[index]))
        query_lens = [len(batch[index].token_ids) for index in order]
        context_lens = [batch[index].start + len(batch[index].token_ids) for index in order]
        widest = max(-(-context // size) for context in context_lens)
        starts = [0, *accumulate(query_lens)]
        rows, sequences = starts[-1], len(batch)
        sampled = [index for index in order if batch[index].sample]
        sizes = [rows, rows, rows, len(sampled), sequences + 1, sequences, sequences * widest]
        host = torch.empty(
            sum(sizes), dtype=torch.int64, pin_memory=self.model.device.type == "cuda"
        )
        # Views of the one buffer: what is written to them is what gets copied.
        token_ids, positions, slots, logit_rows, row_starts, lengths, flat_tables = (
            part.numpy() for part in torch.split_with_sizes(host, sizes)
        )
        tables = flat_tables.reshape(sequences, widest)
        tables[:] = 0
        for place, index in enumerate(order):
            item, first, last = batch[index], starts[place], starts[place + 1]
            used = -(-context_lens[place] // size)
            self._check(item, used)
            tables[place, :used] = item.block_table[:used]
            token_ids[first:last] = item.token_ids
            positions[first:last] = np.arange(item.start, context_lens[place])
            here = positions[first:last]
            slots[first:last] = tables[place, here // size] * size + here % size
        if slots.min() < size or slots.max() >= (self._capacity_blocks + 1) * size:
            raise ValueError(
                f"slots {slots.min()} to {slots.max()} are outside the pool's "
                f"{size} to {(self._capacity_blocks + 1) * size - 1}"
            )
        logit_rows[:] = [
            starts[place + 1] - 1 for place, index in enumerate(order) if batch[index].sample
        ]
        row_starts[:] = starts
        lengths[:] = context_lens
        device = torch.split_with_sizes(host.to(self.model.device, non_blocking=True), sizes)
        return Step(
            token_ids=device[0],
            positions=device[1],
            logit_rows=device[3],
            attention=AttentionMetadata(
                query_start_loc=device[4],
                seq_lens=device[5],
                block_table=device[6].view(sequences, widest),
                slot_mapping=device[2],
                block_size=size,
                decodes=sum(length == 1 for length in query_lens),
                query_lens=query_lens,
                context_lens=context_lens,
            ),
            sampled=sampled,
        )

    @staticmethod
    def _check(item: BatchItem, used: int) -> None:
        if not item.token_ids:
            raise ValueError(f"request {item.request_id} has no token to compute in this step")
        if used > len(item.block_table):
            raise ValueError(
                f"request {item.request_id} needs {used} blocks for "
                f"{item.start + len(item.token_ids)} tokens, its table has {len(item.block_table)}"
            )


def _place(item: BatchItem) -> tuple[bool, int]:
    """Sort key: single tokens before chunks, the longest context first."""
    return len(item.token_ids) > 1, -item.start
