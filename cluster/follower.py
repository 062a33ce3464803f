"""The bus over Redis, router side: follow every worker's reports, notice holes, repair them.

`Tracker` decides, without any I/O, what to do with a report: apply it, ignore it, or read the
worker's whole set first. `Follower` does the reading and feeds a `FleetSink`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from enum import Enum
from typing import Protocol

import msgspec
from redis.exceptions import RedisError

from cluster.bus import BusKeys, connect, heed_cancellation
from cluster.protocol import PROTOCOL_VERSION, Report, WorkerCard
from cluster.settings import BusSettings

log = logging.getLogger(__name__)

BATCH_REPORTS = 2000
"""Reports taken from the stream in one read."""


class FleetSink(Protocol):
    """Who is told. Calls come in order, from the event loop's thread."""

    def on_card(self, card: WorkerCard) -> None:
        """A new worker, a new epoch of one, or a changed card."""

    def on_snapshot(self, worker: str, epoch: int, hashes: list[bytes]) -> None:
        """This is the worker's whole set now."""

    def on_report(self, report: Report) -> bool | None:
        """Apply a report. False: what is known of this worker does not agree with it."""

    def on_gone(self, worker: str, reason: str) -> None:
        """The worker left, or its lease ended."""


class FollowerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """connected   the last read of Redis worked
    stale       what is known may be out of date, for `reason` (words)
    reports     applied since the start
    gaps        holes found in a worker's sequence
    repairs     whole sets read to mend a hole or after Redis was away
    refused     worker -> why it is not used
    """

    connected: bool
    stale: bool
    reason: str
    reports: int
    gaps: int
    repairs: int
    refused: dict[str, str]


class Verdict(Enum):
    """What to do with a report."""

    APPLY = "apply"
    IGNORE = "ignore"
    SNAPSHOT = "snapshot"


class Tracker:
    """Where a follower stands with one worker: epoch and sequence of what it knows.

    Epochs only grow. Within an epoch reports apply in order without holes; whatever else
    happens (a lost, late or repeated report, a later epoch) ends in APPLY of the next report in
    line, IGNORE of an old one, or SNAPSHOT.
    """

    def __init__(self) -> None:
        self.epoch = -1
        self.sequence = 0
        self.gaps = 0

    def snapshot(self, epoch: int, sequence: int) -> bool:
        """A whole set was read. False where it is older than what is known: drop it."""
        if (epoch, sequence) < (self.epoch, self.sequence):
            return False
        self.epoch, self.sequence = epoch, sequence
        return True

    def offer(self, epoch: int, sequence: int, *, resync: bool) -> Verdict:
        """Judge a report; APPLY also takes note of it."""
        if epoch < self.epoch or (epoch == self.epoch and sequence <= self.sequence):
            return Verdict.IGNORE
        if epoch > self.epoch:
            return Verdict.SNAPSHOT
        if sequence == self.sequence + 1 and not resync:
            self.sequence = sequence
            return Verdict.APPLY
        self.gaps += sequence != self.sequence + 1
        return Verdict.SNAPSHOT


class _Known:
    """A worker that the sink knows."""

    def __init__(self, now: float) -> None:
        self.tracker = Tracker()
        self.heard_at = now


