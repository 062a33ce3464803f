"""How long an engine may be silent: by its own steps, and longer before they are measured."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from cluster.protocol import Load
from worker.silence import MEASURED_STEPS, SLACK, UNMEASURED_S, Silence, is_stopped

TIMEOUT_S = 2.0


def silence(step_s: float = 0.1, steps: int = MEASURED_STEPS, load: Load | None = None) -> Silence:
    """Of an engine that has made steps of one length."""
    made = Silence(TIMEOUT_S, token_budget=100, context_tokens=1000)
    for _ in range(steps):
        made.waited(step_s, busy=True)
        made.heard(load or Load())
    return made


def problem(of: Silence, *, busy: bool = True, loading: bool = False) -> str:
    return of.problem(os.getpid(), busy=busy, loading=loading)


def test_an_idle_engine_has_the_timeout_from_the_beginning():
    fresh = Silence(TIMEOUT_S, 100, 1000)
    fresh.waited(TIMEOUT_S, busy=False)
    assert not problem(fresh, busy=False)
    fresh.waited(0.1, busy=False)
    assert problem(fresh, busy=False) == (
        "the engine has sent nothing for 2.1 s; at most 2.0 s were expected"
    )
    fresh.heard(None)
    assert not problem(fresh, busy=False)


def test_the_first_steps_may_compile_kernels():
    fresh = silence(steps=MEASURED_STEPS - 1)
    fresh.waited(UNMEASURED_S, busy=True)
    assert not problem(fresh)
    assert problem(fresh, busy=False)
    measured = silence()
    measured.waited(TIMEOUT_S + SLACK * 0.1 + 0.1, busy=True)
    assert problem(measured)
    assert not problem(measured, loading=True)


@pytest.mark.parametrize(
    ("made", "longest_s"),
    [
        (silence(step_s=1.5), 1.5),
        (silence(load=Load(prefill_s_per_token=0.03)), 3.0),
        (silence(load=Load(prefill_s_per_token=0.03, prefill_s_per_pair=1e-5)), 4.0),
    ],
)
def test_a_step_has_the_time_that_measured_ones_took_or_that_its_prefill_is_predicted_to_take(
    made, longest_s
):
    allowed_s = made.limit_s(busy=True, loading=False)
    assert allowed_s == pytest.approx(TIMEOUT_S + SLACK * longest_s, rel=0.4)
    made.waited(0.95 * (TIMEOUT_S + 1.5 * longest_s), busy=True)
    assert not problem(made)
    made.waited(allowed_s, busy=True)
    assert problem(made)


def test_the_longest_step_is_forgotten_with_time():
    made = silence(step_s=1.5)
    made.heard(Load())
    for _ in range(300):
        made.waited(0.5, busy=False)
        made.heard(Load())
    assert made.limit_s(busy=True, loading=False) < TIMEOUT_S + 0.5


def test_time_without_work_and_stalls_are_no_steps():
    made = silence()
    before = made.limit_s(busy=True, loading=False)
    made.waited(1.9, busy=False)
    made.heard(Load())
    made.waited(20.0, busy=True)
    made.heard(Load(), stalled=True)
    assert made.limit_s(busy=True, loading=False) <= before


def test_a_stopped_process_is_known_without_any_measured_step():
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert not is_stopped(process.pid)
        process.send_signal(signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        assert is_stopped(process.pid)
        fresh = Silence(TIMEOUT_S, 100, 1000)
        fresh.waited(TIMEOUT_S, busy=True)
        assert not fresh.problem(process.pid, busy=True, loading=False)
        fresh.waited(0.1, busy=True)
        assert f"process {process.pid} is stopped" in fresh.problem(
            process.pid, busy=True, loading=True
        )
    finally:
        process.kill()
        process.communicate()
    assert not is_stopped(process.pid)
