"""A gateway is asked to end while it streams; another one takes over new requests."""

from __future__ import annotations

import signal

from cluster.settings import GatewaySettings
from tests.chaos.driving import Goal, Result, drive, fault
from tests.chaos.load import Client, asks, gather
from tests.chaos.rig import LOADS, MODEL, STEP_S, Needs, Rig
from tests.chaos.verdict import judge

STREAMS = 48
DISTINCT = 12
LONG = 4
"""Streams are so many times longer than usual: longer than any short grace period."""
DRAIN_S = GatewaySettings().shutdown_s


@fault(
    "gateway-terminated",
    f"SIGTERM of a gateway with {STREAMS} streams",
    Needs(serve=False, batch=32),
    Goal(whole=False),
)
async def gateway_terminated(rig: Rig, seconds: float) -> Result:
    """All of its streams end as they would have; the gateway then ends with exit code 0."""
    least, most = LOADS[rig.engine].tokens
    long = asks(MODEL, DISTINCT, (LONG * most - least, LONG * most), first=1000, stream=True)
    await rig.know([*long, *rig.asks])
    ending = rig.gateways[0]
    async with Client(rig.urls) as client:
        streams = [client.begin(long[number % DISTINCT], gateway=0) for number in range(STREAMS)]

        async def strike() -> None:
            ending.process.send_signal(signal.SIGTERM)

        result = await drive(rig, seconds, strike)
        outcomes = await gather(streams, LONG * most * STEP_S + DRAIN_S)
    tally = judge(outcomes, rig.references)
    for name in ("sent", "accepted", "failed", "broken", "wrong", "hung"):
        setattr(result.tally, name, getattr(result.tally, name) + getattr(tally, name))
    result.tally.silence_s = max(result.tally.silence_s, tally.silence_s)
    result.tally.slowest_s = max(result.tally.slowest_s, tally.slowest_s)
    result.tally.reasons.update(tally.reasons)
    complete = sum(outcome.finished for outcome in outcomes)
    result.notes.append(f"{complete} of the {STREAMS} streams are complete")
    gone = await rig.until(lambda: not ending.alive, DRAIN_S)
    result.expect(gone is not None, "the gateway still runs after all its streams have ended")
    code = ending.process.returncode
    result.expect(not code, f"the gateway ended with exit code {code}")
    return result
