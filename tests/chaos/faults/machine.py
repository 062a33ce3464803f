"""The machine under the workers: its disk fills, its clock steps."""

from __future__ import annotations

import asyncio
import os

from tests.chaos.driving import Result, drive, fault
from tests.chaos.rig import Needs, Rig

HOLD = 0.4
STEP_CLOCK_S = 3600.0
FILLER_BYTES = 4096


@fault(
    "disk-full",
    "no space left on the disk tier's file system",
    Needs(serve=False, workers=2, engine="tiny", disk=True),
)
async def disk_full(rig: Rig, seconds: float) -> Result:
    """The tier stores nothing more meanwhile; requests do not notice."""
    filler, notes = rig.disk / "filler", list[str]()

    def fill() -> None:
        with filler.open("wb", buffering=0) as file:
            while True:
                try:
                    file.write(bytes(FILLER_BYTES))
                except OSError:
                    return

    async def strike() -> None:
        await asyncio.to_thread(fill)
        notes.append(f"{os.statvfs(rig.disk).f_bavail} free file system blocks at the strike")
        await asyncio.sleep(HOLD * seconds)
        filler.unlink()

    result = await drive(rig, seconds, strike)
    result.notes += notes
    return result


async def _step(rig: Rig, seconds: float, offset_s: float) -> Result:
    async def strike() -> None:
        rig.step_clock(offset_s)
        await asyncio.sleep(HOLD * seconds)

    result = await drive(rig, seconds, strike)
    rig.step_clock(0.0)
    return result


CLOCK = Needs(serve=False, workers=2, clock=True)


@fault("clock-forward", "the wall clock steps an hour forward", CLOCK)
async def clock_forward(rig: Rig, seconds: float) -> Result:
    """No lease ends, no wait is skipped."""
    return await _step(rig, seconds, STEP_CLOCK_S)


@fault("clock-back", "the wall clock steps an hour back", CLOCK)
async def clock_back(rig: Rig, seconds: float) -> Result:
    """No wait becomes an hour longer."""
    return await _step(rig, seconds, -STEP_CLOCK_S)
