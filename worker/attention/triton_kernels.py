"""The paged attention kernels in Triton: one for decodes and prefill chunks, one to join splits.

A program computes one tile: some consecutive rows of one sequence, for all query heads that share
one KV head. Rows and heads are folded into the tile's first dimension, so keys are read once:

    tile row m  ->  row `first_row + m // GROUP` of the sequence, head `m % GROUP` of the group

It iterates over the sequence's keys through the block table with a running maximum and sum (online
softmax, Milakov and Gimelshein 2018; FlashAttention, Dao 2022), all in fp32 and base 2. With
SPLITS > 1 several programs share the keys (Flash-Decoding, 2023), and `join_splits` adds up their
partial sums.

Under `TRITON_INTERPRET=1` the same source runs on a CPU, with UPCAST, because the interpreter
computes products of bfloat16 incorrectly.
"""

# Triton compiles these functions from their source: their parameters have no Python types.
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def paged_attention(
    query,
    key_pool,
    value_pool,
    out,
    part_sums,
    part_tops,
    part_totals,
    block_table,
    query_start_loc,
    seq_lens,
    tile_sequences,
    tile_rows,
    scale,
    query_stride,
    table_stride,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    SPLITS: tl.constexpr,
    DECODE: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Programs: (tile, KV head, split).

    query          [rows, query_heads, HEAD_DIM], rows `query_stride` elements apart
    pools          [blocks + 1, BLOCK_SIZE, KV_HEADS, HEAD_DIM], contiguous
    out            [rows, query_heads, HEAD_DIM], contiguous; written if SPLITS is 1
    part_sums      [rows, query_heads, SPLITS, HEAD_DIM] fp32, weighted sums of values
    part_tops      [rows, query_heads, SPLITS] fp32, greatest score (base 2); -inf for no key
    part_totals    [rows, query_heads, SPLITS] fp32, sums of weights
    block_table    [sequences, ...], rows `table_stride` elements apart
    tile_sequences, tile_rows   [tiles] sequence of a tile, first row in it; unused for DECODE,
                   where tile i is the one row of sequence i
    scale          of the scores, log2(e) included
    WIDE_DIM       HEAD_DIM rounded up to a power of two from 16
    TILE           rows * GROUP that fit, a power of two from 16
    """
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    if DECODE:
        sequence = tile
        first_row = 0
    else:
        sequence = tl.load(tile_sequences + tile).to(tl.int32)
        first_row = tl.load(tile_rows + tile).to(tl.int32)
    start = tl.load(query_start_loc + sequence).to(tl.int32)
    rows = tl.load(query_start_loc + sequence + 1).to(tl.int32) - start
    context = tl.load(seq_lens + sequence).to(tl.int32)

    # The tile's rows: their index in the step, their head, the last position that each sees.
    m = tl.arange(0, TILE)
    row = first_row + m // GROUP
    here = (m < TILE // GROUP * GROUP) & (row < rows)
    seen = context - rows + row
    target = (start + row).to(tl.int64)
    head = kv_head * GROUP + m % GROUP
    d = tl.arange(0, WIDE_DIM)
    within = d < HEAD_DIM
    q = tl.load(
        query + (target * query_stride + head * HEAD_DIM)[:, None] + d[None, :],
        mask=here[:, None] & within[None, :],
        other=0.0,
    )
    if UPCAST:
        q = q.to(tl.float32)

    # The keys [begin, end) of this split; the tile does not see later rows of the sequence.
    last = tl.minimum(context, context - rows + first_row + TILE // GROUP)
    steps = tl.cdiv(tl.cdiv(last, TILE_KEYS), SPLITS)
    begin = split * steps * TILE_KEYS
    end = tl.minimum(last, begin + steps * TILE_KEYS)
    top = tl.full([TILE], float("-inf"), tl.float32)
    total = tl.zeros([TILE], tl.float32)
    sums = tl.zeros([TILE, WIDE_DIM], tl.float32)
    table = block_table + sequence.to(tl.int64) * table_stride
    for first_key in range(begin, end, TILE_KEYS):
        n = first_key + tl.arange(0, TILE_KEYS)
        there = n < end
        block = tl.load(table + n // BLOCK_SIZE, mask=there, other=0).to(tl.int64)
        slot = (block * BLOCK_SIZE + n % BLOCK_SIZE) * KV_HEADS + kv_head
        k = tl.load(
            key_pool + (slot * HEAD_DIM)[None, :] + d[:, None],
            mask=there[None, :] & within[:, None],
            other=0.0,
        )
        v = tl.load(
            value_pool + (slot * HEAD_DIM)[:, None] + d[None, :],
            mask=there[:, None] & within[None, :],
            other=0.0,
        )
        if UPCAST:
            k = k.to(tl.float32)
            v = v.to(tl.float32)
        scores = tl.dot(q, k, input_precision="ieee") * scale
        visible = there[None, :] & (n[None, :] <= seen[:, None])
        scores = tl.where(visible, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        # A row that has seen no key yet keeps -inf; subtracting that from itself would be NaN.
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(scores - base[:, None])
        kept = tl.exp2(top - base)
        total = total * kept + tl.sum(weights, 1)
        sums = sums * kept[:, None]
        sums += tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        top = new_top

    place = target * (GROUP * KV_HEADS) + head
    if SPLITS == 1:
        answer = sums / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(
            out + (place * HEAD_DIM)[:, None] + d[None, :],
            answer.to(out.dtype.element_ty),
            mask=here[:, None] & within[None, :],
        )
    else:
        part = place * SPLITS + split
        tl.store(
            part_sums + (part * HEAD_DIM)[:, None] + d[None, :],
            sums,
            mask=here[:, None] & within[None, :],
        )
        tl.store(part_tops + part, top, mask=here)
        tl.store(part_totals + part, total, mask=here)


@triton.jit
def join_splits(
    part_sums,
    part_tops,
    part_totals,
    out,
    HEAD_DIM: tl.constexpr,
    WIDE_DIM: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Programs: (row * query head). SPLITS is a power of two; see `paged_attention`."""
    place = tl.program_id(0).to(tl.int64)
    s = tl.arange(0, SPLITS)
    d = tl.arange(0, WIDE_DIM)
    within = d < HEAD_DIM
    tops = tl.load(part_tops + place * SPLITS + s)
    top = tl.max(tops, 0)
    weights = tl.exp2(tops - top)  # some split has seen a key, so `top` is finite
    total = tl.sum(weights * tl.load(part_totals + place * SPLITS + s), 0)
    sums = tl.load(
        part_sums + ((place * SPLITS + s) * HEAD_DIM)[:, None] + d[None, :],
        mask=within[None, :],
        other=0.0,
    )
    answer = tl.sum(sums * weights[:, None], 0) / total
    tl.store(out + place * HEAD_DIM + d, answer.to(out.dtype.element_ty), mask=within)
