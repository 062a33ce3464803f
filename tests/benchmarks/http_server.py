"""Our HTTP server against uvicorn (httptools, uvloop, no access log), below the same gateway.

Both processes tokenise, place and forward the same requests to the same mock workers; only the
server to clients differs. The servers take turns within each round. CPU time per request is that of
the least disturbed round; the value is the mean over the cases of the ratio uvicorn / ours.
"""

from __future__ import annotations

import statistics
import sys
from collections import defaultdict
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from tests.benchmarks.gateway_vs_smg import ask
from tests.benchmarks.gateways.load_client import Order, Result
from tests.benchmarks.gateways.processes import CannotRun, Stage

NAME = "http_server"
BAR = 1.15
"""Below that, uvicorn should serve."""

WORKERS = 2
ROUNDS = 15
SECONDS = 0.4


class Case(NamedTuple):
    """Whether answers are streams, and connections at once."""

    stream: bool
    concurrency: int


CASES = [Case(stream, concurrency) for stream in (False, True) for concurrency in (1, 8, 32)]


def run() -> int:
    """Exit code: 0 met, 1 missed, 2 could not run."""
    try:
        with Stage(sys.executable) as stage:
            stage.start_workers(WORKERS)
            return report(measure(stage))
    except CannotRun as error:
        print(f"{NAME}: could not run: {error}", file=sys.stderr)
        return 2


def measure(stage: Stage) -> dict[Case, dict[str, list[Result]]]:
    """All cases and both servers, in interleaved rounds."""
    targets = [stage.start_ours(), stage.start_on_uvicorn()]
    client = stage.start_client()
    runs: dict[Case, dict[str, list[Result]]] = defaultdict(lambda: defaultdict(list))
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


def report(runs: dict[Case, dict[str, list[Result]]]) -> int:
    """Print the table and the value."""
    table = Table(title="1k characters, half of them new")
    for column in ("answers", "at once", "server", "requests/s", "CPU µs per request", "ratio"):
        table.add_column(column, justify="left" if column in ("answers", "server") else "right")
    ratios = []
    for case, by_name in runs.items():
        cpu_us = {
            name: min(1e6 * one.cpu_s / len(one.ttft_s) for one in results)
            for name, results in by_name.items()
        }
        ratio = cpu_us["uvicorn"] / cpu_us["stemroute"]
        ratios.append(ratio)
        for name in ("stemroute", "uvicorn"):
            rate = max(len(one.ttft_s) / one.wall_s for one in by_name[name])
            table.add_row(
                "streams" if case.stream else "whole",
                str(case.concurrency),
                name,
                f"{rate:,.0f}",
                f"{cpu_us[name]:.0f}",
                f"{ratio:.2f}" if name == "uvicorn" else "",
            )
        table.add_section()
    Console(width=100).print(table)
    mean = statistics.geometric_mean(ratios)
    print(f"{NAME}: {mean:.2f} (bar {BAR})")
    return 0 if mean >= BAR else 1
