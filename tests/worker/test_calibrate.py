"""A profile is fitted from an engine's steps, whatever shape these have."""

import itertools
import random

import pytest
from typer.testing import CliRunner

from ops.cli import app
from tests.tiny_model import write_tiny_llama
from tests.worker.small_engine import BLOCK, SmallEngine
from worker.calibrate import (
    LEAST_STEPS,
    CalibrationError,
    Limits,
    Step,
    draw,
    fit,
    measure,
    profile_from,
)
from worker.emulated_profiles import CostModel, read_profile, write_profile

LIMITS = Limits(context_tokens=4096, token_budget=512, pool_tokens=16_384, batch=64, block_size=16)
COST = CostModel(
    step_s=0.004,
    prefill_token_s=30e-6,
    prefill_pair_s=2e-9,
    decode_s=50e-6,
    context_token_s=40e-9,
)


def steps_of(cost, count=600, noise=0.0, stalls=0.0, seed=0):
    rng = random.Random(seed)
    steps = []
    for _ in range(count):
        shape = draw(rng, LIMITS)
        seconds = cost.seconds(shape) * rng.gauss(1.0, noise)
        seconds *= rng.uniform(3, 20) if rng.random() < stalls else 1.0
        steps.append(Step(shape, seconds))
    return steps


def test_the_coefficients_behind_exact_steps_are_found():
    found = fit(steps_of(COST))
    for name in COST.__struct_fields__:
        assert getattr(found.cost, name) == pytest.approx(getattr(COST, name), rel=0.02), name
    assert found.error < 0.01


def test_noise_and_stalls_do_not_lead_it_astray():
    found = fit(steps_of(COST, noise=0.05, stalls=0.1))
    for shape in ([(0, 512)], [(2000, 100)], [(1000, 1)] * 16, [(0, 300), (50, 1)]):
        assert found.cost.seconds(shape) == pytest.approx(COST.seconds(shape), rel=0.08)
    assert 0.02 < found.error < 0.08


def test_no_coefficient_is_negative():
    for seed in range(20):
        found = fit(steps_of(CostModel(step_s=0.01), count=60, noise=0.3, seed=seed))
        assert min(getattr(found.cost, name) for name in COST.__struct_fields__) >= 0


def test_batches_keep_within_what_the_engine_takes():
    rng = random.Random(3)
    tight = Limits(context_tokens=200, token_budget=64, pool_tokens=512, batch=8, block_size=16)
    kinds = set()
    for _ in range(2000):
        shape = draw(rng, tight)
        assert 1 <= len(shape) <= tight.batch
        assert sum(count for _, count in shape) <= tight.token_budget
        assert all(start + count <= tight.context_tokens for start, count in shape)
        blocks = sum(-(-(start + count) // 16) for start, count in shape)
        assert blocks * 16 <= tight.pool_tokens
        kinds.add((any(count > 1 for _, count in shape), any(count == 1 for _, count in shape)))
    assert kinds == {(True, False), (False, True), (True, True)}


def test_a_real_runner_is_measured_on_its_own_steps():
    engine = SmallEngine(blocks=32)
    limits = Limits(
        context_tokens=engine.config.sequence_limit,
        token_budget=32,
        pool_tokens=32 * BLOCK,
        batch=8,
        block_size=BLOCK,
    )
    clock = iter(x / 10 for x in range(10_000)).__next__  # counted, so that it ends for certain
    steps = measure(engine.runner, limits, 20.0, clock=clock)
    assert len(steps) >= 60
    assert all(step.seconds == pytest.approx(0.1) for step in steps)
    assert profile_from(fit(steps), limits).kv_tokens == 32 * BLOCK


def slow_engine(step_s):
    """Runner and limits of an engine, and a clock on which each of its steps takes so long."""
    engine = SmallEngine(blocks=32)
    limits = Limits(
        context_tokens=64, token_budget=8, pool_tokens=32 * BLOCK, batch=4, block_size=BLOCK
    )
    return engine.runner, limits, itertools.count(step=step_s / 3).__next__  # read thrice a step


def test_slow_steps_are_measured_until_there_are_enough():
    told = []
    runner, limits, clock = slow_engine(step_s=3.0)
    steps = measure(runner, limits, 15.0, clock=clock, on_longer=told.append)
    assert len(steps) == LEAST_STEPS
    assert told == [5]


def test_enough_steps_are_not_measured_longer():
    told = []
    runner, limits, clock = slow_engine(step_s=0.3)
    assert len(measure(runner, limits, 15.0, clock=clock, on_longer=told.append)) == 50
    assert told == []


def test_steps_that_stay_too_few_are_no_profile():
    runner, limits, clock = slow_engine(step_s=60.0)
    with pytest.raises(CalibrationError, match=r"10 steps were measured in 600 s.*--token-budget"):
        measure(runner, limits, 15.0, clock=clock)


def test_a_fitted_profile_is_read_back_as_it_was_written(tmp_path):
    profile = profile_from(fit(steps_of(COST)), LIMITS)
    path = tmp_path / "fitted.toml"
    path.write_text(write_profile(profile, "of two\nlines"))
    read = read_profile(path)
    assert (read.kv_tokens, read.context_tokens) == (16_384, 4096)
    for name in COST.__struct_fields__:
        written = getattr(profile.cost, name)
        assert getattr(read.cost, name) == pytest.approx(written, rel=1e-4)


def test_the_command_fits_a_model_and_writes_its_profile(tmp_path):
    model = write_tiny_llama(tmp_path / "model")
    settings = tmp_path / "settings.toml"
    settings.write_text(f'[worker]\ndtype = "float32"\ncache_dir = "{tmp_path}"\n')
    profile = tmp_path / "tiny.toml"
    flags = ["--model", str(model), "--device", "cpu", "--token-budget", "16"]
    flags += ["--kv-blocks", "40", "--seconds", "3", "--config", str(settings)]
    ended = CliRunner().invoke(app, ["calibrate", "--out", str(profile), *flags])
    assert ended.exit_code == 0, ended.output
    assert read_profile(profile).kv_tokens == 640
    assert "held out" in profile.read_text()


def test_an_emulated_model_is_not_calibrated(tmp_path):
    flags = ["--model", "emulated:steady-25ms", "--out", str(tmp_path / "p.toml")]
    assert CliRunner().invoke(app, ["calibrate", *flags]).exit_code == 2
