"""Publishers and followers of one pool over a real Valkey, and a sink of plain sets."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Callable

from cluster.blocks import Namespace, split_hashes
from cluster.bus import Publisher
from cluster.follower import Follower
from cluster.protocol import Load, Report, WorkerCard
from cluster.settings import BusSettings

QUICK = BusSettings(lease_s=1.0, heartbeat_s=0.1, min_report_gap_s=0.002)
SECRET = b"s"
NAMESPACE = Namespace(
    weights="w", tokenizer="t", kv_dtype="float32", block_size=16, positions="rope"
)


def card(worker: str, epoch: int, **changes: object) -> WorkerCard:
    values = {
        "worker": worker,
        "epoch": epoch,
        "address": "http://127.0.0.1:1",
        "model": "m",
        "namespace": NAMESPACE,
        "namespace_check": NAMESPACE.check(SECRET),
        "capacity_blocks": 100,
        "context_tokens": 1000,
        "max_batch_size": 8,
        "token_budget": 64,
        "device": "cpu",
        "state": "ready",
    }
    return WorkerCard(**{**values, **changes})  # type: ignore[arg-type]


def block(i: int) -> bytes:
    return hashlib.sha256(str(i).encode()).digest()[:16]


class Picture:
    """A sink that keeps plain sets, and wakes whoever waits for something to become true."""

    def __init__(self) -> None:
        self.cards: dict[str, WorkerCard] = {}
        self.sets: dict[str, set[bytes]] = {}
        self.loads: dict[str, Load] = {}
        self.states: dict[str, str] = {}
        self.received: list[str] = []
        self.gone: dict[str, str] = {}
        self._changed = asyncio.Event()

    def on_card(self, card: WorkerCard) -> None:
        self.cards[card.worker] = card
        self.sets.setdefault(card.worker, set())
        self._changed.set()

    def on_snapshot(self, worker: str, epoch: int, hashes: list[bytes]) -> None:
        assert self.cards[worker].epoch == epoch
        self.sets[worker] = set(hashes)
        self._changed.set()

    def on_report(self, report: Report) -> bool:
        mine = self.sets[report.worker]
        mine.difference_update(split_hashes(report.evicted))
        mine.update(split_hashes(report.stored))
        self.loads[report.worker] = report.load
        self.states[report.worker] = report.state
        self.received += report.received
        self._changed.set()
        return len(mine) == report.load.cached_blocks

    def on_gone(self, worker: str, reason: str) -> None:
        del self.cards[worker], self.sets[worker]
        self.gone[worker] = reason
        self._changed.set()

    async def until(self, true: Callable[[], bool], timeout_s: float = 20.0) -> None:
        async with asyncio.timeout(timeout_s):
            while not true():
                self._changed.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0.2):  # states of no sink call: look again
                        await self._changed.wait()


class Bench:
    """Publishers and followers of one pool, with their tasks."""

    def __init__(self, url: str, pool: str) -> None:
        self.url, self.pool = url, pool
        self.tasks: dict[object, asyncio.Task[None]] = {}

    def publisher(self, worker: str, epoch: int) -> Publisher:
        publisher = Publisher(self.url, self.pool, QUICK)
        publisher.begin(card(worker, epoch))
        self.tasks[publisher] = asyncio.create_task(publisher.run())
        return publisher

    def follower(self, secret: bytes = SECRET) -> tuple[Follower, Picture]:
        picture = Picture()
        follower = Follower(self.url, self.pool, picture, QUICK, secret)
        self.tasks[follower] = asyncio.create_task(follower.run())
        return follower, picture

    async def stop(self, part: object) -> None:
        task = self.tasks.pop(part)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        if isinstance(part, Publisher):
            await part.close()


def store(publisher: Publisher, *numbers: int, evict: tuple[int, ...] = ()) -> None:
    before = set(publisher._blocks.whole)
    after = (before - {block(i) for i in evict}) | {block(i) for i in numbers}
    publisher.update(
        load=Load(cached_blocks=len(after)),
        stored=[block(i) for i in numbers],
        evicted=[block(i) for i in evict],
    )
