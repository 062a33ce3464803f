"""Projections in oneDNN's layout against the plain ones."""

import pytest
import torch

from worker.models.linear import Linear, PackedLinear, has_onednn_linear, quickest

needs_onednn = pytest.mark.skipif(
    not has_onednn_linear(), reason="this torch has no oneDNN operators"
)


def random_linear(out, into, bias=False, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(out, into, generator=generator).to(dtype)
    return Linear(weight, torch.randn(out, generator=generator).to(dtype) if bias else None)


@needs_onednn
@pytest.mark.parametrize("rows", [1, 2, 3, 8, 17, 300])
@pytest.mark.parametrize("bias", [False, True])
def test_wide_matrices_are_packed_and_give_the_same(rows, bias):
    plain = random_linear(210, 48, bias)
    packed = quickest(plain)
    assert isinstance(packed, PackedLinear)
    x = torch.randn(rows, 48, generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        torch.testing.assert_close(packed(x), plain(x), atol=1e-4, rtol=1e-5)


@needs_onednn
def test_a_packed_matrix_keeps_nothing_of_the_plain_one():
    plain = random_linear(210, 48)
    x = torch.ones(2, 48)
    packed = quickest(plain)
    expected = packed(x)
    plain.weight.zero_()
    assert torch.equal(packed(x), expected)


@pytest.mark.parametrize(
    "plain",
    [random_linear(90, 48), random_linear(48, 96), random_linear(210, 48, dtype=torch.bfloat16)],
)
def test_others_stay_as_they_are(plain):
    assert quickest(plain) is plain


def test_without_the_operators_all_stay_as_they_are(monkeypatch):
    monkeypatch.setattr("torch.backends.mkldnn.is_available", lambda: False)
    plain = random_linear(210, 48)
    assert quickest(plain) is plain
