"""The Triton kernels, interpreted on the CPU, against the plain formula.

What the interpreter cannot show (that the kernels compile, and into how much shared memory) is
in `test_triton_compiles.py`; what only a GPU can show is in `tests/gpu/run.py`.
"""

import pytest
import torch

from tests.worker.paged import Heads, check
from tests.worker.tiny_models import item, logits_of, tiny_model
from worker.attention.registry import attention_backend
from worker.runner import TorchRunner

backend = pytest.importorskip(
    "worker.attention.triton", reason="the triton backend needs the package triton"
)
pytestmark = pytest.mark.skipif(
    not backend.triton.knobs.runtime.interpret,
    reason="TRITON_INTERPRET is not 1: the kernels would be compiled for a GPU",
)

HEADS = Heads(6, 2, 16)
RAGGED = [(40, 1), (33, 1), (16, 1), (2, 1), (1, 1), (20, 2), (37, 21), (48, 48), (5, 5)]


def check_triton(lengths, block_size=16, heads=HEADS, **options):
    return check(lengths, block_size, backend=attention_backend("triton"), heads=heads, **options)


@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
def test_decodes_and_chunks_of_ragged_lengths(block_size):
    check_triton([*RAGGED[:5], (130, 3), *RAGGED[5:]], block_size)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("group", [1, 3, 8])
def test_query_heads_that_share_a_kv_head(group, head_dim):
    check_triton([(70, 1), (3, 1), (50, 30)], heads=Heads(2 * group, 2, head_dim))


def test_head_sizes_that_are_no_power_of_two():
    check_triton([(70, 1), (50, 30)], heads=Heads(4, 2, 80))
    check_triton([(20, 1), (9, 9)], heads=Heads(4, 2, 8))


def test_a_group_wider_than_a_tile():
    check_triton([(20, 1), (9, 5)], heads=Heads(71, 1, 16))


def test_a_suffix_of_one_token_after_a_cached_prefix_is_a_decode():
    plan = check_triton([(64, 1)])
    assert plan.step.decodes == 1
    assert plan.tiles is None


def test_chunks_of_several_tiles():
    """A tile holds 21 rows of 3 query heads each."""
    plan = check_triton([(100, 64), (43, 43)])
    assert plan.tiles.sequences.tolist() == [0, 0, 0, 0, 1, 1, 1]
    assert plan.tiles.first_rows.tolist() == [63, 42, 21, 0, 42, 21, 0]


def test_a_long_context_is_split_and_joined():
    plan = check_triton([(2050, 1), (700, 1), (3, 1)])
    assert plan.parts.tops.shape == (3, 6, 8)
    # The third sequence lies wholly in the first part; the others saw no key of it.
    assert torch.isfinite(plan.parts.tops[2, :, 0]).all()
    assert (plan.parts.tops[2, :, 1:] == float("-inf")).all()


def test_scores_too_large_to_exponentiate():
    """Scores of several hundreds: only their differences to the greatest may be exponentiated."""
    check_triton([(300, 1), (50, 30)], query_scale=300.0, atol=2e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    check_triton([(40, 1), (7, 1), (37, 21), (12, 12)], dtype=dtype, atol=3e-2)


@pytest.mark.parametrize(
    ("programs", "longest", "splits"),
    [
        (8, 200, 1),  # too short
        (8, 600, 2),
        (8, 100_000, 32),  # 33 wanted
        (64, 100_000, 4),  # 264 / 64
        (300, 100_000, 1),  # enough programs as it is
    ],
)
def test_keys_are_split_where_processors_would_idle(programs, longest, splits):
    assert backend.splits_of(programs, longest, 132) == splits


def test_a_whole_model_gives_the_logits_of_sdpa():
    """Prefill in two chunks beside another sequence, then a decode, through both backends."""
    logits = {}
    for name in ("sdpa", "triton"):
        runner = TorchRunner(tiny_model(), 24, 16, name)
        steps = [
            [item(list(range(1, 30)), 0, [5, 3])],
            [item(list(range(30, 50)), 29, [5, 3, 9, 2]), item([60, 61], 0, [7])],
            [item([50], 49, [5, 3, 9, 2]), item([62], 2, [7])],
        ]
        logits[name] = [rows for step in steps for rows in logits_of(runner, step)]
    for ours, reference in zip(logits["triton"], logits["sdpa"], strict=True):
        torch.testing.assert_close(ours, reference, atol=1e-4, rtol=1e-4)
