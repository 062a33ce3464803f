"""One fault under load: send, strike, wait until the pool is whole and quiet, compare."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.chaos.load import Ask, Client, replay
from tests.chaos.parts import GatewayProcess
from tests.chaos.processes import memory_mib, open_descriptors
from tests.chaos.rig import Needs, Quiet, Rig
from tests.chaos.verdict import SILENCE_S, Tally, judge

STRIKE_AT = 0.25
"""Of the load's duration."""
PATIENCE_S = 20.0
"""Requests that have not ended so long after the last was sent are cut off."""
WHOLE_S = 120.0
"""For the pool to have all its workers again."""
GROWTH_MIB = 24.0
"""That a gateway's memory may grow over a fault: caches fill."""
DESCRIPTORS = 64
"""That a gateway may keep open more than before: pooled connections to workers."""


@dataclass(frozen=True)
class Goal:
    """What a fault may cost. Failed, broken, wrong and hung requests are never among it.

    recovery_s   from the fault's end until all is well; None: whenever
    whole        the pool has all its workers in the end
    """

    recovery_s: float | None = None
    whole: bool = True


@dataclass(frozen=True)
class Struck:
    """The fault has happened. `gone` are workers that do not come back under their names."""

    gone: frozenset[str] = frozenset()


@dataclass
class Result:
    """What one fault did.

    recovery_s      None where the pool was not whole again
    memory_mib      of the gateway that grew most: before, after
    descriptors     of the same
    notes           further figures, in words
    misses          goals that were not reached, in words
    """

    tally: Tally = field(default_factory=Tally)
    continued: float = 0.0
    recovery_s: float | None = 0.0
    quiet: Quiet = field(default_factory=lambda: Quiet(0, 0))
    memory_mib: tuple[float, float] = (0.0, 0.0)
    descriptors: tuple[int, int] = (0, 0)
    notes: list[str] = field(default_factory=list)
    misses: list[str] = field(default_factory=list)

    def expect(self, holds: bool, miss: str) -> None:
        """Note a goal that is missed unless it `holds`."""
        if not holds:
            self.misses.append(miss)

    def compare(self, goal: Goal) -> None:
        """Add what is missed of `goal`."""
        for name in ("failed", "broken", "wrong", "hung"):
            count = getattr(self.tally, name)
            self.expect(not count, f"{count} {name}")
        self.expect(not self.quiet.load, f"load {self.quiet.load} at quiet")
        self.expect(not self.quiet.blocks, f"{self.quiet.blocks} blocks held at quiet")
        before, after = self.memory_mib
        self.expect(after - before <= GROWTH_MIB, f"the gateway grew by {after - before:.0f} MiB")
        before_fd, after_fd = self.descriptors
        more = after_fd - before_fd
        self.expect(more <= DESCRIPTORS, f"{more} descriptors more than before")
        if self.recovery_s is None:
            self.expect(not goal.whole, f"not all workers were back after {WHOLE_S:g} s")
        elif goal.recovery_s is not None:
            self.expect(
                self.recovery_s <= goal.recovery_s,
                f"recovered after {self.recovery_s:.1f} s instead of {goal.recovery_s:g}",
            )


Run = Callable[[Rig, float], Coroutine[Any, Any, Result]]


@dataclass(frozen=True)
class Fault:
    """One way to break a rig. `run` takes the rig and for how many seconds load is sent."""

    name: str
    what: str
    needs: Needs
    goal: Goal
    run: Run
    seconds: float = 45.0


FAULTS: dict[str, Fault] = {}
"""By name, in the order in which they run."""


def fault(
    name: str,
    what: str,
    needs: Needs | None = None,
    goal: Goal | None = None,
    seconds: float = 45.0,
) -> Callable[[Run], Run]:
    """Register a function as a fault."""

    def register(run: Run) -> Run:
        FAULTS[name] = Fault(name, what, needs or Needs(), goal or Goal(), run, seconds)
        return run

    return register


class Gauges:
    """Memory and descriptors of the gateways, and what they continued, before and after."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self._before = {gateway.pid: _sizes(gateway) for gateway in rig.gateways}
        self._continued = rig.continued()

    def fill(self, result: Result) -> None:
        """Put both into the result."""
        pairs = [
            (self._before[gateway.pid], _sizes(gateway))
            for gateway in self._rig.gateways
            if gateway.alive and gateway.pid in self._before
        ]
        result.continued = max(0.0, self._rig.continued() - self._continued)
        if pairs:
            before, after = max(pairs, key=lambda pair: pair[1][0] - pair[0][0])
            result.memory_mib = (before[0], after[0])
            result.descriptors = (before[1], after[1])


def _sizes(gateway: GatewayProcess) -> tuple[float, int]:
    return memory_mib(gateway.pid), open_descriptors(gateway.pid)


async def drive(
    rig: Rig,
    seconds: float,
    strike: Callable[[], Awaitable[Struck | None]],
    *,
    rate: float | None = None,
    chosen: Sequence[Ask] = (),
    allowed_silence_s: float = SILENCE_S,
    after: Callable[[], Awaitable[None]] | None = None,
) -> Result:
    """Send load for `seconds`, strike meanwhile, and see what came of both.

    strike   returns when the fault is over, or has begun where it stays
    rate     requests per second; None is what the rig carries easily
    chosen   requests to send; the rig's own by default
    after    called when the load has ended, before answers are judged
    """
    chosen = chosen or rig.asks
    await rig.know(chosen)
    gauges = await asyncio.to_thread(Gauges, rig)
    loop = asyncio.get_running_loop()
    result = Result()
    async with Client(rig.urls) as client:
        load = asyncio.create_task(
            replay(
                client,
                chosen,
                rate=rate or rig.rate,
                seconds=seconds,
                patience_s=PATIENCE_S,
                fresh=rig.fresh,
            )
        )
        try:
            await asyncio.sleep(STRIKE_AT * seconds)
            struck = await strike() or Struck()
            struck_at = loop.time()
            whole_at = await rig.until(lambda: rig.whole(struck.gone), WHOLE_S)
            outcomes = await load
        finally:
            load.cancel()
    if after is not None:
        await after()
    result.tally = judge(outcomes, rig.references, allowed_silence_s=allowed_silence_s)
    result.recovery_s = _recovery_s(struck_at, whole_at, result.tally.bad_at)
    await settle(rig, result, gauges)
    return result


def _recovery_s(struck_at: float, whole_at: float | None, bad_at: float | None) -> float | None:
    if whole_at is None:
        return None
    return max(0.0, whole_at - struck_at, (bad_at or 0.0) - struck_at)


async def settle(rig: Rig, result: Result, gauges: Gauges) -> None:
    """Wait until the pool is quiet, then note what is left."""
    result.quiet = await rig.quiet()
    await asyncio.to_thread(gauges.fill, result)
