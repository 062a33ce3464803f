"""Workers whose leases have lapsed: some are asked directly before they count as gone.

A lease lapses when a worker is gone, and also when Redis takes no writes. While Redis is well and
other workers of its model report, a worker without a lease is gone: what it caches would no longer
be known. Else dropping it could be an outage without need: it is asked, and stays if it answers.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

import msgspec

from cluster.following import Following, Held, Need
from cluster.protocol import WorkerCard


class Health(NamedTuple):
    """What a worker says of itself.

    answers   a worker of that name answers at its address
    ready     it takes requests
    reason    why it does not answer or is not ready, in words
    """

    answers: bool
    ready: bool
    reason: str


class Probe(Protocol):
    """Asks one worker for its health. Never raises, and takes a few seconds at most."""

    async def __call__(self, card: WorkerCard) -> Health: ...


class Liveness:
    """Decides on workers without a lease.

    probe   None: none is asked, all are gone
    """

    def __init__(
        self,
        following: Following,
        probe: Probe | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._following = following
        self._probe = probe
        self._clock = clock
        self._asking: dict[str, asyncio.Task[None]] = {}

    def asking(self, worker: str) -> bool:
        """Whether the worker is being asked right now."""
        return worker in self._asking

    def decide(self, lapsed: list[str], *, bus_fails: bool) -> list[str]:
        """Forget the workers that are gone and return them; the others are asked.

        lapsed      all workers whose lease has lapsed
        bus_fails   Redis takes no writes, or no worker reports
        """
        gone = []
        without_lease = {*lapsed, *self._asking}
        for worker in lapsed:
            card = self._following.card(worker)
            if self._probe is None or not (
                bus_fails or not self._following.reports_of(card.model, but=without_lease)
            ):
                self._following.answer_silence(worker, has_lease=False, now=self._clock())
                gone.append(worker)
            elif worker not in self._asking:
                asking = asyncio.create_task(self._ask(self._probe, card), name=f"ask {worker}")
                self._asking[worker] = asking
        return gone

    def recall(self, raw: bytes) -> None:
        """The card (JSON) of an unknown worker without a lease: it is known if it answers."""
        try:
            card = msgspec.json.decode(raw, type=WorkerCard)
        except msgspec.DecodeError:
            return  # of another version; it is refused when it reports
        if self._probe is not None and card.worker not in self._asking:
            asking = asyncio.create_task(self._ask(self._probe, card, raw), name="recall")
            self._asking[card.worker] = asking

    async def close(self) -> None:
        """Ask no more."""
        asking = list(self._asking.values())
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)

    async def _ask(self, probe: Probe, card: WorkerCard, unknown: bytes = b"") -> None:
        asked_at = self._clock()
        try:
            health = await probe(card)
        finally:
            del self._asking[card.worker]
        if health.answers:
            if unknown and not self._following.knows(card.worker):
                need, held = Need(card.worker, None, repair=False), Held(card.epoch, 0, unknown, [])
                self._following.settle(need, held, self._clock())
            self._following.keep(card, ready=health.ready, now=self._clock())
        else:
            self._following.drop_unanswering(card, health.reason, since=asked_at)
