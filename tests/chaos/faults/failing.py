"""Workers that accept requests and answer each with status 500."""

from __future__ import annotations

import asyncio
import os
import signal

from tests.chaos.driving import Result, drive, fault
from tests.chaos.rig import Needs, Rig

FOUR = Needs(serve=False, workers=4, gateways=2)
HOLD = 0.5
"""Of the load's duration that they fail."""
TRIES = 12
"""Requests that each failing worker may cost before it is avoided: a few per gateway."""


async def failing(rig: Rig, seconds: float, count: int) -> Result:
    """`count` of the workers fail every request for a while."""
    workers, tried = rig.plain.processes, 0
    broken = set(list(workers)[:count])

    def routed() -> int:
        members = rig.view("/admin/fleet").get("workers", [])
        return sum(m["routed"] for m in members if m["worker"] in broken)

    async def strike() -> None:
        nonlocal tried
        before = await asyncio.to_thread(routed)
        for name in broken:
            os.kill(workers[name].pid, signal.SIGUSR1)
        await asyncio.sleep(HOLD * seconds)
        tried = await asyncio.to_thread(routed) - before
        for name in broken:
            os.kill(workers[name].pid, signal.SIGUSR2)

    well = (len(workers) - count) / len(workers)  # the others carry the load
    result = await drive(rig, seconds, strike, rate=well * rig.rate)
    result.notes.append(f"one gateway tried the failing workers {tried} times")
    result.expect(
        tried <= TRIES * count, f"failing workers were tried {tried} times: they were not avoided"
    )
    return result


@fault("one-worker-fails", "one of four workers answers every request with 500", FOUR)
async def one_worker_fails(rig: Rig, seconds: float) -> Result:
    """It is avoided after a few, and trusted again when it is well."""
    return await failing(rig, seconds, 1)


@fault("three-workers-fail", "three of four workers answer every request with 500", FOUR)
async def three_workers_fail(rig: Rig, seconds: float) -> Result:
    """The fourth serves all."""
    return await failing(rig, seconds, 3)
