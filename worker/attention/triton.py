"""Paged attention without a gather: Triton kernels that read the pool through the block table.

The backend for CUDA. On a CPU it runs only in Triton's interpreter (`TRITON_INTERPRET=1` before
triton is first imported), for tests: it is orders of magnitude slower than `sdpa`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton

from worker.attention.base import AttentionBackend, AttentionMetadata, KvPool, Rows, write_kv
from worker.attention.triton_kernels import join_splits, paged_attention
from worker.staging import upload

CHUNK_TILE = 64
"""Minimum of rows times query heads of a group in one program of a prefill chunk."""

TILE_KEYS_BYTES = 256
"""A program reads 64 keys at a time, or 32 if a key is longer than this: two stages of keys and
values must fit in shared memory."""

MAX_SPLITS = 32
MIN_SPLIT_KEYS = 256
"""A decode's keys are split among programs if the sequences alone would leave processors idle, but
into parts of at least this many keys."""

PROGRAMS_PER_PROCESSOR = 2


class Tiles(NamedTuple):
    """Tiles of the prefill chunks: the sequence and its first row, `[tiles]` each."""

    sequences: torch.Tensor
    first_rows: torch.Tensor


class Parts(NamedTuple):
    """Partial results of the programs of a split decode, fp32; shared by all layers.

    sums          [decodes, query_heads, splits, head_dim]
    tops, totals  [decodes, query_heads, splits]
    """

    sums: torch.Tensor
    tops: torch.Tensor
    totals: torch.Tensor


class TritonPlan:
    """The launches of one step; the first layer adds what depends on the model's shape.

    For a step of decodes only, the kernels read only the metadata's device tensors: such a plan can
    be reused after these were overwritten, with contexts up to the original length.
    """

    def __init__(self, step: AttentionMetadata) -> None:
        self.step = step
        self.tiles: Tiles | None = None
        self.parts: Parts | None = None


class TritonBackend(AttentionBackend[TritonPlan]):
    """CUDA, and Triton's interpreter."""

    name = "triton"
    replayable_decodes = True

    def __init__(self) -> None:
        self._interpreted = bool(triton.knobs.runtime.interpret)
        self._processors: dict[torch.device, int] = {}

    def plan(self, step: AttentionMetadata, dtype: torch.dtype) -> TritonPlan:
        """Nothing to prepare before the number of heads is known."""
        return TritonPlan(step)

    def attend(self, rows: Rows, pool: KvPool, plan: TritonPlan) -> torch.Tensor:
        """See `AttentionBackend.attend`. Raises ValueError if Triton cannot run."""
        query = rows.query
        if query.device.type != "cuda" and not self._interpreted:
            raise ValueError(
                f"the attention backend triton needs a CUDA device, not {query.device}; "
                "set worker.attention to sdpa"
            )
        step = plan.step
        write_kv(rows, pool, step.slot_mapping)
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        if step.decodes:
            self._attend_decodes(query, pool, out, plan)
        if len(step.query_lens) > step.decodes:
            self._attend_chunks(query, pool, out, plan)
        return out

    def _attend_decodes(
        self, query: torch.Tensor, pool: KvPool, out: torch.Tensor, plan: TritonPlan
    ) -> None:
        step = plan.step
        query_heads, head_dim = query.shape[1:]
        kv_heads = pool.keys.shape[2]
        splits = splits_of(
            step.decodes * kv_heads, step.context_lens[0], self._processors_of(query.device)
        )
        if splits > 1 and plan.parts is None:
            shape = (step.decodes, query_heads, splits)
            plan.parts = Parts(
                *(
                    torch.empty(size, dtype=torch.float32, device=query.device)
                    for size in ((*shape, head_dim), shape, shape)
                )
            )
        tile = max(16, triton.next_power_of_2(query_heads // kv_heads))
        grid = (step.decodes, kv_heads, splits)
        self._launch(grid, query, pool, out, plan, tile, splits, None)
        if plan.parts is not None:
            join_splits[(step.decodes * query_heads,)](
                *plan.parts, out, HEAD_DIM=head_dim, WIDE_DIM=_wide(head_dim), SPLITS=splits
            )

    def _attend_chunks(
        self, query: torch.Tensor, pool: KvPool, out: torch.Tensor, plan: TritonPlan
    ) -> None:
        kv_heads = pool.keys.shape[2]
        group = query.shape[1] // kv_heads
        tile = max(CHUNK_TILE, triton.next_power_of_2(group))
        if plan.tiles is None:
            plan.tiles = _cut(plan.step, tile // group, query.device)
        grid = (len(plan.tiles.sequences), kv_heads, 1)
        self._launch(grid, query, pool, out, plan, tile, 1, plan.tiles)

    def _launch(
        self,
        grid: tuple[int, int, int],
        query: torch.Tensor,
        pool: KvPool,
        out: torch.Tensor,
        plan: TritonPlan,
        tile: int,
        splits: int,
        tiles: Tiles | None,
    ) -> None:
        step = plan.step
        head_dim = query.shape[2]
        assert query.stride()[1:] == (head_dim, 1), "heads lie side by side"
        assert pool.keys.is_contiguous()
        assert pool.values.is_contiguous()
        assert step.block_table.stride(1) == 1
        wide = _wide(head_dim)
        # Pointers that a variant does not read must still be valid.
        parts = plan.parts if splits > 1 and plan.parts is not None else Parts(out, out, out)
        sequences, first_rows = tiles or (step.seq_lens, step.seq_lens)
        paged_attention[grid](
            query,
            *pool,
            out,
            *parts,
            step.block_table,
            step.query_start_loc,
            step.seq_lens,
            sequences,
            first_rows,
            math.log2(math.e) / math.sqrt(head_dim),
            query.stride(0),
            step.block_table.stride(0),
            GROUP=query.shape[1] // pool.keys.shape[2],
            KV_HEADS=pool.keys.shape[2],
            HEAD_DIM=head_dim,
            WIDE_DIM=wide,
            BLOCK_SIZE=step.block_size,
            TILE=tile,
            TILE_KEYS=64 if wide * query.element_size() <= TILE_KEYS_BYTES else 32,
            SPLITS=splits,
            DECODE=tiles is None,
            UPCAST=self._interpreted and query.dtype == torch.bfloat16,
            num_warps=4,
            num_stages=2,
        )

    def _processors_of(self, device: torch.device) -> int:
        """Streaming multiprocessors of the device; in the interpreter, as many as an H100 has."""
        if device not in self._processors:
            count = 132
            if device.type == "cuda":
                count = torch.cuda.get_device_properties(device).multi_processor_count
            self._processors[device] = count
        return self._processors[device]


def splits_of(programs: int, longest: int, processors: int) -> int:
    """Number of parts into which to split the keys of a step's decodes: a power of two.

    programs   number of programs without splitting
    longest    longest context of the step in tokens
    """
    wanted = PROGRAMS_PER_PROCESSOR * processors // programs
    limit = min(wanted, longest // MIN_SPLIT_KEYS, MAX_SPLITS)
    return 1 << max(0, limit.bit_length() - 1)


def _cut(step: AttentionMetadata, rows_of_tile: int, device: torch.device) -> Tiles:
    """Tiles of the chunks, the last of each sequence first, since these take longest."""
    sequences: list[int] = []
    first_rows: list[int] = []
    for index in range(step.decodes, len(step.query_lens)):
        first = range(0, step.query_lens[index], rows_of_tile)
        sequences += [index] * len(first)
        first_rows += reversed(first)
    both = upload([sequences, first_rows], torch.int64, device)
    return Tiles(both[0], both[1])


def _wide(head_dim: int) -> int:
    return max(16, int(triton.next_power_of_2(head_dim)))
