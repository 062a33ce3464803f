"""Copies to the device and back. Only copies back make the host wait."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch


def staging_buffer(size: int, device: torch.device) -> torch.Tensor:
    """`[size]` int64 on the host, pinned for CUDA, so that copies are asynchronous.

    Allocate a new one for every copy: torch reuses freed pinned memory only after the copies that
    read it have ended.
    """
    return torch.empty(size, dtype=torch.int64, pin_memory=device.type == "cuda")


def upload(
    values: Sequence[object] | npt.NDArray[np.generic], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """`values` as a tensor on `device`. On CUDA the copy is queued, not waited for."""
    host = torch.as_tensor(values, dtype=dtype)
    if device.type == "cuda":
        host = host.pin_memory()
    return host.to(device, non_blocking=True)


def read_back(tokens: torch.Tensor) -> list[int]:
    """Values of an int64 tensor `[size]`, once the device has computed them."""
    if tokens.device.type == "cuda":
        host = staging_buffer(len(tokens), tokens.device)
        host.copy_(tokens, non_blocking=True)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record()
        copied.synchronize()
        tokens = host
    ids: list[int] = tokens.tolist()
    return ids
