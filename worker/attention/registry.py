"""Attention backends by name."""

from __future__ import annotations

import torch

from worker.attention.base import AttentionBackend

BACKENDS = ("auto", "sdpa", "triton")


def attention_backend(name: str, device: torch.device | str = "cpu") -> AttentionBackend[object]:
    """The backend of that name for `device`; "auto" is triton on CUDA, else sdpa.

    Raises ValueError for an unknown name, or a backend whose package is missing.
    """
    if name == "varlen":
        raise ValueError(
            "the attention backend varlen is only a reference in tests/gpu/run.py, because it "
            "cannot read blocks below 256 tokens; set worker.attention to triton"
        )
    if name not in BACKENDS:
        raise ValueError(f"unknown attention backend {name!r}; use one of {', '.join(BACKENDS)}")
    if name == "auto":
        name = "triton" if torch.device(device).type == "cuda" else "sdpa"
    # Imported here, because not every machine has triton.
    if name == "sdpa":
        from worker.attention.sdpa import SdpaBackend

        return SdpaBackend()  # type: ignore[return-value]
    try:
        from worker.attention.triton import TritonBackend
    except ModuleNotFoundError as error:
        raise ValueError(
            "the attention backend triton needs the package triton. Install a CUDA build of "
            "torch or stemroute[cuda], or set worker.attention to sdpa"
        ) from error
    return TritonBackend()  # type: ignore[return-value]
