"""Decode steps on tensors with fixed addresses, so that CUDA graphs can replay them.

A graph is a recorded sequence of kernel launches with fixed shapes and addresses. So there is one
graph for each of several batch sizes. A batch is padded to the next size and copied into the
graph's inputs. The graphs share the block table, the outputs and their scratch memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from worker.attention.base import AttentionBackend, AttentionMetadata, KvPool
from worker.models.llama import LlamaModel
from worker.step_layout import HostStep

Compute = Callable[[], None]
Capture = Callable[[Compute], Compute]
"""Turns a function that computes on fixed tensors into one that repeats the computation."""

SMALL_SIZES = (1, 2, 4)
SIZE_STEP = 8


def padded_sizes(max_batch_size: int) -> list[int]:
    """Batch sizes to capture, ascending: 1, 2, 4, 8, 16, 24, … and `max_batch_size` itself."""
    sizes = {*SMALL_SIZES, *range(SIZE_STEP, max_batch_size, SIZE_STEP), max_batch_size}
    return sorted(size for size in sizes if size <= max_batch_size)


def eager(compute: Compute) -> Compute:
    """Replay by computing again, without a graph: for devices that have none."""
    compute()
    return compute


class CudaCapture:
    """Captures CUDA graphs that share one pool of scratch memory, so they must not overlap."""

    def __init__(self) -> None:
        self._memory = torch.cuda.graph_pool_handle()
        # One stream for all: freed memory is reused only by the same stream.
        self._side = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def __call__(self, compute: Compute) -> Compute:
        """Run `compute` once, which compiles kernels and allocates; then record it.

        The graph holds addresses only: its user must keep all outside tensors alive.
        """
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            compute()
        torch.cuda.current_stream().wait_stream(self._side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory):
            compute()
        return graph.replay


class Decoded(NamedTuple):
    """Results of a replay, valid until the next one.

    tokens  [sequences] the likeliest token of each, in the layout's order
    logits  [sequences, vocabulary] fp32
    """

    tokens: torch.Tensor
    logits: torch.Tensor


class _Graph(NamedTuple):
    """One size. `compute` is stored because it keeps the tensors of `replay` alive.

    inputs  [4, size] token ids, positions, slots, lengths
    """

    inputs: torch.Tensor
    compute: Compute
    replay: Compute


class DecodeGraphs:
    """Decode steps of one model and pool, for batches up to `max_batch_size` sequences.

    context_tokens  longest sequence: determines the width of the block table and the number
                    of parts into which attention splits the keys
    capture         `CudaCapture()`, or `eager`
    Raises ValueError for a backend whose decodes cannot be replayed.
    """

    def __init__(
        self,
        model: LlamaModel,
        pools: list[KvPool],
        backend: AttentionBackend[object],
        block_size: int,
        max_batch_size: int,
        context_tokens: int,
        capture: Capture,
    ) -> None:
        if not backend.replayable_decodes:
            raise ValueError(
                f"the attention backend {backend.name} cannot be captured in CUDA graphs; use "
                "triton, or set worker.cuda_graphs to false"
            )
        device = model.device
        self._model = model
        self._pools = pools
        self._backend = backend
        self._block_size = block_size
        self._context_tokens = context_tokens
        self._device = device
        self._table = torch.zeros(
            max_batch_size, -(-context_tokens // block_size), dtype=torch.int64, device=device
        )
        self._tokens = torch.zeros(max_batch_size, dtype=torch.int64, device=device)
        self._logits = torch.zeros(
            max_batch_size, model.config.vocab_size, dtype=torch.float32, device=device
        )
        self._graphs: dict[int, _Graph] = {}
        # The largest first: its scratch memory is large enough for the others.
        for size in reversed(padded_sizes(max_batch_size)):
            self._graphs[size] = self._captured(size, capture)
        self._sizes = sorted(self._graphs)

    def size_for(self, sequences: int) -> int:
        """Size to pad this many sequences to; 0 if there are too many."""
        return next((size for size in self._sizes if size >= sequences), 0)

    def replay(self, step: HostStep) -> Decoded:
        """Compute a step of decodes that all sample, padded to one of the sizes."""
        size, sequences = len(step.query_lens), len(step.sampled)
        graph = self._graphs[size]
        inputs, tables = step.flat[: 4 * size], step.flat[-step.sizes[-1] :]
        graph.inputs.copy_(inputs.view(4, size), non_blocking=True)
        # Only the columns in use are copied; columns beyond a sequence's length are never read.
        tables = tables.to(self._device, non_blocking=True).view(size, -1)
        self._table[:size, : tables.shape[1]].copy_(tables)
        graph.replay()
        return Decoded(self._tokens[:sequences], self._logits[:sequences])

    def _captured(self, size: int, capture: Capture) -> _Graph:
        device = self._device
        inputs = torch.zeros(4, size, dtype=torch.int64, device=device)
        token_ids, positions, slots, lengths = inputs
        lengths.fill_(1)
        rows = torch.arange(size + 1, device=device)
        plan = self._backend.plan(
            AttentionMetadata(
                query_start_loc=rows,
                seq_lens=lengths,
                block_table=self._table[:size],
                slot_mapping=slots,
                block_size=self._block_size,
                decodes=size,
                query_lens=[1] * size,
                context_lens=[self._context_tokens] * size,
            ),
            self._model.dtype,
        )

        def compute() -> None:
            logits = self._model.forward(
                token_ids, positions, self._pools, self._backend, plan, rows[:size]
            )
            self._logits[:size].copy_(logits)
            self._tokens[:size].copy_(logits.argmax(dim=-1))

        return _Graph(inputs, compute, capture(compute))
