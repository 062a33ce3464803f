"""Each goal that a fault misses is named, and a run says so in its table and its exit code."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from rich.console import Console

from tests.chaos import run as command
from tests.chaos.driving import (
    DESCRIPTORS,
    FAULTS,
    GROWTH_MIB,
    WHOLE_S,
    Goal,
    Result,
    _recovery_s,
)
from tests.chaos.processes import PartFailed
from tests.chaos.report import COLUMNS, print_table, row
from tests.chaos.rig import Needs, Quiet
from tests.chaos.verdict import Tally

FAULT = FAULTS["redis-emptied"]


def misses(result: Result, goal: Goal | None = None) -> list[str]:
    result.compare(goal or Goal())
    return result.misses


@pytest.mark.parametrize(
    ("result", "miss"),
    [
        (Result(tally=Tally(failed=1)), "1 failed"),
        (Result(tally=Tally(broken=2)), "2 broken"),
        (Result(tally=Tally(wrong=3)), "3 wrong"),
        (Result(tally=Tally(hung=4)), "4 hung"),
        (Result(quiet=Quiet(load=1, blocks=0)), "load 1 at quiet"),
        (Result(quiet=Quiet(load=0, blocks=2)), "2 blocks held at quiet"),
        (Result(memory_mib=(100.0, 101.0 + GROWTH_MIB)), "the gateway grew by 25 MiB"),
        (Result(descriptors=(5, 6 + DESCRIPTORS)), "65 descriptors more than before"),
        (Result(recovery_s=None), f"not all workers were back after {WHOLE_S:g} s"),
        (Result(recovery_s=5.1), "recovered after 5.1 s instead of 5"),
    ],
)
def test_what_is_missed_is_named(result: Result, miss: str) -> None:
    assert misses(result, Goal(recovery_s=5.0)) == [miss]


def test_what_a_goal_allows_is_not_missed() -> None:
    within = Result(
        tally=Tally(sent=9, accepted=8, refused=1),
        recovery_s=5.0,
        memory_mib=(100.0, 100.0 + GROWTH_MIB),
        descriptors=(5, 5 + DESCRIPTORS),
    )
    assert misses(within, Goal(recovery_s=5.0)) == []
    assert misses(Result(recovery_s=99.0)) == []
    assert misses(Result(recovery_s=None), Goal(whole=False)) == []


@pytest.mark.parametrize(
    ("whole_at", "bad_at", "expected"),
    [(None, 12.0, None), (13.0, None, 3.0), (13.0, 12.0, 3.0), (13.0, 14.0, 4.0), (9.0, 8.0, 0.0)],
)
def test_a_pool_has_recovered_when_it_is_whole_and_nothing_bad_was_sent_since(
    whole_at: float | None, bad_at: float | None, expected: float | None
) -> None:
    assert _recovery_s(10.0, whole_at, bad_at) == expected


def test_the_table_shows_each_figure_and_below_it_what_was_missed() -> None:
    tally = Tally(1001, 102, 3, 4, 5, 6, 7, slowest_s=8.25, silence_s=9.25)
    tally.reasons = Counter({"gone": 2})
    result = Result(
        tally, 10.0, 11.0, Quiet(12, 13), (14.0, 15.0), (16, 17), ["a note"], ["a miss"]
    )
    assert " ".join(row(FAULT, result)) == (
        "redis-emptied 1,001 102 3 4 5 6 10 7 9.2 8.2 11.0 12 13 14 → 15 16 → 17 missed"
    )
    assert len(row(FAULT, result)) == len(COLUMNS)
    assert row(FAULT, replace(result, misses=[]))[-1] == "reached"
    assert row(FAULT, replace(result, recovery_s=None))[COLUMNS.index("recovery s")] == "> 120"
    console = Console(width=200, record=True)
    with console.capture() as printed:
        print_table([(FAULT, result)], console)
    below = printed.get().splitlines()[2:]
    assert below == [f"{FAULT.name}: {text}" for text in ("missed: a miss", "a note", "2 × gone")]


@pytest.mark.parametrize(
    ("outcomes", "code"),
    [
        ([Result()], 0),
        ([Result(misses=["one"]), Result()], 1),
        ([PartFailed("no root")], 2),
        ([PartFailed("no root"), Result(misses=["one"])], 2),
        ([Result(misses=["one"]), KeyboardInterrupt()], 130),
    ],
)
def test_the_exit_code(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    outcomes: list[Result | BaseException],
    code: int,
) -> None:
    waiting, stopped = list(outcomes), []

    def run(self: command.Runner, fault: object, needs: Needs, seconds: float) -> Result:
        outcome = waiting.pop(0)
        if isinstance(outcome, Result):
            return outcome
        raise outcome

    monkeypatch.setattr(command.Runner, "run", run)
    monkeypatch.setattr(command.Runner, "stop", lambda self: stopped.append(self))
    monkeypatch.setattr(command.signal, "signal", lambda *_: None)
    assert command.main(["redis-emptied", "redis-full"][: len(outcomes)]) == code
    assert stopped
    if code == 2:
        assert "redis-emptied cannot run: no root" in capsys.readouterr().out
