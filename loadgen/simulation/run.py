"""Policies compared on the same requests in virtual time; the summary is that of a live run."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from loadgen.arm import OptionError
from loadgen.ideal import Ideal
from loadgen.measures import ArmMeasures, Slo, measure_repeats
from loadgen.observer import Observations
from loadgen.outcomes import Outcome
from loadgen.paired import pair
from loadgen.plan import Load
from loadgen.progress import Silent, Watcher
from loadgen.report import Evidence, write_results
from loadgen.simulation.fleet import FleetOptions, SimulatedFleet, worker_name
from loadgen.simulation.prompts import Asked, asked_of, ideal_of
from loadgen.simulation.source import Sent, sent_of
from loadgen.summary import Summary, WorkerFacts
from loadgen.verdict import verdicts
from router.policies import PolicyError, parse_policy

LOAD_SAMPLES = 300
"""Moments of a run at which the workers' load is noted for the report."""


NOT_PLACED = "it was refused before one was taken"
"""Why the decision on a slow request is not known."""


class SimulateOptions(msgspec.Struct, frozen=True, kw_only=True):
    """A simulation.

    load       what is sent, and when
    policies   in the order they run, the first is the base
    fleet      its `block_size` 0 takes the trace's own, or 16
    repeats    of each policy, with one seed after the other
    drop_over_context   leave out requests whose prompt exceeds a worker's context or KV pool
    out        output directory; None: no files
    """

    load: Load
    policies: tuple[str, ...]
    fleet: FleetOptions
    slo: Slo = Slo()
    repeats: int = 1
    drop_over_context: bool = False
    out: Path | None = None


def simulate(options: SimulateOptions, watcher: Watcher | None = None) -> Summary:
    """Replay the requests through each policy, each time from cold, and compare.

    Raises OptionError for policies or sizes that cannot be, and as `sent_of`.
    """
    watcher = watcher or Silent()
    _check(options)
    started = datetime.now(UTC)
    sent = [sent_of(load, options.fleet.block_size) for load in loads_of(options)]
    if options.repeats > 1:
        seed = options.load.seed
        sent[0].source.notes.append(
            f"{options.repeats} repeats with the seeds {seed} to {seed + options.repeats - 1}: "
            "other texts and arrivals where these are drawn, other chance in ties"
        )
    fleet = msgspec.structs.replace(
        options.fleet, block_size=options.fleet.block_size or sent[0].block_tokens
    )
    try:
        limit_tokens = fleet.engine().sequence_limit
    except ValueError as error:
        raise OptionError(str(error)) from error
    if options.drop_over_context:
        sent = [_without_over_context(one, limit_tokens) for one in sent]
    asked = [asked_of(one.requests, fleet.block_size) for one in sent]
    outcomes: dict[str, list[list[Outcome]]] = {}
    measures: dict[str, ArmMeasures] = {}
    seen: dict[str, list[Observations]] = {}
    for policy in options.policies:
        replays = [
            _replay(options, fleet, policy, repeat, one, watcher)
            for repeat, one in enumerate(asked)
        ]
        outcomes[policy] = [replay for replay, _ in replays]
        seen[policy] = [observations for _, observations in replays]
        names = [worker.worker for worker in _workers(fleet)]
        measures[policy] = measure_repeats(outcomes[policy], options.slo, names)
        for replay in outcomes[policy]:  # every gap of every arm would fill the memory
            for outcome in replay:
                outcome.itl_ms = [max(outcome.itl_ms, default=0.0)]
    summary = _conclude(options, fleet, sent[0], started, outcomes, measures)
    summary = msgspec.structs.replace(
        summary, ideal=_mean_ideal([ideal_of(one, fleet.block_size) for one in asked])
    )
    if options.out is not None:
        everything = [o for arm in outcomes.values() for replay in arm for o in replay]
        write_results(options.out, summary, Evidence(everything, [], seen))
    return summary


