"""Device memory that steps need besides weights and KV pool, computed before the pool is sized.

Upper bounds from the shapes of the tensors alive at the same time in `LlamaModel.forward`, in
`sampler`, and in `DecodeGraphs`, for attention by `triton`, which gathers nothing. Memory of
libraries (cuBLAS's workspace, kernel code) is not included.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from worker.decode_graphs import padded_sizes
from worker.models.config import ModelConfig

INDEX_BYTES = 8
FLOAT_BYTES = 4

SAMPLING_BYTES = 40
"""Bytes per logit of a step in which every row draws with top-k and top-p: the logits, those of the
random rows and their weights, 4 + 4 + 4; then the larger of a sort, values and indices with a copy
of both (4 + 8 + 4 + 8), and a sum, values, doubles and their sums (4 + 8 + 8)."""


class StepLimits(NamedTuple):
    """The largest step: rows, sequences, and blocks of one sequence."""

    token_budget: int
    max_batch_size: int
    blocks_of_sequence: int


def row_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of activations per token at the peak of a layer.

    The peak is either the rotation, computed in fp32 (heads, halves, products, result: 12 bytes per
    element), or the gated MLP with both halves of gate and up, the activation and the product;
    plus the residual stream, queries, keys, values and the attention's result.
    """
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.query_heads * config.head_dim, config.kv_heads * config.head_dim
    heads = queries + keys
    around = 3 * hidden + (heads + keys) + heads + queries
    rotation = 12 * heads + dtype.itemsize * (heads + 2 * inner)
    mlp = dtype.itemsize * 4 * inner
    angles = 2 * config.head_dim * FLOAT_BYTES
    return dtype.itemsize * around + max(rotation, mlp) + angles


def step_bytes(config: ModelConfig, dtype: torch.dtype, limits: StepLimits) -> int:
    """Bytes of the largest step without a graph: inputs, activations and sampling."""
    inputs = 3 * limits.token_budget + limits.max_batch_size * (2 * limits.blocks_of_sequence + 3)
    activations = limits.token_budget * row_bytes(config, dtype)
    logits = limits.max_batch_size * config.vocab_size * max(SAMPLING_BYTES, _logit_bytes(dtype))
    return INDEX_BYTES * inputs + activations + logits


def graph_bytes(
    config: ModelConfig, dtype: torch.dtype, limits: StepLimits, splits: dict[int, int]
) -> int:
    """Bytes of replayed decodes: inputs and partial sums of every size, the block table, tokens and
    logits, and the scratch memory of the largest size.

    splits  parts into which attention splits keys, per captured batch size
    """
    batch = max(splits)  # captured even if the token budget admits fewer sequences
    inputs = sum(4 * size + size + 1 for size in splits) + batch * (limits.blocks_of_sequence + 1)
    sums = sum(size * parts for size, parts in splits.items() if parts > 1)
    kept = INDEX_BYTES * inputs + FLOAT_BYTES * batch * config.vocab_size
    kept += FLOAT_BYTES * sums * config.query_heads * (config.head_dim + 2)
    scratch = batch * (row_bytes(config, dtype) + config.vocab_size * _logit_bytes(dtype))
    return kept + scratch


def splits_of_sizes(
    config: ModelConfig, max_batch_size: int, context_tokens: int, processors: int
) -> dict[int, int]:
    """`splits` of `graph_bytes` for a device with this many streaming multiprocessors."""
    from worker.attention.triton import splits_of  # not every machine has triton

    return {
        size: splits_of(size * config.kv_heads, context_tokens, processors)
        for size in padded_sizes(max_batch_size)
    }


def _logit_bytes(dtype: torch.dtype) -> int:
    """Bytes per computed logit: in the model's dtype, plus fp32 if the dtype differs."""
    return FLOAT_BYTES if dtype == torch.float32 else dtype.itemsize + FLOAT_BYTES
