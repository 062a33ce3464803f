"""Policies compared on the same requests in virtual time; the summary is that of a live run."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from loadgen.arm import OptionError
from loadgen.measures import ArmMeasures, Slo, measure_repeats
from loadgen.observer import Observations
from loadgen.outcomes import Outcome
from loadgen.paired import pair
from loadgen.plan import Load
from loadgen.progress import Silent, Watcher
from loadgen.report import Evidence, write_results
from loadgen.simulation.fleet import FleetOptions, SimulatedFleet
from loadgen.simulation.prompts import asked_of, ideal_of
from loadgen.simulation.source import Sent, sent_of
from loadgen.summary import Summary, WorkerFacts
from loadgen.verdict import verdicts
from router.policies import PolicyError, parse_policy

LOAD_SAMPLES = 300
"""Moments of a run at which the workers' load is noted for the report."""


class SimulateOptions(msgspec.Struct, frozen=True, kw_only=True):
    """A simulation.

    load       what is sent, and when
    policies   in the order they run, the first is the base
    fleet      its `block_size` 0 takes the trace's own, or 16
    out        folder of the results; None writes none
    """

    load: Load
    policies: tuple[str, ...]
    fleet: FleetOptions
    slo: Slo = Slo()
    out: Path | None = None


def simulate(options: SimulateOptions, watcher: Watcher | None = None) -> Summary:
    """Replay the requests through each policy, each time from cold, and compare.

    Raises OptionError for policies or sizes that cannot be, and as `sent_of`.
    """
    watcher = watcher or Silent()
    _check(options)
    started = datetime.now(UTC)
    sent = sent_of(options.load, options.fleet.block_size)
    fleet = msgspec.structs.replace(
        options.fleet, block_size=options.fleet.block_size or sent.block_tokens
    )
    try:
        fleet.engine()
    except ValueError as error:
        raise OptionError(str(error)) from error
    asked = asked_of(sent.requests, fleet.block_size)
    interval_s = asked[-1].arrival_s / LOAD_SAMPLES
    outcomes: dict[str, list[Outcome]] = {}
    measures: dict[str, ArmMeasures] = {}
    seen: dict[str, list[Observations]] = {}
    for policy in options.policies:
        watcher.arm(policy, len(asked))
        simulated = SimulatedFleet(fleet, parse_policy(policy), options.load.seed)
        samples = simulated.sample_load(interval_s)
        outcomes[policy] = simulated.replay(asked, policy, watcher.ended)
        measures[policy] = measure_repeats([outcomes[policy]], options.slo, simulated.workers)
        seen[policy] = [Observations(samples=samples)]
        for outcome in outcomes[policy]:  # every gap of every arm would fill the memory
            outcome.itl_ms = [max(outcome.itl_ms, default=0.0)]
    summary = _conclude(options, fleet, sent, started, outcomes, measures)
    summary = msgspec.structs.replace(summary, ideal=ideal_of(asked, fleet.block_size))
    if options.out is not None:
        everything = [outcome for arm in outcomes.values() for outcome in arm]
        write_results(options.out, summary, Evidence(everything, [], seen))
    return summary


def _check(options: SimulateOptions) -> None:
    policies = options.policies
    if not policies or len(set(policies)) != len(policies):
        raise OptionError(f"policies must be named once each, got {', '.join(policies)}")
    if options.fleet.workers < 1:
        raise OptionError(f"workers must be at least 1, got {options.fleet.workers}")
    for policy in policies:
        try:
            parse_policy(policy)
        except PolicyError as error:
            raise OptionError(str(error)) from error


def _conclude(
    options: SimulateOptions,
    fleet: FleetOptions,
    sent: Sent,
    started: datetime,
    outcomes: dict[str, list[Outcome]],
    measures: dict[str, ArmMeasures],
) -> Summary:
    names = list(outcomes)
    base = names[0]
    paired = {
        name: pair(base, [outcomes[base]], [outcomes[name]], options.slo, options.load.seed)
        for name in names[1:]
    }
    reasons = [text for name in names for text in _reasons(name, outcomes[name])]
    return Summary(
        command="simulate",
        url=f"simulated, {fleet.profile_name}",
        started=started.isoformat(timespec="seconds"),
        source=sent.source,
        fleet=[
            WorkerFacts(
                worker=f"w{number:03d}",
                device=f"simulated:{fleet.profile_name}",
                capacity_tokens=fleet.capacity_blocks * fleet.block_size,
            )
            for number in range(fleet.workers)
        ],
        emulated=True,
        slo=options.slo,
        arms=measures,
        paired=paired,
        verdicts=verdicts(paired, valid=not reasons),
        ideal=None,
        valid=not reasons,
        reasons=reasons,
    )


def _reasons(name: str, outcomes: Sequence[Outcome]) -> list[str]:
    failed = [outcome for outcome in outcomes if outcome.status != "ok"]
    if not failed:
        return []
    return [
        f"{name}: {len(failed)} of {len(outcomes)} requests failed, the first with: "
        f"{failed[0].error}; simulate fewer requests a second, more workers or a larger queue"
    ]