def _without_over_context(sent: Sent, limit_tokens: int) -> Sent:
    """The requests whose prompt leaves room for at least one token, with a note of the others.

    Raises OptionError where none is left.
    """
    kept = [one for one in sent.requests if one.prompt_tokens < limit_tokens]
    dropped = len(sent.requests) - len(kept)
    if not dropped:
        return sent
    if not kept:
        raise OptionError(f"every prompt has {limit_tokens} tokens or more: nothing can be served")
    note = (
        f"{dropped} of {len(sent.requests)} requests left out: {limit_tokens} prompt tokens or more"
    )
    source = msgspec.structs.replace(
        sent.source, requests=len(kept), notes=[*sent.source.notes, note]
    )
    return sent._replace(requests=kept, source=source)


def loads_of(options: SimulateOptions) -> list[Load]:
    """What each repeat sends: the first the load as it is, each other one with the next seed."""
    loads = []
    for seed in range(options.load.seed, options.load.seed + options.repeats):
        load = msgspec.structs.replace(options.load, seed=seed)
        if load.trace is not None:
            spread = msgspec.structs.replace(load.trace.options, seed=seed)
            load = msgspec.structs.replace(
                load, trace=msgspec.structs.replace(load.trace, options=spread)
            )
        loads.append(load)
    return loads


def _replay(
    options: SimulateOptions,
    fleet: FleetOptions,
    policy: str,
    repeat: int,
    asked: Sequence[Asked],
    watcher: Watcher,
) -> tuple[list[Outcome], Observations]:
    watcher.arm(policy if not repeat else f"{policy}, repeat {repeat + 1}", len(asked))
    simulated = SimulatedFleet(fleet, parse_policy(policy), options.load.seed + repeat)
    samples = simulated.sample_load(asked[-1].arrival_s / LOAD_SAMPLES)
    told = simulated.explain_slowest() if options.out is not None else {}
    outcomes = simulated.replay(asked, policy, watcher.ended)
    for outcome in outcomes:
        outcome.repeat = repeat
    return outcomes, Observations(samples=samples, explanations=told, otherwise=NOT_PLACED)


def _mean_ideal(each: Sequence[Ideal]) -> Ideal:
    count = len(each)
    return Ideal(
        sum(one.cached_token_ratio for one in each) / count,
        round(sum(one.distinct_tokens for one in each) / count),
    )


def _check(options: SimulateOptions) -> None:
    policies = options.policies
    if not policies or len(set(policies)) != len(policies):
        raise OptionError(f"policies must be named once each, got {', '.join(policies)}")
    if options.repeats < 1:
        raise OptionError(f"repeats must be at least 1, got {options.repeats}")
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
    outcomes: dict[str, list[list[Outcome]]],
    measures: dict[str, ArmMeasures],
) -> Summary:
    names = list(outcomes)
    base = names[0]
    paired = {
        name: pair(base, outcomes[base], outcomes[name], options.slo, options.load.seed)
        for name in names[1:]
    }
    reasons = [
        text
        for name in names
        for text in _reasons(name, [o for arm in outcomes[name] for o in arm])
    ]
    return Summary(
        command="simulate",
        url=f"simulated, {fleet.profile_name}",
        started=started.isoformat(timespec="seconds"),
        source=sent.source,
        fleet=_workers(fleet),
        emulated=True,
        slo=options.slo,
        repeats=options.repeats,
        arms=measures,
        paired=paired,
        verdicts=verdicts(paired, valid=not reasons, repeats=options.repeats),
        ideal=None,
        valid=not reasons,
        reasons=reasons,
    )


def _workers(fleet: FleetOptions) -> list[WorkerFacts]:
    return [
        WorkerFacts(
            worker=worker_name(number),
            device=f"simulated:{fleet.profile_name}",
            capacity_tokens=fleet.capacity_blocks * fleet.block_size,
        )
        for number in range(fleet.workers)
    ]


def _reasons(name: str, outcomes: Sequence[Outcome]) -> list[str]:
    failed = [outcome for outcome in outcomes if outcome.status != "ok"]
    if not failed:
        return []
    return [
        f"{name}: {len(failed)} of {len(outcomes)} requests failed, the first with: "
        f"{failed[0].error}; {_remedy(failed)}"
    ]


def _remedy(failed: Sequence[Outcome]) -> str:
    if all(outcome.http_status == 400 for outcome in failed):
        return "leave such requests out with --drop-over-context"
    return "simulate a lower request rate, more workers or a larger queue"
