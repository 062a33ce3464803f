"""Projections `[rows, in] -> [rows, out]`, in the fastest layout for the device.

On a CPU in fp32 the time of a step with few rows is mostly reading weights, so their bytes matter.
`HalfLinear` stores them in fp16 if that changes no value, as with checkpoints in fp16 or bf16 and
with GGUF files: compared with MKL on one AVX2 thread it takes 0.4 of the time at 1 row, 0.35 at 8,
0.5 at 16 and about the same from 256 up (576 to 3,072 wide). Activations, products and sums stay in
fp32.

If fp16 cannot represent the values, matrices with many more outputs than inputs use oneDNN, whose
products with few rows take 0.5 to 0.7 of MKL's time for these shapes. The rest uses MKL.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any, NamedTuple, Protocol

import torch
from torch.nn.functional import linear


class Projection(Protocol):
    """A matrix to multiply by, in any layout."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`[rows, in]` to `[rows, out]`."""
        ...


WIDE = 2
"""Matrices with at least this many times more outputs than inputs use oneDNN."""

ROWS_HINT = 8
"""Rows for which oneDNN chooses the layout; it is as fast for others."""

HALF_PART = 4096
"""Rows compared with their fp16 values at a time, to limit memory."""

HALF_EXPONENT = 14
"""The greatest value of a scaled matrix is in [2^14, 2^15); fp16 ends just below 2^16."""

HALF_ERROR = 2.0**-25
"""Half the distance of fp16's subnormal numbers: the rounding error of a scaled value. It is at
most 2^-39 of the greatest value, while one rounding in fp32 is 2^-24."""


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

    unscale  factor of the product: a power of two
    """

    packed: Any
    unscale: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`[rows, in]` to `[rows, out]`, both fp32."""
        out: torch.Tensor = torch.ops.quantized.linear_dynamic_fp16(x, self.packed)
        return out if self.unscale == 1 else out.mul_(self.unscale)


def quickest(plain: Linear) -> Projection:
    """The same projection in the fastest layout; `plain` can be freed afterwards."""
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
    """Power of two by which to scale the matrix so that fp16 holds it unchanged; 0 if there is
    none.

    1 if fp16 holds every value as it is. Otherwise the greatest value is scaled up to
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
