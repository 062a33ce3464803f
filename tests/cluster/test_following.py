"""Whatever happens to reports on their way, after quiet the index equals the truth.

The model stands for Redis and for the workers' side of the protocol (`cluster/bus.py`): a set, a
place and a lease for each worker, and a stream whose entries get lost, repeated, delayed and
mixed up. `tests/cluster/test_bus.py` tests the same over a real Valkey.
"""

from __future__ import annotations

import hashlib
import math

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cluster.agreement import LONGEST_PAUSE_S
from cluster.blocks import Namespace, join_hashes, split_hashes
from cluster.following import Following, Held, Need, card_problem
from cluster.protocol import PROTOCOL_VERSION, Load, Report, WorkerCard

SECRET = b"s"
LEASE_S = 3.0
HEARTBEAT_S = 0.5
NAMESPACE = Namespace(
    weights="w", tokenizer="t", kv_dtype="float32", block_size=16, positions="rope"
)
NAMES = ("a", "b")
BLOCKS = [hashlib.sha256(bytes([i])).digest()[:16] for i in range(40)]


class Sink:
    """The truth as a router would keep it, and a complaint where calls make no sense."""

    def __init__(self) -> None:
        self.epochs: dict[str, int] = {}
        self.sets: dict[str, set[bytes]] = {}
        self.loads: dict[str, Load] = {}
        self.named: set[str] = set()

    def on_card(self, card: WorkerCard) -> None:
        assert card.epoch >= self.epochs.get(card.worker, 0)
        self.epochs[card.worker] = card.epoch
        self.sets.setdefault(card.worker, set())

    def on_snapshot(self, worker: str, epoch: int, hashes: list[bytes]) -> None:
        assert self.epochs[worker] == epoch
        self.sets[worker] = set(hashes)

    def on_report(self, report: Report) -> bool:
        assert report.epoch == self.epochs[report.worker]
        mine = self.sets[report.worker]
        mine.difference_update(split_hashes(report.evicted))
        mine.update(split_hashes(report.stored))
        self.loads[report.worker] = report.load
        self.named.update(report.received)
        return len(mine) == report.load.cached_blocks

    def on_gone(self, worker: str, reason: str) -> None:
        assert reason
        del self.epochs[worker], self.sets[worker]
        self.loads.pop(worker, None)


class Place:
    """What the model's Redis holds of a worker."""

    def __init__(self, epoch: int, sequence: int, card: bytes, blocks: set[bytes]) -> None:
        self.epoch, self.sequence, self.card, self.blocks = epoch, sequence, card, blocks


class ModelWorker:
    """A worker's publisher: the change since its last report, or its whole set."""

    def __init__(self, name: str, epoch: int, version: int, secret: bytes) -> None:
        self.name, self.epoch = name, epoch
        self.version, self.secret = version, secret
        self.sequence = 0
        self.cached: set[bytes] = set()
        self.published: set[bytes] = set()
        self.received: list[str] = []
        self.running = 0
        self.unpublished = 0  # blocks that it says it caches, but never tells of

    @property
    def usable(self) -> bool:
        return self.version == PROTOCOL_VERSION and self.secret == SECRET

    def card(self) -> bytes:
        card = WorkerCard(
            worker=self.name,
            epoch=self.epoch,
            address="http://127.0.0.1:1",
            model="m",
            namespace=NAMESPACE,
            namespace_check=NAMESPACE.check(self.secret),
            capacity_blocks=100,
            context_tokens=1000,
            max_batch_size=8,
            token_budget=64,
            device="cpu",
            state="ready",
            version=self.version,
        )
        return msgspec.json.encode(card)

    def load(self) -> Load:
        return Load(running=self.running, cached_blocks=len(self.cached) + self.unpublished)

    def publish(self, redis: dict[str, Place]) -> bytes | None:
        """One PUBLISH: returns the stream's entry; None where a later epoch lives here."""
        place = redis.get(self.name)
        if place is not None and place.epoch > self.epoch:
            return None
        whole = (
            place is None
            or (place.epoch, place.sequence) != (self.epoch, self.sequence)
            or place.blocks != self.published
        )
        self.sequence += 1
        report = Report(
            worker=self.name,
            epoch=self.epoch,
            sequence=self.sequence,
            load=self.load(),
            stored=b"" if whole else join_hashes(sorted(self.cached - self.published)),
            evicted=b"" if whole else join_hashes(sorted(self.published - self.cached)),
            received=self.received,
            resync=whole,
            version=self.version,
        )
        self.received = []
        self.published = set(self.cached)
        redis[self.name] = Place(self.epoch, self.sequence, self.card(), set(self.cached))
        return msgspec.msgpack.encode(report)


