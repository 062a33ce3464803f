"""Whatever happens to reports on their way, after quiet the index equals the truth.

The model of `tests/cluster/model_worker.py`, and a stream whose entries get lost, repeated, delayed
and mixed up. `tests/cluster/test_bus.py` tests the same over a real Valkey.
"""

from __future__ import annotations

import math

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cluster.agreement import LONGEST_PAUSE_S
from cluster.following import Following, Held, Need
from cluster.protocol import PROTOCOL_VERSION
from tests.cluster.model_worker import (
    BLOCKS,
    HEARTBEAT_S,
    LEASE_S,
    NAMES,
    SECRET,
    ModelWorker,
    Place,
    Sink,
    sign_off,
)


class Faults(RuleBasedStateMachine):
    """Workers publish, entries travel badly, a follower makes of it what it can."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.redis: dict[str, Place] = {}
        self.stream: list[bytes] = []
        self.workers: dict[str, ModelWorker] = {}
        self.epoch = 0
        self.requests = 0
        self.sink = Sink()
        self.following = Following(
            self.sink, secret=SECRET, lease_s=LEASE_S, heartbeat_s=HEARTBEAT_S
        )

    # Workers

    @initialize()
    def begin(self) -> None:
        for name in NAMES:
            self._start(name)
            self._publish(self.workers[name])

    # Workers

    @precondition(lambda self: self.workers)
    @rule(
        who=st.integers(0, len(NAMES) - 1),
        add=st.sets(st.sampled_from(BLOCKS), max_size=6),
        drop=st.sets(st.sampled_from(BLOCKS), max_size=6),
        running=st.integers(0, 5),
    )
    def change(self, who: int, add: set[bytes], drop: set[bytes], running: int) -> None:
        worker = self._live(who)
        worker.cached = (worker.cached - drop) | add
        worker.running = running
        self.requests += 1
        worker.received.append(f"r{self.requests}")
        self._publish(worker)

    @precondition(lambda self: self.workers)
    @rule(who=st.integers(0, len(NAMES) - 1), new=st.sampled_from(BLOCKS))
    def exchange(self, who: int, new: bytes) -> None:
        """Another set of the same size: its count does not give a lost report away."""
        worker = self._live(who)
        if worker.cached and new not in worker.cached:
            worker.cached = (worker.cached - {min(worker.cached)}) | {new}
            self._publish(worker)

    @precondition(lambda self: self.workers)
    @rule(who=st.integers(0, len(NAMES) - 1), unpublished=st.integers(0, 2))
    def miscount(self, who: int, unpublished: int) -> None:
        """It says that it caches more than it publishes, or ceases to."""
        self._live(who).unpublished = unpublished

    @rule(name=st.sampled_from(NAMES), missing=st.sampled_from(BLOCKS))
    def drift(self, name: str, missing: bytes) -> None:
        """The sink forgets a block for no reason."""
        self.sink.sets.get(name, set()).discard(missing)

    @rule(
        name=st.sampled_from(NAMES),
        what=st.sampled_from(["start", "start", "newer", "secret", "leave", "die"]),
    )
    def turn(self, name: str, what: str) -> None:
        """A life ends or begins under this name; without `leave` the old one ends silently."""
        if what == "start":
            self._start(name)
        elif what == "newer":
            self._start(name, version=PROTOCOL_VERSION + 1)
        elif what == "secret":
            self._start(name, secret=b"another")
        else:
            worker = self.workers.pop(name, None)
            place = self.redis.pop(name, None)  # signed off, or its lease has ended
            if what == "leave" and worker and place and place.epoch == worker.epoch:
                self.stream.append(sign_off(worker))

    # What happens to reports

    @precondition(lambda self: self.stream)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        self.stream.pop(data.draw(st.integers(0, len(self.stream) - 1)))

    @precondition(lambda self: self.stream)
    @rule(data=st.data())
    def repeat(self, data: st.DataObject) -> None:
        place = data.draw(st.integers(0, len(self.stream) - 1))
        self.stream.insert(data.draw(st.integers(place, len(self.stream))), self.stream[place])

    @precondition(lambda self: len(self.stream) > 1)
    @rule(data=st.data())
    def delay(self, data: st.DataObject) -> None:
        """An entry comes later than those that were sent after it."""
        place = data.draw(st.integers(0, len(self.stream) - 2))
        entry = self.stream.pop(place)
        self.stream.insert(data.draw(st.integers(place + 1, len(self.stream))), entry)

    @rule(what=st.sampled_from(["trim", "restart", "reconnect"]), garbage=st.binary(max_size=9))
    def disturb(self, what: str, garbage: bytes) -> None:
        """The stream was trimmed under a slow follower, Redis restarted empty, or it was away."""
        self.stream.clear()
        if what == "restart":
            self.redis.clear()
        elif what == "reconnect":
            self._catch_up()
        self.stream.append(garbage)

    # The follower

    @rule(count=st.integers(1, 8), meanwhile=st.booleans())
    def deliver(self, count: int, meanwhile: bool) -> None:
        for _ in range(min(count, len(self.stream))):
            self._take(self.stream.pop(0), meanwhile)

    @rule(wait_s=st.floats(0.1, 4.0))
    def wait(self, wait_s: float) -> None:
        self.now += wait_s
        self._look_after_silent()

    @invariant()
    def the_sink_and_the_follower_name_the_same_workers(self) -> None:
        assert all(self.following.knows(worker) for worker in self.sink.sets)
        assert not self.sink.sets.keys() & self.following.refused.keys()

    def teardown(self) -> None:
        """Quiet: what is on its way arrives, then every worker's heartbeats."""
        while self.stream:
            self._take(self.stream.pop(0), False)
        for worker in self.workers.values():
            worker.unpublished = 0
        rare = LEASE_S - HEARTBEAT_S  # until the longest pause is over, in fewer steps
        for step_s in [HEARTBEAT_S] * 12 + [rare] * math.ceil(LONGEST_PAUSE_S / rare):
            self.now += step_s
            for worker in self.workers.values():
                self._publish(worker)
            while self.stream:
                self._take(self.stream.pop(0), False)
            self._look_after_silent()
        usable = {name: worker for name, worker in self.workers.items() if worker.usable}
        assert self.following.disagreeing == {}
        assert self.sink.sets == {name: worker.cached for name, worker in usable.items()}
        assert self.sink.loads == {name: worker.load() for name, worker in usable.items()}
        assert self.sink.epochs == {name: worker.epoch for name, worker in usable.items()}
        refused = self.following.refused
        assert set(refused) == self.workers.keys() - usable.keys()
        for name, reason in refused.items():
            words = "protocol version" if self.workers[name].version > 1 else "STEMROUTE_SECRET"
            assert words in reason

    def _live(self, who: int) -> ModelWorker:
        return list(self.workers.values())[who % len(self.workers)]

    def _start(self, name: str, version: int = PROTOCOL_VERSION, secret: bytes = SECRET) -> None:
        self.epoch += 1
        self.workers[name] = ModelWorker(name, self.epoch, version, secret)

    def _publish(self, worker: ModelWorker) -> None:
        entry = worker.publish(self.redis)
        if entry is not None:
            self.stream.append(entry)

    def _take(self, entry: bytes, meanwhile: bool) -> None:
        need = self.following.take(entry, self.now)
        if meanwhile:  # the worker goes on between the entry and the reading of its set
            for worker in self.workers.values():
                worker.cached ^= {BLOCKS[0]}
                self._publish(worker)
        if need is not None:
            self.following.settle(need, self._held(need.worker), self.now)

    def _catch_up(self) -> None:
        self.following.renew_leases(self.now)
        for worker in list(self.redis):
            need = Need(worker, None, repair=self.following.knows(worker))
            self.following.settle(need, self._held(worker), self.now)

    def _held(self, worker: str) -> Held | None:
        place = self.redis.get(worker)
        if place is None:
            return None
        return Held(place.epoch, place.sequence, place.card, list(place.blocks))

    def _look_after_silent(self) -> None:
        for worker in self.following.silent(self.now):
            self.following.answer_silence(worker, has_lease=worker in self.redis, now=self.now)
        for worker in self.following.refused:
            if worker not in self.redis:
                self.following.forgive(worker)


Faults.TestCase.settings = settings(max_examples=300, stateful_step_count=40, deadline=None)
test_after_quiet_the_index_equals_the_truth = Faults.TestCase
