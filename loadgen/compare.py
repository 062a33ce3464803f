"""Comparisons on a live gateway: the same requests through each policy, each time from cold.

one arm: set the policy, warm up, flush all caches, wait until quiet, read the gateway's
request count, replay the file, wait until quiet, read the count again
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import msgspec

from loadgen.admin import Admin, AdminError, FleetView
from loadgen.arrivals import interleave, poisson_gaps_s
from loadgen.client import Client
from loadgen.ideal import ideal
from loadgen.measures import Slo, measure
from loadgen.paired import pair
from loadgen.progress import Silent, Watcher
from loadgen.report import write_results
from loadgen.requests import (
    Request,
    decode_requests,
    digest,
    encode_requests,
    read_request_file,
)
from loadgen.summary import RequestSource, Summary, WorkerFacts
from loadgen.validity import ArmEvidence, reasons
from loadgen.workloads import SharedPrefix, shared_prefix

WORKLOAD_FILE = "workload.jsonl"
WARM_UP_POLICY = "round_robin"
"""Reaches every worker, whatever the arm's policy would do."""


class ReplayOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What a run and a comparison have in common.

    url                base URL of the gateway
    requests           a request file to replay; None makes one from the workload
    model              name to ask for; "" takes the first that the gateway serves
    request_rate       requests a second (Poisson)
    num_warmups        requests before each flush that are not counted
    timeout_s          a request that has not ended by then is unfinished
    quiet_timeout_s    the gateway may take so long to become quiet around an arm
    max_client_lag_ms  bound on the 99th percentile of sent − intended for a valid run
    out                folder of the results; None writes none
    """

    url: str
    requests: Path | None = None
    workload: SharedPrefix = SharedPrefix()
    model: str = ""
    request_rate: float = 2.0
    seed: int = 0
    slo: Slo = Slo()
    num_warmups: int = 4
    timeout_s: float = 300.0
    quiet_timeout_s: float = 60.0
    max_client_lag_ms: float = 100.0
    api_key: str = ""
    admin_key: str = ""
    out: Path | None = None


class CompareOptions(ReplayOptions, frozen=True, kw_only=True):
    """A comparison: `policies` in the order they run, the first is the base."""

    policies: tuple[str, ...] = ("round_robin", "locality")


class RunOptions(ReplayOptions, frozen=True, kw_only=True):
    """One arm with the policy that the gateway has; `flush` empties the caches first."""

    flush: bool = False


class OptionError(ValueError):
    """Options that make no run. Its text says which."""


class _Plan(NamedTuple):
    requests: list[Request]
    source: RequestSource


def compare(options: CompareOptions, watcher: Watcher | None = None) -> Summary:
    """Replay the requests once for each policy and compare; see `compare_arms`."""
    return asyncio.run(compare_arms(options, watcher))


def run(options: RunOptions, watcher: Watcher | None = None) -> Summary:
    """Replay the requests once; see `run_arm`."""
    return asyncio.run(run_arm(options, watcher))


async def compare_arms(options: CompareOptions, watcher: Watcher | None = None) -> Summary:
    """Replay the requests once for each policy, each time from cold, and compare.

    The gateway's policy is put back at the end, also when cancelled. Raises AdminError,
    RequestFileError, WorkloadError, ArrivalError or OptionError where nothing can be compared.
    """
    watcher = watcher or Silent()
    if not options.policies or len(set(options.policies)) != len(options.policies):
        raise OptionError(f"policies must be named once each, got {', '.join(options.policies)}")
    started = datetime.now(UTC)
    async with Admin(options.url, options.admin_key, options.api_key) as admin:
        original = await admin.policy()
        unknown = [p for p in options.policies if p.partition(":")[0] not in original.available]
        if unknown:
            raise OptionError(
                f"the gateway knows no policy {', '.join(unknown)}; "
                f"there are: {', '.join(original.available)}"
            )
        plan = await _plan(options, admin)
        arms: dict[str, ArmEvidence] = {}
        try:
            for policy in options.policies:
                if options.num_warmups:
                    await _warm_up(options, admin, plan.requests, original.available, policy)
                name = await admin.set_policy(policy)
                arms[policy] = await _arm(options, admin, plan, policy, name, True, watcher)
        finally:
            await asyncio.shield(admin.set_policy(original.policy))
    return _conclude("compare", options, started, plan, arms)


async def run_arm(options: RunOptions, watcher: Watcher | None = None) -> Summary:
    """Replay the requests once under the policy that the gateway has.

    Warm-ups are sent only where caches are flushed after them. Raises as `compare_arms`.
    """
    watcher = watcher or Silent()
    started = datetime.now(UTC)
    async with Admin(options.url, options.admin_key, options.api_key) as admin:
        policy = (await admin.policy()).policy
        plan = await _plan(options, admin)
        if options.flush and options.num_warmups:
            await _warm_up(options, admin, plan.requests, (), policy)
        evidence = await _arm(options, admin, plan, policy, policy, options.flush, watcher)
    return _conclude("run", options, started, plan, {policy: evidence})


async def _plan(options: ReplayOptions, admin: Admin) -> _Plan:
    """The requests, read back from the bytes of their file."""
    if options.requests is not None:
        requests, sha256 = read_request_file(options.requests)
        file = str(options.requests)
    else:
        model = options.model or await admin.model()
        conversations = shared_prefix(options.workload, model, options.seed)
        data = encode_requests(
            interleave(
                conversations,
                poisson_gaps_s(options.request_rate, options.seed),
                options.workload.think_time_s,
                options.seed,
            )
        )
        requests, sha256 = decode_requests(data), digest(data)
        file = WORKLOAD_FILE
        if options.out is not None:
            options.out.mkdir(parents=True, exist_ok=True)
            (options.out / WORKLOAD_FILE).write_bytes(data)
    span_s = requests[-1].intended_at_s
    source = RequestSource(
        file=file,
        sha256=sha256,
        requests=len(requests),
        offered_rate=len(requests) / span_s if span_s else 0.0,
        seed=options.seed,
        workload=None if options.requests is not None else options.workload,
    )
    return _Plan(requests, source)


async def _warm_up(
    options: ReplayOptions,
    admin: Admin,
    requests: Sequence[Request],
    available: Sequence[str],
    policy: str,
) -> None:
    """Let every worker do its first-time work. The flush that follows forgets the requests."""
    await admin.set_policy(WARM_UP_POLICY if WARM_UP_POLICY in available else policy)
    at_once = [
        msgspec.structs.replace(request, intended_at_s=0.0)
        for request in requests[: options.num_warmups]
    ]
    await Client(options.url, options.api_key, options.timeout_s).replay(at_once, "warm-up")


async def _arm(
    options: ReplayOptions,
    admin: Admin,
    plan: _Plan,
    arm: str,
    policy: str,
    flush: bool,
    watcher: Watcher,
) -> ArmEvidence:
    watcher.phase(f"{arm}: waiting until the gateway is quiet")
    quiet_s = options.quiet_timeout_s
    await admin.wait_for(lambda fleet: fleet.quiet, quiet_s)
    if flush:
        watcher.phase(f"{arm}: flushing all caches")
        await admin.flush()
        await admin.wait_for(lambda fleet: fleet.quiet and fleet.blocks == 0, quiet_s)
    before = await admin.fleet()
    if not before.workers:
        raise AdminError(f"{options.url} has no workers: wait until /ready answers 200")
    watcher.arm(arm, len(plan.requests))
    client = Client(options.url, options.api_key, options.timeout_s)
    outcomes = await client.replay(plan.requests, arm, watcher.ended)
    after = await admin.wait_for(lambda fleet: fleet.quiet, quiet_s) or await admin.fleet()
    return ArmEvidence(policy, outcomes, before, after, flush)


def _conclude(
    command: str,
    options: ReplayOptions,
    started: datetime,
    plan: _Plan,
    arms: dict[str, ArmEvidence],
) -> Summary:
    """Measures, pairs, verdict on validity; writes the results where `out` is set."""
    names = list(arms)
    base = names[0]
    found = reasons(arms, len(plan.requests), options.max_client_lag_ms)
    fleet = _fleet_facts(arms[base].before)
    summary = Summary(
        command=command,
        url=options.url,
        started=started.isoformat(timespec="seconds"),
        source=plan.source,
        fleet=fleet,
        emulated=any(worker.device.startswith("emulated") for worker in fleet),
        slo=options.slo,
        arms={
            name: measure(
                arm.outcomes, options.slo, [worker.worker for worker in arm.before.workers]
            )
            for name, arm in arms.items()
        },
        paired={
            name: pair(base, arms[base].outcomes, arms[name].outcomes, options.seed)
            for name in names[1:]
        },
        ideal=ideal(plan.requests, _prompt_tokens(arms)),
        valid=not found,
        reasons=found,
    )
    if options.out is not None:
        outcomes = [outcome for arm in arms.values() for outcome in arm.outcomes]
        write_results(options.out, summary, outcomes, plan.requests)
    return summary


def _fleet_facts(fleet: FleetView) -> list[WorkerFacts]:
    return [
        WorkerFacts(
            worker=worker.worker,
            device=worker.device,
            capacity_tokens=worker.capacity_blocks * worker.block_size,
        )
        for worker in fleet.workers
    ]


def _prompt_tokens(arms: dict[str, ArmEvidence]) -> dict[str, int]:
    """Prompt tokens by request, from whichever arm got an answer."""
    return {
        outcome.id: outcome.prompt_tokens
        for arm in arms.values()
        for outcome in arm.outcomes
        if outcome.prompt_tokens is not None
    }
