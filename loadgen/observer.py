"""Observes the gateway during a replay: samples the workers' load and fetches the routing
decisions of the slowest requests so far.

It does the same in every arm and never delays a request.
"""

from __future__ import annotations

import asyncio

import msgspec

from loadgen.admin import Admin, AdminError, Explanation, FleetView
from loadgen.slowest import Slowest

ASK_EVERY_S = 0.5
"""So often the gateway is asked for decisions. It keeps 4,096 of ended requests, so that one is
missed only beyond some 8,000 requests a second."""


class LoadSample(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's load at one moment, as the gateway believed it."""

    at_s: float
    worker: str
    pending_prefill_tokens: int
    running: int
    waiting: int
    cached_tokens: int


class Observations(msgspec.Struct):
    """What was seen during one arm.

    explanations   decisions on the slowest requests, by the request's id in the file
    unknown        why a decision that was asked for is not known, likewise
    otherwise      why one is not known that was not asked for
    """

    samples: list[LoadSample] = msgspec.field(default_factory=list)
    explanations: dict[str, Explanation] = msgspec.field(default_factory=dict)
    unknown: dict[str, str] = msgspec.field(default_factory=dict)
    otherwise: str = "no response named its decision"


async def observe(
    admin: Admin,
    slowest: Slowest | None,
    begin: float,
    interval_s: float,
    seen: Observations,
) -> None:
    """Sample the fleet every `interval_s`, and fetch the decisions of the `slowest` so far.

    Fills `seen` until cancelled. `begin` is the replay's begin on the loop's clock. An interval
    of 0 or None leaves that part out.
    """
    async with asyncio.TaskGroup() as tasks:
        if interval_s > 0:
            tasks.create_task(_sample(admin, begin, interval_s, seen))
        if slowest is not None:
            tasks.create_task(_ask_often(admin, slowest, seen))


async def _sample(admin: Admin, begin: float, interval_s: float, seen: Observations) -> None:
    loop = asyncio.get_running_loop()
    due = begin
    while True:
        await asyncio.sleep(max(0.0, due - loop.time()))
        try:
            fleet = await admin.fleet()
        except AdminError:
            return  # the run itself finds out whether the gateway is gone
        seen.samples += samples_of(fleet, loop.time() - begin)
        due = max(due + interval_s, loop.time())


def samples_of(fleet: FleetView, at_s: float) -> list[LoadSample]:
    """A sample of each worker."""
    return [
        LoadSample(
            at_s=round(at_s, 3),
            worker=worker.worker,
            pending_prefill_tokens=worker.pending_prefill_tokens,
            running=worker.running,
            waiting=worker.waiting,
            cached_tokens=worker.cached_blocks * worker.block_size,
        )
        for worker in fleet.workers
    ]


async def _ask_often(admin: Admin, slowest: Slowest, seen: Observations) -> None:
    while True:
        await asyncio.sleep(ASK_EVERY_S)
        await ask_decisions(admin, slowest, seen)


async def ask_decisions(admin: Admin, slowest: Slowest, seen: Observations) -> None:
    """Ask for the decisions on the slowest requests that are not known yet."""
    for outcome in slowest:
        if outcome.request_id and outcome.id not in seen.explanations:
            try:
                seen.explanations[outcome.id] = await admin.decision(outcome.request_id)
            except AdminError as error:
                seen.unknown[outcome.id] = str(error)
            else:
                seen.unknown.pop(outcome.id, None)
