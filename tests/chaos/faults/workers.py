"""A Serve replica or its engine is killed or stopped; Ray replaces it."""

from __future__ import annotations

import asyncio
import os
import signal

from tests.chaos.driving import Result, Struck, drive, fault
from tests.chaos.rig import Rig, Worker

PAUSE_S = 20.0
NAMED_S = 3.5
"""A worker that does not answer is said to be unusable within 3 s; half a second to look."""


async def _signal_busiest(rig: Rig, number: signal.Signals, *, engine: bool) -> Worker:
    worker = await asyncio.to_thread(rig.busiest)
    os.kill(worker.engine_pid if engine else worker.pid, number)
    return worker


async def _strike_for_good(
    rig: Rig, seconds: float, number: signal.Signals, *, engine: bool
) -> Result:
    named_s: float | None = None

    async def strike() -> Struck:
        nonlocal named_s
        worker = await _signal_busiest(rig, number, engine=engine)
        struck_at = asyncio.get_running_loop().time()
        named_at = await rig.until(lambda: worker.name not in rig.ready(), 2 * PAUSE_S)
        named_s = None if named_at is None else named_at - struck_at
        return Struck(gone=frozenset({worker.name}))

    result = await drive(rig, seconds, strike)
    if named_s is None:
        result.misses.append(f"the worker was called ready for {2 * PAUSE_S:g} s and more")
    else:
        result.notes.append(f"the worker was no longer called ready after {named_s:.1f} s")
        result.expect(named_s <= NAMED_S, f"the worker was called ready for {named_s:.1f} s")
    return result


@fault("replica-killed", "kill -9 of a Serve replica")
async def replica_killed(rig: Rig, seconds: float) -> Result:
    """Its streams continue elsewhere, and Ray starts another."""
    return await _strike_for_good(rig, seconds, signal.SIGKILL, engine=False)


@fault("engine-killed", "kill -9 of a replica's engine process")
async def engine_killed(rig: Rig, seconds: float) -> Result:
    """The replica lives and says what has happened."""
    return await _strike_for_good(rig, seconds, signal.SIGKILL, engine=True)


@fault("replica-paused", f"SIGSTOP of a replica for {PAUSE_S:g} s")
async def replica_paused(rig: Rig, seconds: float) -> Result:
    """It comes back, and nobody has waited for it. With little time it is paused for half of it."""

    async def strike() -> None:
        worker = await _signal_busiest(rig, signal.SIGSTOP, engine=False)
        try:
            await asyncio.sleep(min(PAUSE_S, seconds / 2))
        finally:
            os.kill(worker.pid, signal.SIGCONT)

    return await drive(rig, seconds, strike)


@fault("replica-stopped", "a replica stopped (SIGSTOP) for good")
async def replica_stopped(rig: Rig, seconds: float) -> Result:
    """Its connections stay open and say nothing."""
    return await _strike_for_good(rig, seconds, signal.SIGSTOP, engine=False)


@fault("engine-stopped", "a replica's engine process stopped (SIGSTOP) for good")
async def engine_stopped(rig: Rig, seconds: float) -> Result:
    """The replica's server goes on answering."""
    return await _strike_for_good(rig, seconds, signal.SIGSTOP, engine=True)
