"""Many faults one after the other under steady load, for as long as one likes."""

from __future__ import annotations

import asyncio
import os
import random
import signal

import httpx

from tests.chaos.driving import STRIKE_AT, WHOLE_S, Result, drive, fault
from tests.chaos.faults.clients import crowd
from tests.chaos.processes import memory_mib
from tests.chaos.rig import Needs, Rig

REST = (3.0, 10.0)
"""Seconds between one event and the next."""
STOP_AT = 0.9
"""Of the load's duration: the last events are over when it ends."""
VANISHING = 40
EVENTS = (
    "replica killed",
    "engine killed",
    "replica paused",
    "Redis restarted",
    "Redis emptied",
    "caches flushed",
    "policy changed",
    "clients vanished",
)
PAUSE_S = 6.0
SOAK_S = 1800.0


async def happen(rig: Rig, event: str, rng: random.Random) -> None:
    """One event, to its end. Ray has replaced what was killed when it returns."""
    match event:
        case "replica killed" | "engine killed":
            worker = await asyncio.to_thread(rig.busiest)
            os.kill(worker.pid if event == "replica killed" else worker.engine_pid, signal.SIGKILL)
            await rig.until(lambda: rig.whole(frozenset({worker.name})), WHOLE_S)
        case "replica paused":
            worker = await asyncio.to_thread(rig.busiest)
            os.kill(worker.pid, signal.SIGSTOP)
            await asyncio.sleep(PAUSE_S)
            os.kill(worker.pid, signal.SIGCONT)
        case "Redis restarted":
            rig.valkey.kill()
            await asyncio.to_thread(rig.valkey.start)
        case "Redis emptied":
            await asyncio.to_thread(rig.valkey.command, "FLUSHALL")
        case "clients vanished":
            await crowd(rig, VANISHING)
        case _:
            await _administer(rig, event, rng)
    await rig.until(rig.whole, WHOLE_S)


async def _administer(rig: Rig, event: str, rng: random.Random) -> None:
    url = rng.choice(rig.urls)
    async with httpx.AsyncClient(base_url=url, timeout=30, trust_env=False) as http:
        if event == "caches flushed":
            await http.post("/admin/flush")
        else:
            policy = rng.choice(("locality", "round_robin", "least_requests"))
            await http.post("/admin/policy", json={"policy": policy})


@fault("soak", "churn: faults one after the other under steady load", Needs(), seconds=SOAK_S)
async def soak(rig: Rig, seconds: float) -> Result:
    """Memory, descriptors, load and blocks are as before in the end."""
    rng, happened = random.Random(0), dict.fromkeys(EVENTS, 0)
    memory: list[float] = []

    async def strike() -> None:
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + (STOP_AT - STRIKE_AT) * seconds
        while loop.time() < ends_at:
            event = rng.choice(EVENTS)
            await happen(rig, event, rng)
            happened[event] += 1
            memory.append(max(memory_mib(gateway.pid) for gateway in rig.gateways))
            await asyncio.sleep(rng.uniform(*REST))

    result = await drive(rig, seconds, strike)
    result.notes.append(", ".join(f"{event} {count} ×" for event, count in happened.items()))
    if memory:
        result.notes.append(
            f"the larger gateway: {memory[0]:.0f} MiB after the first event, "
            f"{max(memory):.0f} at most, {memory[-1]:.0f} after the last"
        )
    return result
