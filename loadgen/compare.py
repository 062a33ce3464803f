"""Runs and comparisons on a live gateway: the same requests with each policy, from empty caches.

A comparison replays the file several times. Within each repeat every policy has its turn, and
the order turns around from one repeat to the next, so that a machine that drifts favours none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime

from loadgen.admin import Admin, PolicyView, Refused
from loadgen.arm import OptionError, ReplayOptions, replay_arm, warm_up
from loadgen.conclusion import conclude
from loadgen.plan import make_plan
from loadgen.probe import GatewayProbe
from loadgen.progress import Silent, Watcher
from loadgen.summary import Summary
from loadgen.validity import ArmEvidence


class CompareOptions(ReplayOptions, frozen=True, kw_only=True):
    """A comparison: `policies` of which the first is the base, each replayed `repeats` times."""

    policies: tuple[str, ...] = ("round_robin", "locality")
    repeats: int = 3


class RunOptions(ReplayOptions, frozen=True, kw_only=True):
    """One arm with the policy that the gateway has; `flush` empties the caches first."""

    flush: bool = False


def compare(options: CompareOptions, watcher: Watcher | None = None) -> Summary:
    """Replay the requests for each policy and compare; see `compare_arms`."""
    return asyncio.run(compare_arms(options, watcher))


def run(options: RunOptions, watcher: Watcher | None = None) -> Summary:
    """Replay the requests once; see `run_arm`."""
    return asyncio.run(run_arm(options, watcher))


async def compare_arms(options: CompareOptions, watcher: Watcher | None = None) -> Summary:
    """Replay the requests `repeats` times for each policy, each time from cold, and compare.

    The gateway's policy is restored at the end, also after cancellation. Raises AdminError,
    RequestFileError, TraceError, WorkloadError, ArrivalError or OptionError where nothing can be
    compared.
    """
    watcher = watcher or Silent()
    options.check()
    if not options.policies or len(set(options.policies)) != len(options.policies):
        raise OptionError(f"name each policy once, got {', '.join(options.policies)}")
    if options.repeats < 1:
        raise OptionError(f"repeats must be at least 1, got {options.repeats}")
    started = datetime.now(UTC)
    async with Admin(options.url, options.admin_key, options.api_key) as admin:
        original = await admin.policy()
        await check_policies(admin, options.policies, original)
        probe = GatewayProbe(options.url, admin, options.api_key)
        plan = await make_plan(options.load, probe, options.model, options.out)
        arms: dict[str, list[ArmEvidence]] = {policy: [] for policy in options.policies}
        try:
            for repeat in range(options.repeats):
                order = options.policies if repeat % 2 == 0 else options.policies[::-1]
                for policy in order:
                    await warm_up(options, admin, plan.requests, original.available, policy)
                    name = await admin.set_policy(policy)
                    evidence = await replay_arm(
                        options,
                        admin,
                        plan.requests,
                        policy,
                        name,
                        watcher,
                        flush=True,
                        repeat=repeat,
                    )
                    arms[policy].append(evidence)
        finally:
            await asyncio.shield(admin.set_policy(original.policy))
    return conclude("compare", options, started, plan, arms)


async def run_arm(options: RunOptions, watcher: Watcher | None = None) -> Summary:
    """Replay the requests once with the gateway's current policy.

    Warm-up requests are sent only where caches are flushed afterwards. Raises as `compare_arms`.
    """
    watcher = watcher or Silent()
    options.check()
    started = datetime.now(UTC)
    async with Admin(options.url, options.admin_key, options.api_key) as admin:
        policy = (await admin.policy()).policy
        probe = GatewayProbe(options.url, admin, options.api_key)
        plan = await make_plan(options.load, probe, options.model, options.out)
        if options.flush:
            await warm_up(options, admin, plan.requests, (), policy)
        evidence = await replay_arm(
            options, admin, plan.requests, policy, policy, watcher, flush=options.flush
        )
    return conclude("run", options, started, plan, {policy: [evidence]})


async def check_policies(admin: Admin, asked: Sequence[str], original: PolicyView) -> None:
    """Have the gateway take each policy for a moment, then its own again: only the gateway knows
    which names and parameters it takes. Raises OptionError for one that it refuses."""
    unknown = [policy for policy in asked if policy.partition(":")[0] not in original.available]
    if unknown:
        raise OptionError(
            f"the gateway has no policy {', '.join(unknown)}; available: "
            f"{', '.join(original.available)}"
        )
    try:
        for policy in asked:
            try:
                await admin.set_policy(policy)
            except Refused as error:
                raise OptionError(
                    f"the gateway refuses the policy {policy}: {error.reason}"
                ) from error
    finally:
        await asyncio.shield(admin.set_policy(original.policy))
