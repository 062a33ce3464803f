"""Our HTTP server against uvicorn (httptools, uvloop, no access log).

First the servers alone: one handler answers at once, whole or as a stream of 16 pieces. Then both
below the same gateway, which tokenises, places and forwards 1k characters to the same mock workers.
The servers take turns within each round. CPU time per request is that of the least disturbed round.
The value is the geometric mean of uvicorn / ours of the servers alone. What is left of it below the
whole gateway, whose other work both share, is printed beside it.
"""

from __future__ import annotations

import statistics
import sys
from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from tests.benchmarks.gateway_vs_smg import ask
from tests.benchmarks.gateways.load_client import Order, Result
from tests.benchmarks.gateways.processes import CannotRun, Gateway, Stage

NAME = "http_server"
BAR = 1.15
"""Below that, uvicorn should serve clients."""

OURS, UVICORN = "stemroute", "uvicorn"
WORKERS = 2
ROUNDS = 12
SECONDS = 0.4


class Case(NamedTuple):
    """Whether answers are streams, and connections at once."""

    stream: bool
    concurrency: int


CASES = [Case(stream, concurrency) for stream in (False, True) for concurrency in (1, 8, 32)]


def run() -> int:
    """Exit code: 0 met, 1 missed, 2 could not run."""
    try:
        alone = _on_stage(0, lambda stage: [stage.start_bare(OURS), stage.start_bare(UVICORN)])
        below = _on_stage(WORKERS, lambda stage: [stage.start_ours(), stage.start_on_uvicorn()])
    except CannotRun as error:
        print(f"{NAME}: could not run: {error}", file=sys.stderr)
        return 2
    ratios = report("the servers alone", alone)
    mean = statistics.geometric_mean(ratios)
    whole = statistics.geometric_mean(report("below a whole gateway", below))
    print(f"below a whole gateway: {whole:.2f}")
    print(f"the servers alone, worst case: {min(ratios):.2f}")
    print(f"{NAME}: {mean:.2f} (bar {BAR})")
    return 0 if mean >= BAR else 1


Runs = dict[Case, dict[str, list[Result]]]


def _on_stage(workers: int, start: Callable[[Stage], list[Gateway]]) -> Runs:
    """All cases and both servers, in interleaved rounds."""
    with Stage(sys.executable) as stage:
        stage.start_workers(workers)
        targets = start(stage)
        client = stage.start_client()
        runs: Runs = defaultdict(lambda: defaultdict(list))
        for number in range(-1, ROUNDS):  # the first is not counted
            for case in CASES:
                for target in targets if number % 2 else reversed(targets):
                    order = Order(
                        ports=[target.port],
                        case="short",
                        concurrency=case.concurrency,
                        seconds=SECONDS,
                        seed=number,
                        stream=case.stream,
                        pids=target.pids,
                    )
                    result = ask(client, order)
                    if number >= 0:
                        runs[case][target.name].append(result)
    return runs


def report(title: str, runs: Runs) -> list[float]:
    """Print the table; returns the ratios of CPU time."""
    table = Table(title=title)
    for column in ("answers", "at once", "server", "requests/s", "CPU µs per request", "ratio"):
        table.add_column(column, justify="left" if column in ("answers", "server") else "right")
    ratios = []
    for case, by_name in runs.items():
        cpu_us = {
            name: min(1e6 * one.cpu_s / len(one.ttft_s) for one in results)
            for name, results in by_name.items()
        }
        ratio = cpu_us[UVICORN] / cpu_us[OURS]
        ratios.append(ratio)
        for name in (OURS, UVICORN):
            rate = max(len(one.ttft_s) / one.wall_s for one in by_name[name])
            table.add_row(
                "streams" if case.stream else "whole",
                str(case.concurrency),
                name,
                f"{rate:,.0f}",
                f"{cpu_us[name]:.0f}",
                f"{ratio:.2f}" if name == UVICORN else "",
            )
        table.add_section()
    Console(width=100).print(table)
    return ratios
