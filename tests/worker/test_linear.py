"""Projections in other layouts against the plain ones: fp16 where it holds the values, oneDNN."""

import pytest
import torch

from worker.models.linear import (
    HalfLinear,
    Linear,
    PackedLinear,
    half_scale,
    has_half_linear,
    has_onednn_linear,
    quickest,
)

needs_half = pytest.mark.skipif(
    not has_half_linear(), reason="this torch or processor does not multiply by fp16 weights"
)
needs_onednn = pytest.mark.skipif(
    not has_onednn_linear(), reason="this torch has no oneDNN operators"
)


def random_linear(out, into, bias=False, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(out, into, generator=generator).to(dtype)
    return Linear(weight, torch.randn(out, generator=generator).to(dtype) if bias else None)


def held(plain, dtype):
    """The projection with weights that went through that dtype."""
    return plain._replace(weight=plain.weight.to(dtype).float())


@needs_half
@pytest.mark.parametrize("rows", [1, 2, 3, 8, 17, 300])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_that_fp16_holds_are_kept_in_it_and_give_the_same(rows, bias, dtype):
    plain = held(random_linear(90, 48, bias), dtype)
    half = quickest(plain)
    assert isinstance(half, HalfLinear)
    x = torch.randn(rows, 48, generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        exact = plain.weight.double()
        expected = torch.nn.functional.linear(
            x.double(), exact, None if plain.bias is None else plain.bias.double()
        )
        # fp32's own rounding of 48 products, no more.
        torch.testing.assert_close(half(x).double(), expected, atol=2e-5, rtol=0)


@needs_half
def test_weights_far_below_fp16s_range_are_scaled_into_it():
    plain = held(Linear(random_linear(90, 48).weight * 1e-9, torch.ones(90)), torch.bfloat16)
    half = quickest(plain)
    assert isinstance(half, HalfLinear)
    assert half.unscale < 1
    x = torch.randn(3, 48, generator=torch.Generator().manual_seed(2)) * 1e9
    torch.testing.assert_close(half(x), plain(x), atol=2e-5, rtol=1e-5)


@needs_half
def test_a_half_matrix_keeps_nothing_of_the_plain_one():
    plain = held(random_linear(90, 48), torch.float16)
    x = torch.ones(2, 48)
    half = quickest(plain)
    expected = half(x)
    plain.weight.zero_()
    assert torch.equal(half(x), expected)


def test_fp16_holds_what_it_can_hold_exactly_as_it_is():
    assert half_scale(torch.tensor([[1.0, -0.333251953125, 65504.0, 2.0**-24, 0.0]])) == 1
    assert half_scale(torch.zeros(2, 3)) == 1


def test_a_scale_may_round_only_what_is_vanishingly_small():
    assert half_scale(torch.tensor([[2.0**20, 1.0]])) == 2.0**-6
    # Against 1 the second is rounded by less than 2^-39; it is lost beside any fp32 product.
    assert half_scale(torch.tensor([[1.0, 1.0039062e-12]])) == 2.0**14
    assert half_scale(torch.tensor([[1.0, 1.0 + 2.0**-12]])) == 0


@pytest.mark.parametrize("odd", [float("inf"), float("nan")])
def test_fp16_is_not_trusted_with_what_is_no_number(odd):
    weight = torch.tensor([[1.0 + 2.0**-12, odd]])
    assert half_scale(weight) == 0


def test_every_part_of_a_long_matrix_is_looked_at():
    weight = torch.ones(5000, 2)
    weight[4999, 1] += 2.0**-12
    assert half_scale(weight) == 0


def test_without_fbgemm_such_weights_stay_as_they_are(monkeypatch):
    monkeypatch.setattr("worker.models.linear.has_half_linear", lambda: False)
    plain = held(random_linear(90, 48), torch.float16)
    assert quickest(plain) is plain


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
