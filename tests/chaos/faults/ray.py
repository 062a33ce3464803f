"""Ray loses its head or a node; `stemroute up` loses its Valkey."""

from __future__ import annotations

import asyncio
import os
import signal

from tests.chaos.driving import WHOLE_S, Goal, Result, Struck, drive, fault
from tests.chaos.processes import child_of, kill_tree
from tests.chaos.rig import Needs, Rig
from tests.system.processes import descendants

HEAD_AWAY = 0.3
HEAD_LOST = 0.1
"""Of the load's duration that the head stays away."""
VALKEY_BACK_S = 2.0


@fault(
    "gcs-killed",
    "Ray's GCS killed, its state in Redis; the head comes back",
    Needs(nodes=2, workers=2, gcs_redis=True),
)
async def gcs_killed(rig: Rig, seconds: float) -> Result:
    """Serving goes on without the head; with it, a killed replica is replaced again."""

    async def strike() -> None:
        rig.ray.kill_gcs()
        await asyncio.sleep(HEAD_AWAY * seconds)
        await asyncio.to_thread(rig.ray.restart_head)

    result = await drive(rig, seconds, strike)
    await _replaces(rig, result)
    return result


@fault(
    "up-gcs-killed",
    "Ray's GCS killed under stemroute up, its state in Redis",
    Needs(up=True, workers=2, gateways=1, gcs_redis=True),
)
async def up_gcs_killed(rig: Rig, seconds: float) -> Result:
    """It is started again; afterwards a killed replica is replaced."""
    up = rig.gateways[0].process.pid

    async def strike() -> None:
        os.kill(child_of(up, "gcs_server"), signal.SIGKILL)

    result = await drive(rig, seconds, strike)
    await _replaces(rig, result)
    return result


@fault(
    "gcs-lost",
    "Ray's GCS killed, its state in memory; head and nodes started again one by one",
    Needs(nodes=3, workers=2, patient=True),
    seconds=90.0,
)
async def gcs_lost(rig: Rig, seconds: float) -> Result:
    """Workers of the former cluster serve until those of the new one do."""

    async def strike() -> Struck:
        former = frozenset(rig.ready())
        rig.ray.kill_gcs()
        await asyncio.sleep(HEAD_LOST * seconds)
        await asyncio.to_thread(rig.ray.restart_head)
        await asyncio.to_thread(rig.ray.restart_node, 0)
        await asyncio.to_thread(rig.ray.deploy)
        await asyncio.to_thread(rig.ray.restart_node, 1)
        return Struck(gone=former)

    return await drive(rig, seconds, strike)


@fault("node-killed", "a Ray node lost with all that runs on it", Needs(nodes=3, workers=2))
async def node_killed(rig: Rig, seconds: float) -> Result:
    """Its workers start again on the other node."""

    async def strike() -> Struck:
        worker = await asyncio.to_thread(rig.busiest)
        node = rig.ray.node_of(worker.pid)
        names = [name for name in rig.ready() if rig.worker(name).pid in descendants(node.pid)]
        kill_tree(node.pid)
        return Struck(gone=frozenset(names))

    return await drive(rig, seconds, strike)


async def _replaces(rig: Rig, result: Result) -> None:
    """With the head back, Ray replaces a worker that is killed."""
    if rig.ready():
        worker = await asyncio.to_thread(rig.busiest)
        os.kill(worker.pid, signal.SIGKILL)
        back = await rig.until(lambda: rig.whole(frozenset({worker.name})), WHOLE_S)
        result.expect(back is not None, "with the head back, a killed replica is not replaced")


@fault(
    "up-valkey-killed",
    "Valkey killed under stemroute up",
    Needs(up=True, workers=2, gateways=1),
    Goal(recovery_s=VALKEY_BACK_S),
)
async def up_valkey_killed(rig: Rig, seconds: float) -> Result:
    """It is started again, and the index follows it."""
    back_s: float | None = None

    def follows(before: int) -> bool:
        bus = rig.view("/admin/fleet").get("bus", {})
        return bool(bus.get("connected")) and not bus["stale"] and bus["reports"] > before

    async def strike() -> None:
        nonlocal back_s
        os.kill(child_of(rig.gateways[0].process.pid, "valkey-server"), signal.SIGKILL)
        killed_at = asyncio.get_running_loop().time()
        await rig.until(lambda: not follows(0), VALKEY_BACK_S)
        reports = int(rig.view("/admin/fleet")["bus"]["reports"])
        back_at = await rig.until(lambda: follows(reports), max(VALKEY_BACK_S, seconds / 2))
        back_s = None if back_at is None else back_at - killed_at

    result = await drive(rig, seconds, strike)
    if back_s is None:
        result.misses.append("no Valkey was followed again")
    else:
        result.notes.append(f"a Valkey was followed again after {back_s:.1f} s")
        result.expect(back_s <= VALKEY_BACK_S, f"Valkey was back after {back_s:.1f} s")
    return result
