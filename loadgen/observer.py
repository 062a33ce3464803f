"""Looks at the gateway while requests are replayed: load of the workers, reasons for decisions.

It asks the gateway beside the requests, equally in every arm, and never holds a request up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from loadgen.admin import Admin, AdminError, Explanation, FleetView
from loadgen.requests import Request

EXPLAIN_AHEAD_S = 0.02
"""A decision is asked for so long before its request is due, so that the request is not yet
booked in what the answer shows."""


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

    explanations   by request id
    problem        why there are no more explanations, "" where nothing went wrong
    """

    samples: list[LoadSample] = msgspec.field(default_factory=list)
    explanations: dict[str, Explanation] = msgspec.field(default_factory=dict)
    problem: str = ""


def to_explain(requests: Sequence[Request], rate: float) -> list[Request]:
    """At most `rate` of them a second: each that is due long enough after the one before."""
    chosen: list[Request] = []
    if rate <= 0:
        return chosen
    free_s = 0.0
    for request in requests:
        if request.intended_at_s >= free_s:
            chosen.append(request)
            free_s = request.intended_at_s + 1 / rate
    return chosen


async def observe(
    admin: Admin,
    requests: Sequence[Request],
    begin: float,
    interval_s: float,
    explain_rate: float,
    seen: Observations,
) -> None:
    """Sample the fleet every `interval_s` and explain up to `explain_rate` decisions a second.

    Fills `seen` until cancelled. `begin` is the replay's begin on the loop's clock. An interval
    or rate of 0 leaves that part out.
    """
    async with asyncio.TaskGroup() as tasks:
        if interval_s > 0:
            tasks.create_task(_sample(admin, begin, interval_s, seen))
        tasks.create_task(_explain(admin, to_explain(requests, explain_rate), begin, seen))


async def _sample(admin: Admin, begin: float, interval_s: float, seen: Observations) -> None:
    loop = asyncio.get_running_loop()
    due = begin
    while True:
        await asyncio.sleep(max(0.0, due - loop.time()))
        try:
            fleet = await admin.fleet()
        except AdminError as error:
            # The run itself finds out whether the gateway is gone.
            seen.problem = str(error)
            return
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


async def _explain(
    admin: Admin, requests: Sequence[Request], begin: float, seen: Observations
) -> None:
    loop = asyncio.get_running_loop()
    for request in requests:
        due = begin + request.intended_at_s - EXPLAIN_AHEAD_S
        await asyncio.sleep(max(0.0, due - loop.time()))
        try:
            seen.explanations[request.id] = await admin.explain(bytes(request.body))
        except AdminError as error:
            seen.problem = str(error)
            return
