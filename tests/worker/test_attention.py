"""Paged attention against the plain formula, over ragged batches in scattered blocks."""

import pytest
import torch

from tests.worker.paged import check
from worker.attention import sdpa
from worker.attention.registry import attention_backend


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_decodes_and_chunks_of_ragged_lengths(block_size):
    check(
        [(40, 1), (33, 1), (16, 1), (2, 1), (1, 1), (20, 2), (37, 21), (48, 48), (5, 5)],
        block_size,
    )


def test_a_suffix_sees_the_whole_prefix_and_no_later_token():
    check([(64, 16)], 16)
    check([(65, 64)], 16)
    check([(17, 2)], 16)


def test_a_first_chunk_needs_neither_pool_nor_mask():
    plan = check([(24, 24)], 16)
    assert plan.chunks[0].mask is None


def test_decodes_of_very_different_lengths_are_gathered_apart(monkeypatch):
    monkeypatch.setattr(sdpa, "PADDING_BLOCKS", 2)
    plan = check([(200, 1), (190, 1), (30, 1), (9, 1), (3, 1)], 4)
    assert [(group.first, group.last) for group in plan.decodes] == [(0, 2), (2, 3), (3, 5)]


def test_decodes_of_like_lengths_are_gathered_together():
    plan = check([(50, 1), (49, 1), (40, 1)], 4)
    assert [(group.first, group.last) for group in plan.decodes] == [(0, 3)]


def test_buffers_are_reused_for_batches_of_any_size():
    backend = attention_backend("sdpa")
    for lengths in ([(9, 1)], [(90, 1), (80, 1)], [(5, 2)], [(120, 3), (7, 7)], [(8, 1)]):
        check(lengths, 4, backend=backend)


def test_bfloat16():
    check([(40, 1), (7, 1), (37, 21), (12, 12)], 16, torch.bfloat16, atol=3e-2)


def test_an_unknown_backend_is_named():
    with pytest.raises(ValueError, match=r"'flash'.*sdpa, triton"):
        attention_backend("flash")
