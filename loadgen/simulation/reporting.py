"""What a simulated worker publishes: the newest load and the net change, not too often."""

from __future__ import annotations

import msgspec

from cluster.announced import AnnouncedSet
from cluster.protocol import Load, Report, WorkerCard
from loadgen.simulation.events import Clock
from router.fleet import Fleet
from worker.messages import Changes


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """How reports travel; seconds.

    gap_s    a worker reports at most so often (`bus.min_report_gap_s`)
    load_s   a report's load, and which requests it names, reach the router so much later
    index_s  and its changes of the cache so much later
    """

    gap_s: float = 0.02
    load_s: float = 0.0
    index_s: float = 0.0


class Reporter:
    """One worker's reports, as `cluster.bus.Publisher` makes them and a follower applies them."""

    def __init__(self, clock: Clock, fleet: Fleet, slot: int, card: WorkerCard, pace: Pace) -> None:
        self._clock = clock
        self._fleet = fleet
        self._slot = slot
        self._card = card
        self._pace = pace
        self._sequence = 0
        self._next_s = 0.0
        self._waiting = False
        self._blocks = AnnouncedSet()
        self._received: list[str] = []
        self._load = Load(free_blocks=card.capacity_blocks)

    def begin(self, load: Load) -> None:
        """What the worker has said before the first request comes: there without delay."""
        self._load = load
        self._fleet.on_report(self._report())

    def update(self, load: Load, changes: Changes) -> None:
        """What happened in a step; nothing is published where nothing changed."""
        if load == self._load and not (changes.stored or changes.evicted or changes.received):
            return
        self._blocks.update(changes.stored, changes.evicted)
        self._received += changes.received
        self._load = load
        if not self._waiting:
            self._waiting = True
            self._clock.at(self._next_s, self._publish)

    def _publish(self) -> None:
        self._waiting = False
        now, pace = self._clock.now, self._pace
        self._next_s = now + pace.gap_s
        received, self._received = self._received, []
        report = self._report(received)
        if self._blocks.changed:
            stored, evicted = self._blocks.take()
            if pace.index_s == pace.load_s:
                report = msgspec.structs.replace(report, stored=stored, evicted=evicted)
            else:
                self._clock.at(now + pace.index_s, self._change_index, stored, evicted)
        self._clock.at(now + pace.load_s, self._fleet.on_report, report)

    def _report(self, received: list[str] | None = None) -> Report:
        self._sequence += 1
        return Report(
            worker=self._card.worker,
            epoch=self._card.epoch,
            sequence=self._sequence,
            load=self._load,
            received=received or [],
        )

    def _change_index(self, stored: bytes, evicted: bytes) -> None:
        """The changes alone: the load stays what the router knows at this moment."""
        report = msgspec.structs.replace(
            self._report(), load=self._fleet.at(self._slot).load, stored=stored, evicted=evicted
        )
        self._fleet.on_report(report)
