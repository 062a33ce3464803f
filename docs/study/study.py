"""The study of routing policies: cells of a grid, each policy simulated in each.

    python docs/study/study.py run --trace FILE   append to results.csv what lacks
    python docs/study/study.py report             write results.md and the drawings

Run it from the project's root. What a cell is and what is varied stands in README.md beside it.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import msgspec
import report
import results
import variants

from loadgen.arrivals import Arrivals, arrange
from loadgen.measures import Slo, measure_repeats
from loadgen.simulation.fleet import FleetOptions, SimulatedFleet
from loadgen.simulation.prompts import Asked, asked_of, ideal_of
from loadgen.simulation.reporting import Pace
from loadgen.simulation.saturation import saturation_rate, sustained_rate
from loadgen.token_level import trace_of
from loadgen.traces import TraceOptions, TraceRequest, read_trace
from loadgen.workloads import make_workload
from router.policies import Policy, available, parse_policy
from worker.emulated_profiles import profile_of

FOLDER = Path(__file__).parent
RESULTS = FOLDER / "results.csv"
PROFILE = "h20-qwen3-30b-a3b"
SLO = Slo(ttft_ms=5000.0, tpot_ms=100.0)
SEEDS = (0, 1)
"""Of workload, arrivals and ties; of the trace another window."""
CONVERSATION = "conversation"
WHOLE_TRACE = "whole conversation"
TRACED = (CONVERSATION, WHOLE_TRACE)
CONVERSATION_REQUESTS = 2000
SYNTHETIC_BLOCK = 128

RETRIEVAL: dict[str, object] = {
    "num_prompts": 1200,
    "documents": 600,
    "document_tokens": 1500,
    "output_tokens": 200,
}
WORKLOADS: dict[str, dict[str, object]] = {
    "shared_prefix": {
        "groups": 150,
        "users": 2,
        "turns": 4,
        "system_tokens": 4000,
        "output_tokens": 200,
        "zipf": 1.0,
    },
    "chat": {
        "users": 150,
        "turns": 8,
        "system_tokens": 1000,
        "input_tokens": 600,
        "output_tokens": 300,
    },
    "agent": {
        "tasks": 75,
        "steps": 16,
        "system_tokens": 3000,
        "tool_tokens": 1200,
        "output_tokens": 80,
    },
    "rag": RETRIEVAL,
    "rag_shuffled": RETRIEVAL | {"order": "shuffled"},
    "no_sharing": {"num_prompts": 1200, "input_tokens": 4000, "output_tokens": 200},
    "hot_prefix": {
        "num_prompts": 1200,
        "hot_share": 0.6,
        "prefix_tokens": 6000,
        "input_tokens": 1000,
        "output_tokens": 200,
    },
}

OFTEN = {"shared_prefix": "users", "chat": "users", "agent": "tasks"}
"""What four times as many workers multiply: how often is asked, not what."""

KV_TOKENS = {"tight": 129_024, "medium": 258_048, "ample": 1_032_192}
"""Of a worker; medium is what the profile's chip holds."""

CORE = (
    "round_robin",
    "least_requests",
    "sglang",
    "dynamo",
    "llmd",
    "ttft",
    "locality",
    "marginal",
    "aibrix",
    "additive",
    "least_tokens",
)
"""In every cell, with both seeds unless it is one of `ONE_SEED`."""
TUNED = (
    *(f"dynamo:overlap_weight={weight}" for weight in (0.5, 2, 4, 8, 16, 32)),
    *(f"llmd:prefix_weight={weight}" for weight in (0.5, 1, 2, 8, 16)),
)
"""Linear policies at other weights."""


class Cell(NamedTuple):
    """What is varied, one thing at a time, around the first cell."""

    workload: str = CONVERSATION
    load: float = 0.9
    capacity: str = "medium"
    workers: int = 16
    delay_ms: float = 0.0

    @property
    def name(self) -> str:
        """Such as "conversation, load 0.9, medium, 16 workers, delay 0 ms"."""
        return (
            f"{self.workload}, load {self.load:g}, {self.capacity}, {self.workers} workers, "
            f"delay {self.delay_ms:g} ms"
        )


