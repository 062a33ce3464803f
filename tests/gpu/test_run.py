"""The GPU script where there is no GPU: it says so; its arithmetic, and its checks on a CPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.gpu import checks, speed
from tests.gpu.floors import DeviceRates, ModelCost, cost_of, decode_speed, prefill_speed, table
from tests.gpu.run import checked
from tests.worker.paged import Heads
from tests.worker.static_attention import StaticBackend
from tests.worker.tiny_models import tiny_model
from worker.attention.registry import attention_backend
from worker.decode_graphs import Decoded, eager
from worker.runner import TorchRunner

ROOT = Path(__file__).parents[2]
RATES = DeviceRates(bytes_per_s=1000.0, flop_per_s=5000.0)
COST = ModelCost(weight_bytes=400, token_flop=200, head_flop=100, pair_flop=2, kv_token_bytes=10)
ON_GPU = torch.cuda.is_available()


@pytest.mark.skipif(ON_GPU, reason="there is a GPU, on which the script would run")
def test_without_a_gpu_the_script_ends_with_2_and_says_why(tmp_path):
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests/gpu/run.py"), "--out", str(tmp_path / "out")],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "TRITON_INTERPRET": "0"},
    )
    assert done.returncode == 2
    assert "could not run: torch" in done.stderr
    assert "no CUDA device; run this on a machine with a GPU" in done.stderr
    assert not (tmp_path / "out").exists()


def test_the_floors_of_a_decode_step():
    """600 bytes in 0.6 s; 2 x 320 products and sums in 0.128 s."""
    found = decode_speed(COST, RATES, batch=2, context=10, step_s=1.2)
    assert found.tokens_per_s == pytest.approx(2 / 1.2)
    assert found.memory_bound == pytest.approx(2 / 0.6)
    assert found.compute_bound == pytest.approx(2 / 0.128)
    assert found.share == pytest.approx(0.5)


def test_the_floors_of_a_prefill():
    """500 bytes in 0.5 s; 10 tokens, one head and 55 pairs in 0.442 s."""
    found = prefill_speed(COST, RATES, tokens=10, step_s=1.0)
    assert found.memory_bound == pytest.approx(20)
    assert found.compute_bound == pytest.approx(10 / 0.442)
    assert found.share == pytest.approx(0.5)


def test_a_models_cost_is_that_of_its_matrices():
    model = tiny_model(dtype=torch.bfloat16)
    matrices = [weight for weight in model.parameters() if weight.dim() == 2]
    elements = sum(weight.numel() for weight in matrices) - model.embedding.numel()
    cost = cost_of(model)
    assert cost.weight_bytes == 2 * elements
    assert cost.token_flop + cost.head_flop == 2 * elements
    assert cost.kv_token_bytes == 2 * 2 * 2 * 8 * 2
    assert cost.pair_flop == 2 * 2 * 2 * 32


def test_the_table_has_a_line_for_each_speed():
    speeds = [decode_speed(COST, RATES, 2, 10, 1.2), prefill_speed(COST, RATES, 10, 1.0)]
    lines = table(speeds).splitlines()
    assert len(lines) == 3
    assert "decode, batch 2, context 10" in lines[1]
    assert lines[1].endswith("50.0%")


def test_a_check_that_fails_does_not_stop_the_others(capsys):
    def off():
        raise AssertionError("off by 1")

    assert checked("sums", off) == ("sums", False, "AssertionError: off by 1")
    assert checked("sums", lambda: "3 of 3") == ("sums", True, "3 of 3")
    assert "FAILED sums" in capsys.readouterr().out


def test_the_attention_check_finds_an_error():
    class Shifted(type(attention_backend("sdpa"))):
        def attend(self, *given):
            return super().attend(*given) + 0.1

    shape = ([(40, 1), (37, 21)], 16, Heads(6, 2, 16), torch.float32, torch.device("cpu"))
    assert checks.attention_error(attention_backend("sdpa"), *shape) == 0
    assert checks.attention_error(Shifted(), *shape) == pytest.approx(0.1, rel=1e-3)


def rows_of(*logits):
    rows = torch.tensor(logits)
    return Decoded(rows.argmax(dim=-1), rows)


class TestComparingRows:
    """The greatest logit is 10, the tolerance 1 %: 0.1; a lead of more than 0.2 decides."""

    def test_a_near_tie_that_turns_is_none_of_its_business(self):
        found = checks.compare_rows(
            rows_of([10.0, 9.95, 0.0], [10.0, 5.0, 0.0]),
            rows_of([9.93, 10.0, 0.0], [10.0, 5.05, 0.0]),
            0.01,
        )
        assert (found.rows, found.near_ties) == (2, 1)
        assert found.error == pytest.approx(0.007, rel=1e-3)

    def test_logits_further_apart_are_found_whatever_the_tokens(self):
        with pytest.raises(AssertionError, match=r"differ by 2\.0e-02"):
            checks.compare_rows(rows_of([10.0, 5.2, 0.0]), rows_of([10.0, 5.0, 0.0]), 0.01)

    def test_another_token_is_found_where_the_lead_decides(self):
        logits = torch.tensor([[10.0, 9.7, 0.0], [10.0, 9.9, 0.0]])
        wrong = Decoded(torch.tensor([1, 1]), logits)
        with pytest.raises(AssertionError, match="1 of 2 tokens"):
            checks.compare_rows(wrong, Decoded(torch.tensor([0, 0]), logits), 0.01)


def test_the_graph_check_compares_replayed_with_single_launches(monkeypatch):
    """On a CPU, where replaying is launching again; a graph that leaves stale logits is found."""
    torch.set_num_threads(1)
    monkeypatch.setattr(checks, "new_runner", static_runner)
    assert "rows of logits, greatest difference 0.0e+00" in checks.check_graphs(
        tiny_model(), eager, eager
    )
    with pytest.raises(AssertionError, match="logits differ"):
        checks.check_graphs(tiny_model(), stale, eager)


def static_runner(model, blocks, capture):
    runner = TorchRunner(model, blocks, checks.BLOCK)
    runner._backend = StaticBackend()
    runner.capture_decodes(checks.BATCH, model.config.context_tokens, capture)
    return runner


def stale(compute):
    compute()
    return lambda: None


def test_the_cache_check_holds_on_a_cpu():
    torch.set_num_threads(1)
    assert "prompt tokens reused" in checks.check_cache(tiny_model(), None)


def test_the_steps_that_must_not_wait_run_on_a_cpu():
    runner = checks.new_runner(tiny_model(), 32, None)
    assert [len(runner.execute(batch)) for batch in checks.kinds_of_steps()] == [4, 3, 3]


def test_the_steps_that_are_timed_run_on_a_cpu():
    runner = checks.new_runner(tiny_model(), 32, None)
    assert speed.decode_seconds(runner, batch=2, context=20, blocks_each=4) > 0
    assert speed.prefill_seconds(runner, tokens=100) > 0
