"""Our gateway against `smg` and `sglang-router` (Rust), on the same mock workers and requests.

One load client (closed loop), two mock workers and one gateway at a time share this machine's
cores; the targets take turns within each round. The value is the worst ratio smg / ours of CPU time
per request, over prompts of 1k characters and over conversations of 32k that go on by 1k. Wholly
new prompts of 32k characters have a bar of their own: we tokenise at the gateway, once, and the
worker is spared it. CPU time per request is that of the least disturbed round: it depends less on
what else runs than times do. Requests per second and added TTFT (a gateway's median less that of
the workers without a gateway) are printed beside it, ours with one process and with two.

The peers are no dependency: they live in an environment of their own, named by the variable
STEMROUTE_BENCH_PEERS.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import msgspec
from rich.console import Console
from rich.table import Table

from tests.benchmarks.gateways.load_client import Order, Result
from tests.benchmarks.gateways.processes import CannotRun, Gateway, Stage
from tests.benchmarks.gateways.radix import compare

NAME = "gateway_vs_smg"
BAR = 1.0
NEW_BAR = 0.6
"""For wholly new prompts."""

VARIABLE = "STEMROUTE_BENCH_PEERS"
PEERS = {"smg": "smg.cli", "sglang-router": "sglang_router.cli"}
INSTALL = (
    "python3 -m venv PEERS && PEERS/bin/pip install smg==1.13.0 sglang-router==0.3.2 "
    f"ai-dynamo-runtime==1.6.1, then {VARIABLE}=PEERS"
)
DIRECT, OURS, TWO, THEIRS = "direct", "stemroute", "stemroute, 2 processes", "smg"
WORKERS = 2
ROUNDS = 5
SECONDS = 0.6


class Case(NamedTuple):
    """Prompts and connections at once."""

    prompts: str
    concurrency: int


NEW = Case("new", 1)
CASES = [*(Case(prompts, at_once) for prompts in ("short", "turn") for at_once in (1, 8, 32)), NEW]
WORDING = {
    "short": "1k characters, half of them new",
    "turn": "32k characters, 1k of them new",
    "new": "32k characters, all new",
}


class Measured(NamedTuple):
    """One target in one case, all rounds."""

    requests_per_s: float
    p50_ms: float
    p99_ms: float
    cpu_us: float


def run() -> int:
    """Exit code: 0 met, 1 missed, 2 could not run."""
    python = Path(os.environ.get(VARIABLE, "")) / "bin" / "python"
    if VARIABLE not in os.environ or not python.exists():
        print(f"{NAME}: could not run: no peers. {INSTALL}", file=sys.stderr)
        return 2
    try:
        with Stage(str(python)) as stage:
            stage.start_workers(WORKERS)
            gateways = [stage.start_ours(), stage.start_ours(processes=2)]
            gateways += [stage.start_peer(name, module) for name, module in PEERS.items()]
            results = measure(stage, gateways)
            threads = ", ".join(f"{gateway.name} {gateway.threads}" for gateway in gateways)
    except CannotRun as error:
        print(f"{NAME}: could not run: {error}", file=sys.stderr)
        return 2
    lookups = compare(str(python))
    load = os.getloadavg()[0]
    print(
        f"{os.cpu_count()} cores for client, workers and gateway, load average {load:.1f} at the "
        f"end; threads: {threads}"
    )
    theirs = "did not run: " + lookups.trouble
    if lookups.theirs_us is not None:
        theirs = f"{lookups.theirs_us:.0f} µs, {lookups.theirs_us / lookups.ours_us:.2f} times ours"
    print(
        f"a look-up of 512 blocks at 64 workers: ours {lookups.ours_us:.0f} µs; "
        f"ai-dynamo-runtime's RadixTree through Python {theirs}"
    )
    return report(results)


Results = dict[Case, dict[str, Measured]]


def measure(stage: Stage, gateways: list[Gateway]) -> Results:
    """All cases and targets, in interleaved rounds."""
    client = stage.start_client()
    direct = [int(url.rpartition(":")[2]) for url in stage.worker_urls]
    targets: list[tuple[str, list[int], Gateway | None]] = [(DIRECT, direct, None)]
    targets += [(gateway.name, [gateway.port], gateway) for gateway in gateways]
    runs: dict[Case, dict[str, list[Result]]] = defaultdict(lambda: defaultdict(list))
    for _, ports, _ in targets:
        for prompts in WORDING:
            ask(client, Order(ports=ports, case=prompts, concurrency=8, seconds=0.5, seed=-1))
    for number in range(ROUNDS):
        for case in CASES:
            order = targets[number % len(targets) :] + targets[: number % len(targets)]
            for name, ports, gateway in order:
                result = ask(
                    client,
                    Order(
                        ports=ports,
                        case=case.prompts,
                        concurrency=case.concurrency,
                        seconds=SECONDS,
                        seed=number,
                        pids=gateway.pids if gateway else [],
                    ),
                )
                runs[case][name].append(result)
    return {case: {n: summary(r) for n, r in by_name.items()} for case, by_name in runs.items()}


def ask(client: subprocess.Popen[bytes], order: Order) -> Result:
    """Have the client run an order."""
    assert client.stdin is not None
    assert client.stdout is not None
    client.stdin.write(msgspec.json.encode(order) + b"\n")
    client.stdin.flush()
    line = client.stdout.readline()
    if not line:
        raise CannotRun("the load client has ended: its message is above")
    return msgspec.json.decode(line, type=Result)


def summary(runs: list[Result]) -> Measured:
    """Rounds together."""
    ttft_ms = sorted(1e3 * second for result in runs for second in result.ttft_s)
    requests = len(ttft_ms)
    return Measured(
        requests / sum(result.wall_s for result in runs),
        statistics.median(ttft_ms),
        ttft_ms[int(0.99 * requests)],
        min(1e6 * result.cpu_s / len(result.ttft_s) for result in runs),
    )


def report(results: Results) -> int:
    """Print the table and the values."""
    table = Table(title="added TTFT: median and 99th percentile less those without a gateway")
    for column in ("prompts", "at once", "target", "requests/s", "+p50 ms", "+p99 ms", "CPU µs"):
        table.add_column(column, justify="left" if column in ("prompts", "target") else "right")
    cpu: dict[Case, float] = {}
    rest: dict[str, float] = {}
    for case, by_name in results.items():
        base = by_name[DIRECT]
        for name, one in by_name.items():
            table.add_row(
                WORDING[case.prompts],
                str(case.concurrency),
                name,
                f"{one.requests_per_s:,.0f}",
                f"({one.p50_ms:.2f})" if name == DIRECT else f"{one.p50_ms - base.p50_ms:.2f}",
                f"({one.p99_ms:.2f})" if name == DIRECT else f"{one.p99_ms - base.p99_ms:.2f}",
                "" if name == DIRECT else f"{one.cpu_us:.0f}",
            )
        table.add_section()
        theirs = by_name[THEIRS]
        cpu[case] = theirs.cpu_us / by_name[OURS].cpu_us
        rates = [by_name[name].requests_per_s / theirs.requests_per_s for name in (OURS, TWO)]
        ttfts = [
            (theirs.p50_ms - base.p50_ms) / (by_name[name].p50_ms - base.p50_ms)
            for name in (OURS, TWO)
        ]
        text = f"{WORDING[case.prompts]}, {case.concurrency} at once"
        print(
            f"{text}: CPU time {cpu[case]:.2f}; with one and two processes requests per second "
            f"{rates[0]:.2f} and {rates[1]:.2f}, added TTFT {ttfts[0]:.2f} and {ttfts[1]:.2f}"
        )
        if case != NEW:
            rest[f"{text}: requests per second"] = max(rates)
            rest[f"{text}: added TTFT"] = max(ttfts)
    Console(width=120).print(table)
    new = cpu.pop(NEW)
    worst = min(cpu.values())
    where = min(rest, key=rest.__getitem__)
    print(
        f"worst of the rest, with the better of one and two processes: {rest[where]:.2f} ({where})"
    )
    print(f"CPU time for wholly new prompts: {new:.2f} (bar {NEW_BAR})")
    print(f"{NAME}: {worst:.2f} (bar {BAR})")
    return 0 if worst >= BAR and new >= NEW_BAR else 1