BASE = Cell()
CELLS = [
    BASE,
    BASE._replace(capacity="tight", load=1.1),
    BASE._replace(load=1.1),
    BASE._replace(workload="shared_prefix"),
    BASE._replace(workload="no_sharing"),
    BASE._replace(workload="agent"),
    BASE._replace(load=0.7),
    BASE._replace(delay_ms=500.0),
    BASE._replace(workload="hot_prefix"),
    BASE._replace(workload="chat"),
    BASE._replace(workload="rag"),
    BASE._replace(workload="rag_shuffled"),
    BASE._replace(capacity="ample"),
    BASE._replace(capacity="tight"),
    BASE._replace(load=0.5),
    BASE._replace(delay_ms=50.0),
    BASE._replace(workers=64),
]
LOADS = (0.5, 0.7, 1.1)
"""Beside the 90 % of the first cell."""
CROSSED = [
    *(BASE._replace(workload=name, load=load) for name in WORKLOADS for load in LOADS),
    *(
        BASE._replace(workload=name, capacity=size)
        for size in ("tight", "ample")
        for name in WORKLOADS
    ),
    *(BASE._replace(workload=name, delay_ms=500.0) for name in WORKLOADS),
    *(BASE._replace(workload=name, workers=64) for name in WORKLOADS),
    *(BASE._replace(capacity=size, load=load) for size in ("tight", "ample") for load in LOADS),
]
"""Synthetic workloads under what was varied for the trace, and its sizes under other loads."""
WHOLE = BASE._replace(workload=WHOLE_TRACE)
ONE_SEED = {
    WHOLE,
    *(
        c
        for c in CROSSED
        if c not in CELLS and (c.load == BASE.load or c.capacity != BASE.capacity)
    ),
}
CELLS += [*(cell for cell in CROSSED if cell not in CELLS), WHOLE]
ABLATED = CELLS[:3]
"""Here the variants of `marginal` run as well, and the tuned policies."""
ALSO_TUNED = [BASE._replace(workload=name) for name in ("shared_prefix", "hot_prefix", "rag")]
"""And these here."""


def more_of(cell: Cell) -> list[str]:
    """What runs beside `CORE`."""
    names = list(variants.VARIANTS if cell in ABLATED else variants.EVERYWHERE)
    if cell in ONE_SEED:
        names = [variants.BEFORE]
    if cell in ALSO_TUNED:
        names.append(variants.WITHOUT_COMING)
    if cell in ABLATED or cell in ALSO_TUNED:
        names += TUNED
    if cell == BASE:
        names += others()
    return list(dict.fromkeys(names))


def others() -> list[str]:
    """All other policies there are: with both seeds in the first cell, with one in those of 16
    workers that have two."""
    return [name for name in available() if name not in CORE]


def planned(cells: list[Cell]) -> Iterator[tuple[Cell, int, list[str]]]:
    """What runs in these cells, in the order in which it does."""
    for cell in cells:
        for seed in SEEDS[:1] if cell in ONE_SEED else SEEDS:
            yield cell, seed, [*CORE, *more_of(cell)]
    for cell in cells:
        if cell not in ONE_SEED and cell.workers == BASE.workers:
            yield cell, SEEDS[0], others()


def make(name: str) -> Policy:
    """A policy of the router or a variant of this study."""
    return variants.VARIANTS[name]() if name in variants.VARIANTS else parse_policy(name)


