"""Workers that give no sign of life: they are asked, then suspected, and their requests fail.

A process that is stopped keeps its connections open and says nothing. Signs of life are reports,
bytes of responses and answers to `GET /health`, so a worker whose reports do not arrive because
Redis is away, or that computes a long prompt, is not stalled as long as its server answers.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from cluster.liveness import Probe
from cluster.protocol import WorkerCard
from router.fleet import Fleet
from router.worker_connections import WorkerConnections, WorkerStalled

log = logging.getLogger(__name__)

ASK_AFTER, ANSWER_WITHIN = 0.6, 0.3
"""A worker is asked after this share of the timeout, and has this share of it to answer."""

LOOKS = 12
"""Looks at the signs of life within the timeout."""


class StallWatch:
    """Watches the workers of a fleet that serve or drain.

    probe               asks one worker; it answers within `ANSWER_WITHIN * timeout_s`
    timeout_s           longest time without a sign of life
    inter_token_s       longest time without a byte within a response
    """

    def __init__(
        self,
        fleet: Fleet,
        workers: WorkerConnections,
        probe: Probe,
        timeout_s: float,
        inter_token_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fleet = fleet
        self._workers = workers
        self._probe = probe
        self._timeout_s = timeout_s
        self._inter_token_s = inter_token_s
        self._clock = clock
        self._answered: dict[str, float] = {}  # worker -> when it answered
        self._asking: dict[str, asyncio.Task[None]] = {}
        self._looked_at = self._awake_at = clock()

    async def run(self) -> None:
        """Watch until cancelled."""
        try:
            while True:
                await asyncio.sleep(self._timeout_s / LOOKS)
                self.look()
        finally:
            asking = list(self._asking.values())
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)

    def look(self) -> None:
        """Ask workers without a recent sign of life; fail responses that stand still."""
        now = self._clock()
        if now - self._looked_at > self._timeout_s / 2:
            self._awake_at = now  # this process did not run, and has heard nobody
        self._looked_at = now
        self._workers.fail_quiet(self._inter_token_s)
        members = self._fleet.members()
        if len(self._answered) > len(members):
            present = {member.card.worker for member in members}
            self._answered = {w: at for w, at in self._answered.items() if w in present}
        for member in members:
            card = member.card
            if member.state not in ("ready", "draining") or card.worker in self._asking:
                continue
            signs = (
                member.heard_at,
                self._workers.heard_at(card.address),
                self._answered.get(card.worker, 0.0),
                self._awake_at,
            )
            if now - max(signs) >= ASK_AFTER * self._timeout_s:
                self._asking[card.worker] = asyncio.create_task(self._ask(card, max(signs)))

    async def _ask(self, card: WorkerCard, heard_at: float) -> None:
        worker = card.worker
        try:
            health = await self._probe(card)
        finally:
            del self._asking[worker]
        now = self._clock()
        if health.answers:
            self._answered[worker] = now
            if health.ready:
                self._fleet.trust.alive(worker)
            else:
                self._fleet.trust.suspect(worker, health.reason or "it says that it is not ready")
        elif self._workers.heard_at(card.address) <= heard_at:
            reason = f"no sign of life for {now - heard_at:.1f} s"
            if self._fleet.trust.suspect(worker, reason):
                log.warning("worker %s: %s; %s", worker, reason, health.reason)
            self._workers.fail(card.address, WorkerStalled(reason))