def sign_off(worker: ModelWorker) -> bytes:
    return msgspec.msgpack.encode(
        Report(
            worker=worker.name,
            epoch=worker.epoch,
            sequence=worker.sequence + 1,
            load=Load(),
            state="gone",
            version=worker.version,
        )
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


class Alone:
    """One worker, one follower, entries in hand."""

    def __init__(self, **worker: object) -> None:
        values = {"version": PROTOCOL_VERSION, "secret": SECRET, **worker}
        self.worker = ModelWorker("a", 1, **values)  # type: ignore[arg-type]
        self.redis: dict[str, Place] = {}
        self.sink = Sink()
        self.following = Following(
            self.sink, secret=SECRET, lease_s=LEASE_S, heartbeat_s=HEARTBEAT_S
        )
        self.now = 0.0

    def publish(self, *blocks: bytes, received: tuple[str, ...] = (), running: int = 0) -> bytes:
        self.worker.cached |= set(blocks)
        self.worker.running = running
        self.worker.received += received
        entry = self.worker.publish(self.redis)
        assert entry is not None
        return entry

    def take(self, entry: bytes) -> Need | None:
        need = self.following.take(entry, self.now)
        if need is not None:
            place = self.redis[need.worker]
            held = Held(place.epoch, place.sequence, place.card, list(place.blocks))
            self.following.settle(need, held, self.now)
        return need


def test_reports_that_a_snapshot_has_overtaken_still_name_their_requests_and_their_load() -> None:
    alone = Alone()
    first = alone.publish(BLOCKS[0], received=("r1",), running=1)
    second = alone.publish(BLOCKS[1], received=("r2",), running=2)
    third = alone.publish(BLOCKS[2], received=("r3",), running=3)
    assert alone.take(first) is not None  # reads the set of the third
    assert alone.sink.sets["a"] == set(BLOCKS[:3])
    assert alone.take(third) is None
    assert alone.sink.loads["a"].running == 3
    assert alone.take(second) is None  # late: its load is old, what it names is news
    assert alone.sink.loads["a"].running == 3
    assert alone.sink.named == {"r1", "r2", "r3"}


def test_a_lost_report_is_a_gap_and_one_repair() -> None:
    alone = Alone()
    alone.take(alone.publish(BLOCKS[0]))
    alone.publish(BLOCKS[1])  # lost
    alone.take(alone.publish(BLOCKS[2]))
    assert alone.sink.sets["a"] == set(BLOCKS[:3])
    assert (alone.following.gaps, alone.following.repairs) == (1, 1)
    alone.take(alone.publish(BLOCKS[3]))
    assert (alone.following.gaps, alone.following.repairs) == (1, 1)


def test_a_report_of_another_version_that_cannot_even_be_decoded_is_refused_by_name() -> None:
    alone = Alone()
    strange = {"worker": "a", "version": 7, "epoch": 3, "load": "another shape"}
    assert alone.take(msgspec.msgpack.encode(strange)) is None
    assert "version 7" in alone.following.refused["a"]
    assert alone.take(msgspec.msgpack.encode({**strange, "version": 1})) is None
    assert "cannot be read" in alone.following.refused["a"]
    assert alone.take(b"\xc1") is None
    assert alone.following.unreadable == 3


def test_a_worker_that_is_not_reached_over_plain_http_is_refused() -> None:
    card = msgspec.json.decode(Alone().worker.card(), type=WorkerCard)
    assert card_problem(card, SECRET) == ""
    encrypted = msgspec.structs.replace(card, address="https://10.0.0.7:1")
    assert "announce it as http://HOST:PORT" in card_problem(encrypted, SECRET)


def test_a_refused_worker_is_not_read_again_until_its_next_life() -> None:
    alone = Alone(secret=b"another")
    assert alone.take(alone.publish(BLOCKS[0])) is not None
    assert "STEMROUTE_SECRET" in alone.following.refused["a"]
    assert alone.take(alone.publish(BLOCKS[1])) is None
    alone.worker = ModelWorker("a", 2, PROTOCOL_VERSION, SECRET)
    assert alone.take(alone.publish(BLOCKS[2])) is not None
    assert alone.following.refused == {}
    assert alone.sink.sets["a"] == {BLOCKS[2]}


def test_a_worker_is_gone_when_it_is_silent_and_its_lease_has_ended() -> None:
    alone = Alone()
    alone.take(alone.publish(BLOCKS[0]))
    assert alone.following.silent(2.9) == []
    assert alone.following.silent(3.0) == ["a"]
    alone.following.answer_silence("a", has_lease=True, now=3.0)
    assert alone.following.silent(3.4) == []
    assert alone.following.silent(3.6) == ["a"]
    alone.following.answer_silence("a", has_lease=False, now=3.6)
    assert alone.sink.sets == {}
