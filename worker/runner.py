"""Run the engine's steps on torch: one forward pass for prefill chunks and decodes together."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from worker.attention.base import AttentionBackend
from worker.attention.registry import attention_backend
from worker.batch import BatchItem
from worker.decode_graphs import Capture, Decoded, DecodeGraphs
from worker.kv_memory import new_pools
from worker.models.llama import LlamaModel
from worker.sampler import Draw, sample
from worker.staging import read_back
from worker.step_layout import Step, StepLayout


class TorchRunner:
    """Implements `worker.batch.Runner` with a model and its KV pool on one device.

    Within a step the host waits for the device once, to read the sampled tokens.

    kv_blocks  usable blocks; the pool has one more, block 0, as padding
    """

    def __init__(
        self, model: LlamaModel, kv_blocks: int, block_size: int, attention: str = "auto"
    ) -> None:
        self.model = model
        self.block_size = block_size
        self.pools = new_pools(model.config, kv_blocks, block_size, model.dtype, model.device)
        self._layout = StepLayout(block_size, kv_blocks, model.device)
        self._backend: AttentionBackend[object] = attention_backend(attention, model.device)
        self._graphs: DecodeGraphs | None = None

    @property
    def replayable_decodes(self) -> bool:
        """Whether `capture_decodes` can be used with this attention backend."""
        return self._backend.replayable_decodes

    @torch.inference_mode()
    def capture_decodes(self, max_batch_size: int, context_tokens: int, capture: Capture) -> None:
        """Capture decode steps of up to `max_batch_size` sequences, then replay them
        (`DecodeGraphs`).

        Call it before the first step. Overwrites block 0 of the pool.
        """
        self._graphs = DecodeGraphs(
            self.model,
            self.pools,
            self._backend,
            self.block_size,
            max_batch_size,
            context_tokens,
            capture,
        )

    @torch.inference_mode()
    def execute(self, batch: list[BatchItem]) -> list[int | None]:
        """One sampled token for each item with `sample`, None for the others.

        Raises ValueError for an item that is empty, exceeds its block table or writes outside the
        pool, MemoryError if device or host memory does not suffice.
        """
        answers: list[int | None] = [None] * len(batch)
        if not batch:
            return answers
        try:
            sampled, (likeliest, logits) = self.compute(batch)
            if sampled:
                tokens = sample(logits, [_draw(batch[index]) for index in sampled], likeliest)
                for index, token in zip(sampled, read_back(tokens), strict=True):
                    answers[index] = token
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            if self.model.device.type == "cuda":
                torch.cuda.empty_cache()  # freed memory cached in pieces of other sizes
            raise MemoryError(
                f"out of memory in a step of {len(batch)} sequences: {error}"
            ) from error
        return answers

    @torch.inference_mode()
    def compute(self, batch: list[BatchItem]) -> tuple[list[int], Decoded]:
        """Run a step: indices of the items that sample, and their tokens."""
        replayed = self._replayed(batch)
        if replayed:
            return replayed
        step = self.lay_out(batch)
        logits = self.forward(step)
        return step.sampled, Decoded(logits.argmax(dim=-1), logits)

    @torch.inference_mode()
    def forward(self, step: Step) -> torch.Tensor:
        """Write the step's KV and return the logits `[sampled, vocabulary]` (fp32)."""
        plan = self._backend.plan(step.attention, self.model.dtype)
        return self.model.forward(
            step.token_ids, step.positions, self.pools, self._backend, plan, step.logit_rows
        )

    def lay_out(self, batch: Sequence[BatchItem]) -> Step:
        """The batch on the device; see `StepLayout`."""
        return self._layout(batch).on(self.model.device)

    def _replayed(self, batch: list[BatchItem]) -> tuple[list[int], Decoded] | None:
        """`compute` by a graph; None if the batch is too large or not decodes only."""
        if self._graphs is None:
            return None
        if not all(len(item.token_ids) == 1 and item.sample for item in batch):
            return None
        size = self._graphs.size_for(len(batch))
        if not size:
            return None
        step = self._layout(batch, pad_to=size)
        return step.sampled, self._graphs.replay(step)


def out_of_memory(error: RuntimeError) -> bool:
    """Whether torch's error means that an allocation failed. Host errors have no class."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def _draw(item: BatchItem) -> Draw:
    return Draw(item.sampling, item.output_index)
