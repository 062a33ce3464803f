"""A model of Redis and of the workers' side of the protocol (`cluster/bus.py`): a set and a place
for each worker, and entries in hand."""

from __future__ import annotations

import hashlib

import msgspec

from cluster.blocks import Namespace, join_hashes, split_hashes
from cluster.following import Following, Held, Need
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
