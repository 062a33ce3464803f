"""Builds the summary from the observations of all arms: measures, pairs, validity, verdict."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime

from loadgen.admin import FleetView
from loadgen.arm import ReplayOptions
from loadgen.ideal import ideal
from loadgen.measures import measure_repeats
from loadgen.outcomes import Outcome
from loadgen.paired import pair
from loadgen.plan import Plan
from loadgen.report import Evidence, write_results
from loadgen.summary import Summary, WorkerFacts
from loadgen.validity import ArmEvidence, reasons
from loadgen.verdict import verdicts


def conclude(
    command: str,
    options: ReplayOptions,
    started: datetime,
    plan: Plan,
    arms: Mapping[str, Sequence[ArmEvidence]],
) -> Summary:
    """The summary of arms by policy, each with its repeats; the first arm is the baseline.

    Writes the results where `options.out` is set.
    """
    names = list(arms)
    base = names[0]
    found = reasons(arms, len(plan.requests), options.max_client_lag_ms)
    fleet = fleet_facts(arms[base][0].before)
    paired = {
        name: pair(
            base,
            [replay.outcomes for replay in arms[base]],
            [replay.outcomes for replay in arms[name]],
            options.slo,
            plan.source.seed,
        )
        for name in names[1:]
    }
    outcomes = [outcome for name in names for replay in arms[name] for outcome in replay.outcomes]
    summary = Summary(
        command=command,
        url=options.url,
        started=started.isoformat(timespec="seconds"),
        source=plan.source,
        fleet=fleet,
        emulated=any(worker.device.startswith("emulated") for worker in fleet),
        slo=options.slo,
        cold=all(replay.flushed for replays in arms.values() for replay in replays),
        repeats=len(arms[base]),
        max_concurrency=options.max_concurrency,
        arms={
            name: measure_repeats(
                [replay.outcomes for replay in replays],
                options.slo,
                [worker.worker for worker in replays[0].before.workers],
            )
            for name, replays in arms.items()
        },
        paired=paired,
        verdicts=verdicts(paired, valid=not found, repeats=len(arms[base])),
        ideal=ideal(plan.requests, _prompt_tokens(outcomes)),
        valid=not found,
        reasons=found,
    )
    if options.out is not None:
        seen = {name: [replay.seen for replay in replays] for name, replays in arms.items()}
        write_results(options.out, summary, Evidence(outcomes, plan.requests, seen))
    return summary


def fleet_facts(fleet: FleetView) -> list[WorkerFacts]:
    """What a summary tells of each worker."""
    return [
        WorkerFacts(
            worker=worker.worker,
            device=worker.device,
            capacity_tokens=worker.capacity_blocks * worker.block_size,
        )
        for worker in fleet.workers
    ]


def _prompt_tokens(outcomes: Iterable[Outcome]) -> dict[str, int]:
    """Prompt tokens by request, from whichever arm got an answer."""
    return {
        outcome.id: outcome.prompt_tokens
        for outcome in outcomes
        if outcome.prompt_tokens is not None
    }