class Study:
    """Runs cells; keeps what several of them need."""

    def __init__(self, trace: Path) -> None:
        self._trace = trace
        self._requests = cache(self._read)
        self._saturation = cache(self._find_saturation)

    def fleet(self, cell: Cell) -> FleetOptions:
        """The cell's fleet."""
        block_size = 512 if cell.workload in TRACED else SYNTHETIC_BLOCK
        delay_s = cell.delay_ms / 1e3
        return FleetOptions(
            workers=cell.workers,
            profile=profile_of(PROFILE),
            profile_name=PROFILE,
            kv_tokens=KV_TOKENS[cell.capacity],
            block_size=block_size,
            max_waiting=1 << 20,
            pace=Pace(load_s=delay_s, index_s=delay_s),
        )

    def asked(self, cell: Cell, seed: int) -> list[Asked]:
        """The cell's requests, at its load."""
        rate = cell.load * self.saturation(cell, seed)
        requests = self._requests(cell.workload, cell.workers, 0.0, seed)
        if cell.workload in TRACED:
            own_rate = len(requests) / requests[-1].arrival_s
            requests = [
                msgspec.structs.replace(r, arrival_s=r.arrival_s * own_rate / rate)
                for r in requests
            ]
        else:
            requests = self._requests(cell.workload, cell.workers, rate, seed)
        return asked_of(requests, self.fleet(cell).block_size)

    def saturation(self, cell: Cell, seed: int) -> float:
        """Requests a second that round-robin serves of the cell's kind, without report delay."""
        return self._saturation(cell._replace(load=0.0, delay_ms=0.0), seed)

    def _read(self, workload: str, workers: int, rate: float, seed: int) -> list[TraceRequest]:
        scale = max(1, workers // 16)
        if workload == CONVERSATION:
            return self._window(CONVERSATION_REQUESTS * scale, seed)
        if workload == WHOLE_TRACE:
            return read_trace([self._trace], "mooncake", TraceOptions()).requests
        parameters = dict(WORKLOADS[workload])
        often = OFTEN.get(workload, "num_prompts")
        parameters[often] = scale * int(str(parameters[often]))
        made = make_workload(workload.removesuffix("_shuffled"), parameters)
        arrivals = Arrivals(request_rate=rate or float("inf"))
        return trace_of(arrange(made, arrivals, seed), SYNTHETIC_BLOCK)

    def _window(self, count: int, number: int) -> list[TraceRequest]:
        """So many of the trace's requests, after those of the windows before, from time 0 on. The
        last window ends where the trace does, though it then overlaps with the one before."""
        options = TraceOptions(num_prompts=count * (number + 1))
        window = read_trace([self._trace], "mooncake", options).requests[-count:]
        began_s = window[0].arrival_s
        return [msgspec.structs.replace(r, arrival_s=r.arrival_s - began_s) for r in window]

    def _find_saturation(self, cell: Cell, seed: int) -> float:
        for row in results.read(RESULTS):
            if row["seed"] == seed and cell == cell_of(row)._replace(load=0.0, delay_ms=0.0):
                return float(row["saturation_rate"])
        fleet = self.fleet(cell)
        if cell.workload in TRACED:
            asked = asked_of(
                self._requests(cell.workload, cell.workers, 0.0, seed), fleet.block_size
            )
            return saturation_rate(fleet, "round_robin", asked)
        # Prompts that share and are all there at once are computed once: no rate to live at.
        requests = self._requests(cell.workload, cell.workers, 1.0, seed)
        return sustained_rate(fleet, "round_robin", asked_of(requests, fleet.block_size))

    def add(self, cell: Cell, seed: int, names: list[str]) -> None:
        """Run these policies and append them to the results."""
        if not names:
            return
        asked = self.asked(cell, seed)
        for name in names:
            row = self.run(cell, seed, asked, name)
            results.append(RESULTS, row)
            print(f"{cell.name}, seed {seed}: {name} {row['ttft_s']:.2f} s", flush=True)

    def run(self, cell: Cell, seed: int, asked: list[Asked], name: str) -> results.Row:
        """One policy in one cell, as a line of the results."""
        fleet = self.fleet(cell)
        simulated = SimulatedFleet(fleet, make(name), seed)
        variants.prepare(name, simulated.router)
        arm = measure_repeats([simulated.replay(asked, name)], SLO, simulated.workers)
        return {
            **cell._asdict(),
            "policy": name,
            "seed": seed,
            "requests": len(asked),
            "saturation_rate": self.saturation(cell, seed),
            "offered_rate": len(asked) / asked[-1].arrival_s,
            "ttft_s": (arm.ttft_ms.mean or 0) / 1e3,
            "ttft_p99_s": (arm.ttft_ms.p99 or 0) / 1e3,
            "tpot_ms": arm.tpot_ms.mean,
            "e2e_s": (arm.e2e_ms.mean or 0) / 1e3,
            "kept": arm.kept_share,
            "hit": arm.cached_token_ratio,
            "ideal": ideal_of(asked, fleet.block_size).cached_token_ratio,
            "imbalance": arm.imbalance,
            "errors": arm.errors,
        }


def cell_of(row: results.Row) -> Cell:
    """The cell of a line of the results."""
    return Cell(*(row[field] for field in Cell._fields))


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", choices=("run", "report"))
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--only", default="", help="cells whose name holds this")
    parser.add_argument("--without", default="none", help="leave out cells whose name holds this")
    given = parser.parse_args()
    if given.command == "report":
        report.write(FOLDER, RESULTS)
        return
    if given.trace is None:
        parser.error("run needs --trace: the Mooncake conversation trace")
    study = Study(given.trace)
    wanted = [cell for cell in CELLS if given.only in cell.name and given.without not in cell.name]
    for cell, seed, names in planned(wanted):
        done = {
            row["policy"]
            for row in results.read(RESULTS)
            if (cell_of(row), row["seed"]) == (cell, seed)
        }
        study.add(cell, seed, [name for name in names if name not in done])


if __name__ == "__main__":
    main()
