"""What a simulated worker publishes: the newest load and the net change, not too often."""

from __future__ import annotations

import msgspec

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
        self._delta: dict[bytes, bool] = {}
        self._received: list[str] = []
        self._load = Load(free_blocks=card.capacity_blocks)

    def begin(self, load: Load) -> None:
        """What the worker has said before the first request comes: there without delay."""
        self._load = load
        self._fleet.on_report(self._report([]))

    def update(self, load: Load, changes: Changes) -> None:
        """What happened in a step; nothing is published where nothing changed."""
        if load == self._load and not (changes.stored or changes.evicted or changes.received):
            return
        delta = self._delta
        for blocks, stored in ((changes.evicted, False), (changes.stored, True)):
            for block in blocks:
                if delta.get(block) is (not stored):
                    del delta[block]
                else:
                    delta[block] = stored
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
        if self._delta:
            delta, self._delta = self._delta, {}
            evicted = [block for block, stored in delta.items() if not stored]
            stored = [block for block, is_stored in delta.items() if is_stored]
            self._clock.at(now + pace.index_s, self._change_index, evicted, stored)
        self._clock.at(now + pace.load_s, self._fleet.on_report, self._report(received))

    def _report(self, received: list[str]) -> Report:
        self._sequence += 1
        return Report(
            worker=self._card.worker,
            epoch=self._card.epoch,
            sequence=self._sequence,
            load=self._load,
            received=received,
        )

    def _change_index(self, evicted: list[bytes], stored: list[bytes]) -> None:
        self._fleet.index.evict(self._slot, evicted)
        self._fleet.index.store(self._slot, stored)
