"""Redis is away, empty, full, read-only or asks for another password; the workers are well."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable

from tests.chaos.driving import Goal, Result, drive, fault
from tests.chaos.rig import Needs, Rig

HOLD = 0.4
"""Of the load's duration that the fault stays."""
BACK_S = 5.0
NEEDS = Needs(serve=False)
GOAL = Goal(recovery_s=BACK_S)
PASSWORD = "another one"


async def _hold(
    rig: Rig, seconds: float, begin: Callable[[], object], end: Callable[[], object], said: str
) -> Result:
    """Begin a fault, hold it, end it.

    `said` is what `/ready` has to say within `BACK_S`, where the fault is held so long.
    """
    told_s: float | None = None

    def told() -> bool:
        view = rig.view("/ready")
        return not view.get("ready") or bool(view["index"]["stale"])

    async def strike() -> None:
        nonlocal told_s
        loop = asyncio.get_running_loop()
        await asyncio.to_thread(begin)
        began = loop.time()
        if said:
            told_at = await rig.until(told, HOLD * seconds)
            told_s = None if told_at is None else told_at - began
        await asyncio.sleep(max(0.0, began + HOLD * seconds - loop.time()))
        await asyncio.to_thread(end)

    result = await drive(rig, seconds, strike)
    waited_s = HOLD * seconds if told_s is None else told_s
    if said and waited_s > BACK_S:
        result.misses.append(f"/ready did not say within {BACK_S:g} s that {said}")
    if told_s is not None:
        result.notes.append(f"/ready said after {told_s:.1f} s that {said}")
    reports = int(rig.view("/admin/fleet")["bus"]["reports"])
    flowing = await rig.until(
        lambda: int(rig.view("/admin/fleet")["bus"]["reports"]) > reports and not told(), BACK_S
    )
    result.expect(flowing is not None, f"no reports {BACK_S:g} s after Redis was well again")
    return result


@fault("redis-full", "Redis out of memory, with noeviction", NEEDS, GOAL)
async def redis_full(rig: Rig, seconds: float) -> Result:
    """It answers and accepts no writes."""
    return await _hold(
        rig,
        seconds,
        lambda: rig.valkey.command("CONFIG", "SET", "maxmemory", "1"),
        lambda: rig.valkey.command("CONFIG", "SET", "maxmemory", "0"),
        "reports do not arrive",
    )


@fault("redis-readonly", "Redis READONLY: the master was demoted", NEEDS, GOAL)
async def redis_readonly(rig: Rig, seconds: float) -> Result:
    """Connections stay, writes fail until it is master again."""
    return await _hold(
        rig,
        seconds,
        lambda: rig.valkey.command("REPLICAOF", "127.0.0.1", "1"),
        lambda: rig.valkey.command("REPLICAOF", "NO", "ONE"),
        "reports do not arrive",
    )


@fault("redis-paused", "Redis stopped (SIGSTOP) for a while", NEEDS, GOAL)
async def redis_paused(rig: Rig, seconds: float) -> Result:
    """Connections stay open and nothing is answered."""
    return await _hold(
        rig,
        seconds,
        lambda: rig.valkey.signal(signal.SIGSTOP),
        lambda: rig.valkey.signal(signal.SIGCONT),
        "the index is stale",
    )


@fault("redis-emptied", "Redis emptied (FLUSHALL)", NEEDS, GOAL)
async def redis_emptied(rig: Rig, seconds: float) -> Result:
    """Workers publish everything again."""
    return await _hold(rig, seconds, lambda: rig.valkey.command("FLUSHALL"), lambda: None, "")


@fault("redis-restarted", "Redis killed, and started again empty", NEEDS, GOAL)
async def redis_restarted(rig: Rig, seconds: float) -> Result:
    """It is away for a while, at the same address afterwards."""
    return await _hold(rig, seconds, rig.valkey.kill, rig.valkey.start, "the index is stale")


@fault("redis-password", "Redis' password changed, and changed back", NEEDS, GOAL)
async def redis_password(rig: Rig, seconds: float) -> Result:
    """All connections are closed, and new ones are refused meanwhile."""

    def change() -> None:
        rig.valkey.command("CONFIG", "SET", "requirepass", PASSWORD)
        rig.valkey.command("CLIENT", "KILL", "TYPE", "normal", password=PASSWORD)
        rig.valkey.command("CLIENT", "KILL", "TYPE", "pubsub", password=PASSWORD)

    def change_back() -> None:
        rig.valkey.command("CONFIG", "SET", "requirepass", "", password=PASSWORD)

    return await _hold(rig, seconds, change, change_back, "the index is stale")