class Follower:
    """Keeps a sink's picture of a pool's workers equal to what the workers publish."""

    def __init__(
        self,
        redis_url: str,
        pool: str,
        sink: FleetSink,
        settings: BusSettings,
        namespace_secret: bytes = b"",
    ) -> None:
        self.redis_url = redis_url
        self.keys = BusKeys(pool)
        self.sink = sink
        self.settings = settings
        self.secret = namespace_secret
        timeout_s = max(1.0, settings.lease_s)
        self._stream = connect(redis_url, timeout_s=timeout_s)
        self._reader = connect(redis_url, timeout_s=timeout_s)
        self._workers: dict[str, _Known] = {}
        self._refused: dict[str, str] = {}
        self._last_id = b"0-0"
        self._connected = False
        self._lost_at: float | None = time.monotonic()
        self._trouble = "Redis has not been read yet"
        self._reports = 0
        self._gaps = 0
        self._repairs = 0

    @property
    def status(self) -> FollowerStatus:
        """How following goes."""
        reason = ""
        if not self._connected:
            away_s = 0.0 if self._lost_at is None else time.monotonic() - self._lost_at
            reason = f"{self._trouble}; the index is as it was {away_s:.1f} s ago"
        return FollowerStatus(
            connected=self._connected,
            stale=not self._connected,
            reason=reason,
            reports=self._reports,
            gaps=self._gaps,
            repairs=self._repairs,
            refused=dict(self._refused),
        )

    async def run(self) -> None:
        """Follow until cancelled. Trouble with Redis is shown in `status` and waited out."""
        retry_s = 0.05
        try:
            while True:
                try:
                    await self._catch_up()
                    retry_s = 0.05
                    while True:
                        await self._read_once()
                except (RedisError, OSError, TimeoutError) as error:
                    if self._connected or self._lost_at is None:
                        log.warning("the index is not kept up to date: %s", error)
                        self._lost_at = time.monotonic()
                    self._connected = False
                    self._trouble = f"Redis cannot be reached ({error})"
                    await asyncio.sleep(retry_s)
                    retry_s = min(2 * retry_s, 1.0)
        finally:
            await self._stream.aclose()
            await self._reader.aclose()

    async def _catch_up(self) -> None:
        """Read every worker's set; reports after the place noted here bring it up to date."""
        newest: list[tuple[bytes, object]] = await self._reader.xrevrange(  # type: ignore[assignment]
            self.keys.events, count=1
        )
        self._last_id = newest[0][0] if newest else b"0-0"
        now = time.monotonic()
        for known in self._workers.values():
            known.heard_at = now  # a restarted Redis is empty at first: give each its lease
        for raw in await self._reader.smembers(self.keys.workers):
            worker = _text(raw)
            await self._read_worker(worker, repair=worker in self._workers)
        self._connected, self._lost_at = True, None

    async def _read_once(self) -> None:
        heed_cancellation()
        block_ms = max(1, int(self.settings.heartbeat_s * 1000))
        answer = await self._stream.xread(
            {self.keys.events: self._last_id}, count=BATCH_REPORTS, block=block_ms
        )
        for _, entries in _streams(answer):
            for entry_id, fields in entries:
                await self._take(fields[b"r"])
                self._last_id = entry_id
        await self._drop_silent()

    async def _take(self, raw: bytes) -> None:
        try:
            report = msgspec.msgpack.decode(raw, type=Report)
        except msgspec.DecodeError as error:
            log.warning("a report cannot be read: %s", error)
            return
        worker = report.worker
        if report.version != PROTOCOL_VERSION:
            self._refuse(worker, _wrong_version(report.version))
            return
        known = self._workers.get(worker)
        if report.state == "gone":
            if known is not None and report.epoch >= known.tracker.epoch:
                self._forget(worker, "it has left")
            self._refused.pop(worker, None)
            return
        if known is None:
            await self._read_worker(worker, repair=False)
            known = self._workers.get(worker)
            if known is None:
                return
        gaps = known.tracker.gaps
        verdict = known.tracker.offer(report.epoch, report.sequence, resync=report.resync)
        if known.tracker.gaps > gaps:
            self._gaps += 1
        if verdict is Verdict.IGNORE:
            return
        known.heard_at = time.monotonic()
        if verdict is Verdict.SNAPSHOT:
            await self._read_worker(worker, repair=True)
            if worker not in self._workers:
                return
            report = msgspec.structs.replace(report, stored=b"", evicted=b"")
        self._reports += 1
        if self.sink.on_report(report) is False and verdict is Verdict.APPLY:
            self._gaps += 1
            log.warning("the index of %s does not agree with its report: reading it again", worker)
            await self._read_worker(worker, repair=True)

    async def _read_worker(self, worker: str, *, repair: bool) -> None:
        """Read a worker's card and whole set in one transaction."""
        while True:
            epoch_raw = await self._reader.hget(self.keys.card(worker), "epoch")
            if epoch_raw is None:
                return  # its lease has ended: no card, no set
            pipe = self._reader.pipeline(transaction=True)
            pipe.hgetall(self.keys.card(worker))
            pipe.smembers(f"{self.keys.prefix}blocks:{worker}:{_text(epoch_raw)}")
            fields, members = await pipe.execute()
            if fields.get(b"epoch") == epoch_raw:
                break
        try:
            card = msgspec.json.decode(fields[b"card"], type=WorkerCard)
        except msgspec.DecodeError as error:
            self._refuse(worker, f"its card cannot be read: {error}")
            return
        problem = self._problem(card)
        if problem:
            self._refuse(worker, problem)
            return
        self._refused.pop(worker, None)
        known = self._workers.setdefault(worker, _Known(time.monotonic()))
        if not known.tracker.snapshot(card.epoch, int(fields[b"sequence"])):
            return
        self._repairs += repair
        self.sink.on_card(card)
        self.sink.on_snapshot(worker, card.epoch, list(members))

    def _problem(self, card: WorkerCard) -> str:
        if card.version != PROTOCOL_VERSION:
            return _wrong_version(card.version)
        if card.namespace.check(self.secret) != card.namespace_check:
            return (
                "its block hashes differ from this router's: worker and router have different "
                "secrets (STEMROUTE_SECRET) or hash differently"
            )
        return ""

    def _refuse(self, worker: str, reason: str) -> None:
        if self._refused.get(worker) != reason:
            log.warning("worker %s is refused: %s", worker, reason)
            self._refused[worker] = reason
        if worker in self._workers:
            self._forget(worker, reason)

    def _forget(self, worker: str, reason: str) -> None:
        del self._workers[worker]
        self.sink.on_gone(worker, reason)

    async def _drop_silent(self) -> None:
        """Workers whose lease has ended are gone. Redis keeps the lease; silence asks for it."""
        now = time.monotonic()
        for worker, known in list(self._workers.items()):
            if now - known.heard_at < self.settings.lease_s:
                continue
            if await self._reader.exists(self.keys.card(worker)):
                known.heard_at = now - self.settings.lease_s + self.settings.heartbeat_s
            else:
                await self._reader.srem(self.keys.workers, worker)
                self._forget(worker, f"no report for {self.settings.lease_s:g} s")
        for worker in list(self._refused):
            if not await self._reader.exists(self.keys.card(worker)):
                del self._refused[worker]


def _text(raw: bytes | str) -> str:
    return raw if isinstance(raw, str) else raw.decode()


def _streams(answer: object) -> list[tuple[bytes, list[tuple[bytes, dict[bytes, bytes]]]]]:
    """The answer of XREAD in one shape: RESP2 gives pairs, RESP3 a map of lists of pages."""
    if not answer:
        return []
    if isinstance(answer, dict):
        return [(k, page) for k, pages in answer.items() for page in pages]
    assert isinstance(answer, list)
    return answer


def _wrong_version(version: int) -> str:
    return f"it speaks protocol version {version}, this router {PROTOCOL_VERSION}: upgrade one"
