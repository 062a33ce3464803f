"""Projections `[rows, in] -> [rows, out]`: plain, or with weights laid out for oneDNN.

On a CPU in fp32, torch multiplies through MKL, whose products with few rows are slow where the
matrix is much wider than deep: from 2 rows up oneDNN takes 0.5 to 0.7 of the time for gate-and-up
and for the head (Llama shapes, AVX2, one thread), and as long for one row. For the other shapes
neither is better at all sizes, so they stay with MKL.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

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


def quickest(plain: Linear) -> Projection:
    """The same projection in the layout that is quicker here; `plain` may then be let go."""
    weight = plain.weight
    out, into = weight.shape
    if weight.device.type != "cpu" or weight.dtype != torch.float32 or out < WIDE * into:
        return plain
    if not has_onednn_linear():
        return plain
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS_HINT)
    return PackedLinear(packed, plain.bias)


def has_onednn_linear() -> bool:
    """Whether this torch has the operators, which its own compiler uses."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    return all(
        hasattr(torch.ops.mkldnn, name) for name in ("_reorder_linear_weight", "_linear_pointwise")
    )
