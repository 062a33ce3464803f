"""Projections `[rows, in] -> [rows, out]`, in the layout that is quickest where they run.

On a CPU in fp32 a step with few rows mostly waits for weights, so what counts is how many bytes
they take. `HalfLinear` keeps them in fp16 wherever that changes no value, as with checkpoints in
fp16 or bf16 and with what a GGUF file holds: against MKL on one AVX2 thread it takes 0.4 of the
time at 1 row, 0.35 at 8, 0.5 at 16 and about as long from 256 up (576 to 3,072 wide). Activations,
products and sums are fp32 as ever.

Where fp16 cannot hold the values, matrices that are much wider than deep go to oneDNN, whose
products with few rows take 0.5 to 0.7 of MKL's time for those shapes. The rest stays with MKL.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any, NamedTuple, Protocol

import torch
from torch.nn.functional import linear


class Projection(Protocol):
    """A matrix to multiply by, in whatever layout."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`[rows, in]` to `[rows, out]`."""
        ...


WIDE = 2
"""Matrices with so many times more outputs than inputs are given to oneDNN."""

ROWS_HINT = 8
"""Rows that oneDNN picks the layout for; it is as quick for others."""

HALF_PART = 4096
"""Rows that are compared with their fp16 at a time, which bounds the memory that it takes."""

HALF_EXPONENT = 14
"""Scaled matrices have their greatest value in [2^14, 2^15); fp16 ends just below 2^16."""

HALF_ERROR = 2.0**-25
"""Half the distance of fp16's subnormal numbers: the rounding that a scaled value may suffer. It is
2^-39 of the greatest value at most, where one rounding of fp32 is 2^-24."""


class Linear(NamedTuple):
    """Weight `[out, in]` and bias `[out]` or None."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`[rows, in]` to `[rows, out]`."""
        return linear(x, self.weight, self.bias)


class PackedLinear(NamedTuple):
    """Weight in oneDNN's blocked layout (opaque to other operators), bias `[out]` or None."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`[rows, in]` to `[rows, out]`."""
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self.weight, self.bias, "none", [], ""
        )
        return out


class HalfLinear(NamedTuple):
    """Weight and bias in FBGEMM's layout (opaque), the weight in fp16.

    unscale  what the product is multiplied by: a power of two
    """

    packed: Any
    unscale: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`[rows, in]` to `[rows, out]`, both fp32."""
        out: torch.Tensor = torch.ops.quantized.linear_dynamic_fp16(x, self.packed)
        return out if self.unscale == 1 else out.mul_(self.unscale)


def quickest(plain: Linear) -> Projection:
    """The same projection in the layout that is quicker here; `plain` may then be let go."""
    weight = plain.weight
    out, into = weight.shape
    if weight.device.type != "cpu" or weight.dtype != torch.float32:
        return plain
    if has_half_linear():
        scale = half_scale(weight)
        if scale:
            bias = None if plain.bias is None else plain.bias * scale
            scaled = weight if scale == 1 else weight * scale
            packed = torch.ops.quantized.linear_prepack_fp16(scaled, bias)
            return HalfLinear(packed, 1 / scale)
    if out >= WIDE * into and has_onednn_linear():
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS_HINT)
        return PackedLinear(packed, plain.bias)
    return plain


def half_scale(weight: torch.Tensor) -> float:
    """Power of two with which fp16 holds the matrix without changing it; 0 where it cannot.

    That is 1 where fp16 holds every value as it is. Otherwise the greatest value is scaled up to
    the top of the range, and only values that then are subnormal may be rounded (`HALF_ERROR`):
    bf16 has fewer digits than fp16 but reaches further down.
    """
    parts = torch.split(weight, HALF_PART)
    if all(torch.equal(part, part.half().float()) for part in parts):
        return 1.0
    greatest = max(float(part.abs().max()) for part in parts)
    if not math.isfinite(greatest):
        return 0.0
    scale = math.ldexp(1.0, HALF_EXPONENT + 1 - math.frexp(greatest)[1])
    for part in parts:
        scaled = part * scale
        if not bool((scaled - scaled.half()).abs().max() <= HALF_ERROR):
            return 0.0
    return scale


@cache
def has_half_linear() -> bool:
    """Whether this torch and processor multiply by fp16 weights: FBGEMM does on x86 with AVX2."""
    try:
        packed = torch.ops.quantized.linear_prepack_fp16(torch.ones(1, 1), None)
        one = torch.ops.quantized.linear_dynamic_fp16(torch.ones(1, 1), packed)
    except (AttributeError, RuntimeError):
        return False
    return bool(one == 1)


def has_onednn_linear() -> bool:
    """Whether this torch has the operators, which its own compiler uses."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    return all(
        hasattr(torch.ops.mkldnn, name) for name in ("_reorder_linear_weight", "_linear_pointwise")
    )
