"""Memory of the paged KV pool: layout, block size in bytes, number of blocks that fit."""

from __future__ import annotations

import os

import torch

from worker.attention.base import KvPool
from worker.models.config import ModelConfig

CPU_POOL_BYTES = 1 << 30
CPU_POOL_SHARE = 0.125
"""Limits of the pool on a CPU: this many bytes and this share of the free memory, because other
workers and the page cache need memory too."""


def kv_block_bytes(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block: keys and values of `block_size` tokens in all layers."""
    return 2 * config.layers * block_size * config.kv_heads * config.head_dim * dtype.itemsize


def blocks_that_fit(
    config: ModelConfig,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device | str,
    memory_share: float,
    reserved_bytes: int = 0,
) -> int:
    """Usable blocks (block 0 not counted) for a pool on `device`; call it with weights loaded.

    On CUDA, `memory_share` of the memory that is free now, minus `reserved_bytes` for steps
    (`step_memory`). On a CPU, a small default. Raises MemoryError if not even one block fits.
    """
    block_bytes = kv_block_bytes(config, block_size, dtype)
    device = torch.device(device)
    if device.type == "cuda":
        free_bytes, _ = torch.cuda.mem_get_info(device)
        pool_bytes = max(0, int((free_bytes - reserved_bytes) * memory_share))
    else:
        free_bytes = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        pool_bytes = min(CPU_POOL_BYTES, int(free_bytes * CPU_POOL_SHARE))
    blocks = pool_bytes // block_bytes - 1
    if blocks < 1:
        raise MemoryError(
            f"a KV pool of {pool_bytes} bytes on {device} ({free_bytes} bytes free, "
            f"{reserved_bytes} of them reserved for steps) cannot hold one block of {block_bytes} "
            "bytes. Free memory, or use a smaller model, max_batch_size, token_budget or "
            "block_size"
        )
    return blocks


def new_pools(
    config: ModelConfig, kv_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> list[KvPool]:
    """The pool of each layer, zeroed: a masked zero has no effect, a masked NaN would."""
    shape = (kv_blocks + 1, block_size, config.kv_heads, config.head_dim)
    return [
        KvPool(
            torch.zeros(shape, dtype=dtype, device=device),
            torch.zeros(shape, dtype=dtype, device=device),
        )
        for _ in range(config.layers)
    ]
