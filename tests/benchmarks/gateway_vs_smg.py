"""Our gateway against `smg` and `sglang-router` (Rust), on the same mock workers and requests.

One load client (closed loop), two mock workers and one gateway at a time share this machine's
cores; the targets take turns within each round. TTFT is added TTFT: a gateway's median less
that of the workers without a gateway. The value is the worst of the ratios ours / smg of requests
a second, and smg / ours of added TTFT, over prompts of 1k characters and over conversations of
32k that go on by 1k. Wholly new prompts of 32k characters stand apart: we tokenise at the
gateway, once, and the worker is spared it; there the share of that is shown.

The peers are no dependency: they live in an environment of their own, named by the variable
STEMROUTE_BENCH_PEERS.
"""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import msgspec
from rich.console import Console
from rich.table import Table

from cluster.protocol import ModelInfo, WorkerCard
from router.background import Background
from router.openai_api import parse_chat
from router.tokenization import Encoder, Tokenization
from tests.benchmarks.gateways.load_client import Order, Result, new_prompts
from tests.benchmarks.gateways.mock_worker import CONTEXT_TOKENS, MODEL, NAMESPACE
from tests.benchmarks.gateways.processes import CannotRun, Gateway, Stage
from tests.benchmarks.gateways.radix import compare

NAME = "gateway_vs_smg"
BAR = 1.0
VARIABLE = "STEMROUTE_BENCH_PEERS"
PEERS = {"smg": "smg.cli", "sglang-router": "sglang_router.cli"}
INSTALL = (
    "python3 -m venv PEERS && PEERS/bin/pip install smg==1.13.0 sglang-router==0.3.2 "
    f"ai-dynamo-runtime==1.6.1, then {VARIABLE}=PEERS"
)
DIRECT, OURS, THEIRS = "direct", "stemroute", "smg"
WORKERS = 2
ROUNDS = 3
SECONDS = 0.8


class Case(NamedTuple):
    """Prompts and connections at once. `par` counts for the value."""

    prompts: str
    concurrency: int
    par: bool


CASES = [
    *(Case("short", concurrency, True) for concurrency in (1, 8, 32)),
    *(Case("turn", concurrency, True) for concurrency in (1, 8, 32)),
    Case("new", 1, False),
]
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
            gateways = [stage.start_ours()]
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
                        pid=gateway.pid if gateway else 0,
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
        1e6 * sum(result.cpu_s for result in runs) / requests,
    )


def report(results: Results) -> int:
    """Print the table and the value."""
    worst, where = float("inf"), ""
    table = Table(title="added TTFT: median and 99th percentile less those without a gateway")
    for column in ("prompts", "at once", "target", "requests/s", "+p50 ms", "+p99 ms", "CPU µs"):
        table.add_column(column, justify="left" if column in ("prompts", "target") else "right")
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
        ours, theirs = by_name[OURS], by_name[THEIRS]
        rate = ours.requests_per_s / theirs.requests_per_s
        ttft = (theirs.p50_ms - base.p50_ms) / (ours.p50_ms - base.p50_ms)
        cpu = theirs.cpu_us / ours.cpu_us
        print(f"{WORDING[case.prompts]}, {case.concurrency} at once: CPU time {cpu:.2f}")
        for ratio, what in ((rate, "requests a second"), (ttft, "added TTFT")):
            text = f"{WORDING[case.prompts]}, {case.concurrency} at once: {what}"
            print(f"{text} {ratio:.2f}" + ("" if case.par else " (no part of the value)"))
            if case.par and ratio < worst:
                worst, where = ratio, text
    Console(width=120).print(table)
    new = results[CASES[-1]]
    tokenising_ms = asyncio.run(time_tokenising())
    added_ms = new[OURS].p50_ms - new[DIRECT].p50_ms
    print(
        f"wholly new 32k: tokenising and hashing {tokenising_ms:.1f} ms of the added "
        f"{added_ms:.1f} ms ({tokenising_ms / added_ms:.0%}); the worker is spared it"
    )
    print(f"worst: {where}")
    print(f"{NAME}: {worst:.2f} (bar {BAR})")
    return 0 if worst >= BAR else 1


async def time_tokenising() -> float:
    """Milliseconds that the gateway takes to turn a wholly new 32k prompt into hashed tokens."""
    from tests.real_tokenizer import smollm2

    async def nobody(card: WorkerCard) -> ModelInfo:
        raise OSError("the encoder is at hand")

    real = smollm2()
    info = ModelInfo(
        model=MODEL,
        namespace=NAMESPACE,
        tokenizer_json=real.tokenizer_json,
        chat_template=real.chat_template,
        special_tokens={},
        context_tokens=CONTEXT_TOKENS,
    )
    background = Background()
    tokenization, encoder = Tokenization(nobody, b"", background), Encoder(info)
    times_s, prompts = [], new_prompts(random.Random("tokenising"))
    for _ in range(60):
        asked = parse_chat(next(prompts).partition(b"\r\n\r\n")[2])
        began = time.perf_counter()
        await tokenization.prompt(asked, encoder, NAMESPACE, CONTEXT_TOKENS)
        times_s.append(time.perf_counter() - began)
    background.close()
    return 1e3 * statistics.median(times_s[-20:])
