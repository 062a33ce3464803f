"""One arm on a live gateway, once: from cold, or from what the caches hold.

set the policy, warm up, flush all caches, wait until quiet, read the gateway's request count,
replay the file under observation, wait until quiet, read the count again
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import msgspec

from loadgen.admin import Admin, AdminError
from loadgen.client import Client
from loadgen.measures import Slo
from loadgen.observer import Observations, ask_decisions, observe
from loadgen.outcomes import Outcome
from loadgen.plan import Load
from loadgen.progress import Watcher
from loadgen.requests import Request
from loadgen.slowest import Slowest
from loadgen.validity import ArmEvidence

WARM_UP_POLICY = "round_robin"
"""Used for warm-up requests, because it reaches every worker."""

NOT_ASKED = "decisions were not asked for (--no-explain)"


class ReplayOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options that all live commands share.

    url                base URL of the gateway
    load               what is sent, and when
    model              name to ask for; "" takes the first that the gateway serves
    slo                latency bounds for goodput
    max_concurrency    closed loop with at most this many requests in flight; None: open loop
    num_warmups        warm-up requests before each flush, not counted
    timeout_s          a request that takes longer is counted as unfinished
    quiet_timeout_s    maximum wait for an idle gateway before and after an arm
    max_client_lag_ms  bound on the 99th percentile of sent − intended for a valid run
    sample_interval_s  interval between samples of the workers' load; 0: no samples
    explain            fetch the routing decisions of the slowest requests
    out                output directory; None: no files
    """

    url: str
    load: Load = Load()
    model: str = ""
    slo: Slo = Slo()
    max_concurrency: int | None = None
    num_warmups: int = 4
    timeout_s: float = 300.0
    quiet_timeout_s: float = 60.0
    max_client_lag_ms: float = 100.0
    sample_interval_s: float = 0.5
    explain: bool = True
    api_key: str = ""
    admin_key: str = ""
    out: Path | None = None

    def check(self) -> None:
        """Raises OptionError for invalid values."""
        if self.max_concurrency is not None and self.max_concurrency < 1:
            raise OptionError(f"max_concurrency must be at least 1, got {self.max_concurrency}")
        if self.sample_interval_s < 0:
            raise OptionError(
                f"sample_interval_s must not be negative, got {self.sample_interval_s}"
            )


class OptionError(ValueError):
    """Invalid options. The message names the option."""


async def warm_up(
    options: ReplayOptions,
    admin: Admin,
    requests: Sequence[Request],
    available: Sequence[str],
    policy: str,
) -> None:
    """Let every worker do its one-time work. The flush afterwards drops these requests' blocks."""
    if not options.num_warmups:
        return
    await admin.set_policy(WARM_UP_POLICY if WARM_UP_POLICY in available else policy)
    at_once = [
        msgspec.structs.replace(request, intended_at_s=0.0)
        for request in requests[: options.num_warmups]
    ]
    await _client(options).replay(at_once, "warm-up")


async def replay_arm(
    options: ReplayOptions,
    admin: Admin,
    requests: Sequence[Request],
    arm: str,
    policy: str,
    watcher: Watcher,
    *,
    flush: bool,
    repeat: int = 0,
) -> ArmEvidence:
    """Replay the requests with the gateway's current policy, which it calls `policy`."""
    label = arm if not repeat else f"{arm}, repeat {repeat + 1}"
    watcher.phase(f"{label}: waiting until the gateway is idle")
    quiet_s = options.quiet_timeout_s
    await admin.wait_for(lambda fleet: fleet.quiet, quiet_s)
    if flush:
        watcher.phase(f"{label}: flushing all caches")
        await admin.flush()
        await admin.wait_for(lambda fleet: fleet.quiet and fleet.blocks == 0, quiet_s)
    before = await admin.fleet()
    if not before.workers:
        raise AdminError(f"{options.url} has no workers: wait until /ready answers 200")
    watcher.arm(label, len(requests))
    seen = Observations() if options.explain else Observations(otherwise=NOT_ASKED)
    slowest = Slowest() if options.explain else None

    def ended(outcome: Outcome) -> None:
        if slowest is not None:
            slowest.add(outcome)
        watcher.ended(outcome)

    begin = asyncio.get_running_loop().time()
    observing = asyncio.create_task(observe(admin, slowest, begin, options.sample_interval_s, seen))
    try:
        outcomes = await _client(options, explain=options.explain).replay(
            requests,
            arm,
            ended,
            repeat=repeat,
            begin=begin,
            max_concurrency=options.max_concurrency,
        )
    finally:
        observing.cancel()
        await asyncio.wait([observing])
    if not observing.cancelled():
        observing.result()
    if slowest is not None:
        await ask_decisions(admin, slowest, seen)
    after = await admin.wait_for(lambda fleet: fleet.quiet, quiet_s) or await admin.fleet()
    return ArmEvidence(policy, outcomes, before, after, flush, seen)


def _client(options: ReplayOptions, *, explain: bool = False) -> Client:
    return Client(options.url, options.api_key, options.timeout_s, explain=explain)
