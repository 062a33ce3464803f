"""More load than fits is offered: what is accepted stays quick, the rest is refused at once."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any

from tests.chaos.driving import PATIENCE_S, Gauges, Goal, Result, fault, settle
from tests.chaos.load import Client, Outcome, replay
from tests.chaos.rig import LOADS, STEP_S, Needs, Rig
from tests.chaos.verdict import SILENCE_S, judge

BATCH = 4
USUAL = 0.9
"""Of what fits: the load whose tail is compared with."""
SLOWER = 2.0
"""The p99 of accepted requests may become so many times the usual one."""
REFUSAL_S = 1.0
"""A refusal comes at once."""
BACK_S = 5.0
"""Until a new request is served as usual, once the overload has ended."""
PROBES_S = 60.0

NEEDS = Needs(serve=False, workers=2, engine="emulated", batch=BATCH)


def fits(rig: Rig) -> float:
    """Requests per second that the emulated workers can decode."""
    return rig.needs.workers * BATCH / (STEP_S * sum(LOADS["emulated"].tokens) / 2)


def p99(values: list[float]) -> float:
    """The smallest value that 99 % do not exceed; 0 of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))] if ordered else 0.0


async def overload(rig: Rig, seconds: float, times: float) -> Result:
    """Offer `USUAL` of what fits for `seconds`, then `times` as much as fits for as long."""
    await rig.know(rig.asks)
    gauges, result = await asyncio.to_thread(Gauges, rig), Result()
    streams = [ask for ask in rig.asks if ask.stream]
    async with Client(rig.urls) as client:

        def offer(times: float) -> Coroutine[Any, Any, list[Outcome]]:
            rate = times * fits(rig)
            return replay(
                client, streams, rate=rate, seconds=seconds, patience_s=PATIENCE_S, fresh=rig.fresh
            )

        calm = await offer(USUAL)
        usual_s = p99(_first_bytes(calm))
        offered = asyncio.create_task(offer(times))
        try:
            await asyncio.sleep(seconds)
            result.recovery_s = await _until_usual(rig, client, max(usual_s, STEP_S))
            outcomes = await offered
        finally:
            offered.cancel()
    allowed_s = max(SILENCE_S, SLOWER * usual_s)
    result.tally = judge(outcomes, rig.references, allowed_silence_s=allowed_s)
    _compare(result, outcomes, usual_s)
    await settle(rig, result, gauges)
    return result


def _first_bytes(outcomes: list[Outcome]) -> list[float]:
    return [o.elapsed_s if o.first_s is None else o.first_s for o in outcomes if o.status == 200]


async def _until_usual(rig: Rig, client: Client, usual_s: float) -> float | None:
    """Seconds until a request gets its first byte as soon as under usual load."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    ask = next(ask for ask in rig.asks if ask.stream)
    while loop.time() < began + PROBES_S:
        sent_at = loop.time()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PROBES_S):
                outcome = await client.send(ask)
            if outcome.finished and (outcome.first_s or 0.0) <= SLOWER * usual_s:
                return sent_at - began
        await asyncio.sleep(0.2)
    return None


def _compare(result: Result, outcomes: list[Outcome], usual_s: float) -> None:
    refused = [outcome for outcome in outcomes if outcome.status == 429]
    late_s = p99(_first_bytes(outcomes))
    result.notes.append(
        f"p99 of the first byte {late_s:.2f} s, under {USUAL:.0%} load {usual_s:.2f} s"
    )
    result.expect(
        late_s <= SLOWER * max(usual_s, STEP_S),
        f"p99 of accepted requests is {late_s:.1f} s, {SLOWER:g} × {usual_s:.2f} s are allowed",
    )
    result.expect(bool(refused), "nothing was refused")
    if refused:
        slowest = max(outcome.elapsed_s for outcome in refused)
        result.notes.append(f"refusals came within {slowest:.2f} s")
        result.notes.append(f"first refusal: {refused[0].error}")
        result.notes.append(f"last refusal: {refused[-1].error}")
        result.expect(slowest <= REFUSAL_S, f"a refusal came after {slowest:.1f} s")
        silent = sum(not outcome.retry_after.isdecimal() for outcome in refused)
        result.expect(not silent, f"{silent} refusals without Retry-After in seconds")


@fault("overload-3.6", "3.6 times the load that fits", NEEDS, Goal(BACK_S), 90.0)
async def overload_3_6(rig: Rig, seconds: float) -> Result:
    """A little too much."""
    return await overload(rig, seconds, 3.6)


@fault("overload-10", "10 times the load that fits", NEEDS, Goal(BACK_S), 90.0)
async def overload_10(rig: Rig, seconds: float) -> Result:
    """Far too much."""
    return await overload(rig, seconds, 10.0)
