"""The cross-check with torch's `varlen_attn`: what it is given, and where it is refused."""

import pytest
import torch

from tests.gpu.varlen import VarlenBackend
from tests.worker.paged import Heads, Paged
from worker.attention.base import Rows
from worker.attention.registry import attention_backend

LENGTHS = [(600, 1), (3, 1), (300, 40)]
HEADS = Heads(4, 2, 16)


def test_a_step_is_converted_to_what_varlen_attn_wants():
    paged = Paged(LENGTHS, 256, HEADS, torch.bfloat16)
    plan = VarlenBackend().plan(paged.metadata(), torch.bfloat16)
    assert plan.query_start_loc.tolist() == [0, 1, 2, 42]
    assert plan.key_start_loc.tolist() == [0, 600, 603, 903]
    assert plan.seq_lens.tolist() == [600, 3, 300]
    assert (plan.longest_query, plan.longest_context) == (40, 600)
    first, second, third = paged.tables
    assert plan.block_table.tolist() == [first, [*second, 0, 0], [*third, 0]]
    converted = (plan.query_start_loc, plan.key_start_loc, plan.seq_lens, plan.block_table)
    assert {tensor.dtype for tensor in converted} == {torch.int32}


def test_pages_that_are_no_multiple_of_256_are_refused():
    step = Paged(LENGTHS, 16, HEADS, torch.bfloat16).metadata()
    with pytest.raises(ValueError, match="multiples of 256 tokens, not 16"):
        VarlenBackend().plan(step, torch.bfloat16)


def test_full_precision_is_refused():
    step = Paged(LENGTHS, 256, HEADS).metadata()
    with pytest.raises(ValueError, match=r"float16 and bfloat16, not in torch.float32"):
        VarlenBackend().plan(step, torch.float32)


def test_a_device_without_cuda_is_refused():
    paged = Paged(LENGTHS, 256, HEADS, torch.bfloat16)
    plan = VarlenBackend().plan(paged.metadata(), torch.bfloat16)
    query, key = paged.random(42, 4, 16), paged.random(42, 2, 16)
    with pytest.raises(ValueError, match="varlen needs a CUDA device, not cpu"):
        VarlenBackend().attend(Rows(query, key, key), paged.pool, plan)


def test_a_worker_cannot_be_given_it():
    with pytest.raises(ValueError, match=r"varlen is only a reference in tests/gpu/run.py"):
        attention_backend("varlen", "cuda")
