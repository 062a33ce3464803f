"""The highest request rate at which enough requests meet their latency bounds."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from datetime import UTC, datetime

import msgspec

from loadgen.admin import Admin
from loadgen.arm import OptionError, ReplayOptions, replay_arm, warm_up
from loadgen.arrivals import Arrivals
from loadgen.compare import check_policies
from loadgen.conclusion import fleet_facts
from loadgen.goodput_report import write_goodput
from loadgen.goodput_summary import Capacity, GoodputSummary, Trial
from loadgen.measures import Slo, measure
from loadgen.plan import Load, Plan, make_plan
from loadgen.probe import GatewayProbe
from loadgen.progress import Silent, Watcher
from loadgen.rate_search import RateSearch
from loadgen.validity import reasons


class GoodputOptions(ReplayOptions, frozen=True, kw_only=True):
    """A search.

    attainment   share of the requests that must meet every bound
    precision    relative distance between the passing and the failing rate at which the search ends
    max_trials   of each policy
    """

    policies: tuple[str, ...] = ("round_robin", "locality")
    attainment: float = 0.9
    precision: float = 0.1
    max_trials: int = 12


def goodput(options: GoodputOptions, watcher: Watcher | None = None) -> GoodputSummary:
    """Find the highest rate for each policy; see `search_policies`."""
    return asyncio.run(search_policies(options, watcher))


async def search_policies(
    options: GoodputOptions, watcher: Watcher | None = None
) -> GoodputSummary:
    """Find the highest rate for each policy; every trial starts cold and sends the same texts.

    A request that fails or does not finish misses its bounds. Whatever else makes a run invalid
    ends the search. The gateway's policy is put back. Raises as `compare_arms`.
    """
    watcher = watcher or Silent()
    _check(options)
    options = msgspec.structs.replace(options, explain=False)  # no request is shown by itself
    started = datetime.now(UTC)
    async with Admin(options.url, options.admin_key, options.api_key) as admin:
        original = await admin.policy()
        await check_policies(admin, options.policies, original)
        fleet = fleet_facts(await admin.fleet())
        probe = GatewayProbe(options.url, admin, options.api_key)
        base = await make_plan(options.load, probe, options.model, options.out)
        found: dict[str, Capacity] = {}
        invalid: list[str] = []
        try:
            for policy in options.policies:
                found[policy], why = await _search(
                    options, admin, probe, base, policy, original.available, watcher
                )
                invalid += why
        finally:
            await asyncio.shield(admin.set_policy(original.policy))
    summary = GoodputSummary(
        url=options.url,
        started=started.isoformat(timespec="seconds"),
        source=base.source,
        slo=options.slo,
        attainment=options.attainment,
        fleet=fleet,
        emulated=any(worker.device.startswith("emulated") for worker in fleet),
        policies=found,
        valid=not invalid,
        reasons=invalid,
    )
    if options.out is not None:
        write_goodput(options.out, summary)
    return summary


async def _search(
    options: GoodputOptions,
    admin: Admin,
    probe: GatewayProbe,
    base: Plan,
    policy: str,
    available: Sequence[str],
    watcher: Watcher,
) -> tuple[Capacity, list[str]]:
    search = RateSearch(_first_rate(options.load, base), options.precision, options.max_trials)
    trials: list[Trial] = []
    invalid: list[str] = []
    for rate in search.rates():
        plan = await _plan_at(options, probe, base, rate)
        await warm_up(options, admin, plan.requests, available, policy)
        name = await admin.set_policy(policy)
        evidence = await replay_arm(
            options, admin, plan.requests, f"{policy} at {rate:.3g}/s", name, watcher, flush=True
        )
        invalid = reasons(
            {f"{policy} at {rate:.3g}/s": [evidence]},
            len(plan.requests),
            options.max_client_lag_ms,
            errors_count=False,
        )
        if invalid:
            break
        workers = [worker.worker for worker in evidence.before.workers]
        measures = measure(evidence.outcomes, options.slo, workers)
        met = measures.kept_share >= options.attainment
        trials.append(Trial(rate=rate, met=met, measures=measures))
        watcher.phase(f"{policy} at {rate:.3g}/s: {100 * measures.kept_share:.0f} % met the bounds")
        search.tell(met=met)
    low, high = search.bracket
    too_much = None if high == math.inf else high
    return Capacity(rate=low, too_much=too_much, trials=trials), invalid


async def _plan_at(options: GoodputOptions, probe: GatewayProbe, base: Plan, rate: float) -> Plan:
    """The same requests at another rate. Given times are stretched; think times stay."""
    load = options.load
    if _has_own_times(load):
        stretch = base.source.offered_rate / rate
        stretched = [
            msgspec.structs.replace(request, intended_at_s=request.intended_at_s * stretch)
            for request in base.requests
        ]
        return Plan(stretched, base.source)
    arrivals = msgspec.structs.replace(load.arrivals or Arrivals(), request_rate=rate)
    return await make_plan(
        msgspec.structs.replace(load, arrivals=arrivals), probe, options.model, None
    )


def _has_own_times(load: Load) -> bool:
    return load.requests is not None or (load.trace is not None and load.arrivals is None)


def _first_rate(load: Load, base: Plan) -> float:
    if not _has_own_times(load):
        return (load.arrivals or Arrivals()).request_rate
    if not base.source.offered_rate:
        raise OptionError(
            "all requests are sent at once, so there is no rate to vary: give --request-rate"
        )
    return base.source.offered_rate


def _check(options: GoodputOptions) -> None:
    options.check()
    if options.slo == Slo():
        raise OptionError("a search needs bounds, such as --goodput ttft:2000 tpot:100")
    if options.max_concurrency is not None:
        raise OptionError("a closed loop has no rate to search: leave out --max-concurrency")
    if options.load.arrivals is not None:
        if options.load.arrivals.ramp_up_strategy is not None:
            raise OptionError("a ramp has no single rate to search: leave out the ramp flags")
        if options.load.arrivals.request_rate == math.inf:
            raise OptionError("the search needs a finite --request-rate to start at")
    if not 0 < options.attainment <= 1:
        raise OptionError(f"attainment must lie between 0 and 1, got {options.attainment}")
    if not options.precision > 0:
        raise OptionError(f"precision must be positive, got {options.precision}")
