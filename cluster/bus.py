"""The bus over Redis, worker side: a lease, a block set and a stream of reports.

Keys of a pool share a hash tag, so that one script covers them also on Redis Cluster:

    stem:{<pool>}:workers               set     ids of the workers that may have a card
    stem:{<pool>}:cards                 hash    id -> card (JSON), for when leases have lapsed
    stem:{<pool>}:worker:<id>           hash    epoch, sequence, card (JSON); lives a lease
    stem:{<pool>}:blocks:<id>:<epoch>   set     hashes cached now on the device
      …:cpu, …:disk                     sets    the same of a worker's cold tiers, if it has any
    stem:{<pool>}:events                stream  one Report (msgpack) an entry, field "r"
    stem:{<pool>}:weights               hash    see `cluster.pool_record`
    stem:{<pool>}:writable              string  written by routers to see whether Redis takes writes

`PUBLISH` changes the set, the card's sequence and the stream in one atomic step. It first
checks what Redis holds against what the worker believes that it holds: another sequence (a
write was lost, Redis restarted empty, the lease ran out) or another number of blocks makes it
answer `lost`, and the worker publishes its whole set again. A card of a later epoch makes it
answer `superseded`: another process uses this name, and this publisher stops.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from itertools import islice

import msgspec
from redis.exceptions import RedisError

from cluster.announced import AnnouncedSet
from cluster.blocks import split_hashes
from cluster.bus_scripts import LEAVE, PUBLISH
from cluster.protocol import ColdReport, Load, Report, WorkerCard, WorkerState
from cluster.redis_client import connect, trouble
from cluster.settings import BusSettings

log = logging.getLogger(__name__)

STAGE_CHUNK = 10_000
"""Hashes in one SADD while a whole set is written."""

TIERS = ("cpu", "disk")
"""The cold tiers, as keys and the fields of a ColdReport spell them."""


class BusKeys:
    """Names of a pool's keys."""

    def __init__(self, pool: str) -> None:
        if not pool or any(c in pool for c in "{}: \n"):
            raise ValueError(f"a pool's name may not be empty or hold braces or colons: {pool!r}")
        self.prefix = f"stem:{{{pool}}}:"
        self.workers = self.prefix + "workers"
        self.cards = self.prefix + "cards"
        self.events = self.prefix + "events"
        self.writable = self.prefix + "writable"

    def card(self, worker: str) -> str:
        """Key of a worker's card."""
        return f"{self.prefix}worker:{worker}"

    def blocks(self, worker: str, epoch: int) -> str:
        """Key of a worker's block set."""
        return f"{self.prefix}blocks:{worker}:{epoch_text(epoch)}"

    def tier(self, worker: str, epoch: int, tier: str) -> str:
        """Key of the block set of a worker's cold tier, one of TIERS."""
        return f"{self.blocks(worker, epoch)}:{tier}"


def epoch_text(epoch: int) -> str:
    """An epoch as text whose alphabetical order is the order of epochs."""
    return f"{epoch:020d}"


def heed_cancellation() -> None:
    """Raise CancelledError where the running task was asked to stop.

    `asyncio.wait_for` of Python 3.11, which the Redis client uses, loses a cancellation that
    comes in the moment in which its result does; a loop around it calls this to stop all the same.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


class PublisherStatus(msgspec.Struct, frozen=True, kw_only=True):
    """connected, the reason in words where not, and counts since the start.

    losses   times that Redis had lost keys of this worker although it could be reached: evicted,
             expired or deleted
    """

    connected: bool
    superseded: bool
    reason: str
    reports: int
    whole_sets: int
    losses: int


class Publisher:
    """Publishes one worker's card, blocks and load.

    `begin`, `update` and `set_state` are called from the event loop's thread and never wait;
    `run` sends what they leave, at once but at most every `min_report_gap_s`.
    """

    def __init__(self, redis_url: str, pool: str, settings: BusSettings) -> None:
        self.redis_url = redis_url
        self.keys = BusKeys(pool)
        self.settings = settings
        self._redis = connect(redis_url, timeout_s=settings.lease_s, key=self.keys.workers)
        self._card: WorkerCard | None = None
        self._blocks = AnnouncedSet()
        self._tiers = {tier: AnnouncedSet() for tier in TIERS}
        self._cold: ColdReport | None = None  # figures of the cold tiers, once there are any
        self._received: list[str] = []
        self._load = Load()
        self._sequence = 0
        self._whole = True  # the next report comes with the whole set
        self._card_changed = True
        self._wake = asyncio.Event()
        self._connected = False
        self._superseded = False
        self._reason = "nothing published yet"
        self._reports = 0
        self._whole_sets = 0
        self._losses = 0
        self._published = asyncio.Event()

    @property
    def status(self) -> PublisherStatus:
        """How publishing goes."""
        return PublisherStatus(
            connected=self._connected,
            superseded=self._superseded,
            reason=self._reason,
            reports=self._reports,
            whole_sets=self._whole_sets,
            losses=self._losses,
        )

    @property
    def load(self) -> Load:
        """The load as last given."""
        return self._load

    @property
    def card(self) -> WorkerCard:
        """The card as last begun. Raises RuntimeError before the first `begin`."""
        if self._card is None:
            raise RuntimeError("the publisher has no card yet: call begin() first")
        return self._card

    def begin(self, card: WorkerCard) -> None:
        """A new epoch with an empty cache. Raises ValueError unless epochs grow."""
        if self._card is not None and card.epoch <= self._card.epoch:
            raise ValueError(f"epoch {card.epoch} does not follow {self._card.epoch}")
        self._card = card
        for blocks in (self._blocks, *self._tiers.values()):
            blocks.clear()
        self._cold = None
        self._sequence = 0
        self._whole = self._card_changed = True
        self._wake.set()

    def set_state(self, state: WorkerState) -> None:
        """Change the state on the card."""
        card = self.card
        if card.state != state:
            self._card = msgspec.structs.replace(card, state=state)
            self._card_changed = True
            self._wake.set()

    def update(
        self,
        *,
        load: Load,
        stored: Iterable[bytes] = (),
        evicted: Iterable[bytes] = (),
        received: Iterable[str] = (),
        cold: ColdReport | None = None,
    ) -> None:
        """Add a change of the cache and the load after it. Parents come before children."""
        self._blocks.update(stored, evicted)
        if cold is not None:
            self._tiers["cpu"].update(split_hashes(cold.cpu_stored), split_hashes(cold.cpu_evicted))
            self._tiers["disk"].update(
                split_hashes(cold.disk_stored), split_hashes(cold.disk_evicted)
            )
            self._cold = cold.without_changes()
        self._received.extend(received)
        self._load = load
        self._wake.set()

    async def run(self) -> None:
        """Publish until cancelled or superseded. Retries while Redis is unavailable."""
        retry_s = 0.1
        while not self._superseded:
            heed_cancellation()
            try:
                async with asyncio.timeout(self.settings.heartbeat_s):
                    await self._wake.wait()
            except TimeoutError:
                pass
            if self._card is None:
                continue
            try:
                await self._publish()
                retry_s = 0.1
                await asyncio.sleep(self.settings.min_report_gap_s)
            except (RedisError, OSError, TimeoutError) as error:
                reason = trouble(error)
                if self._connected or reason != self._reason:
                    log.warning("reports are not published: %s", reason)
                self._connected, self._reason = False, reason
                self._whole = True  # whether the last report arrived is unknown
                self._wake.set()
                await asyncio.sleep(retry_s)
                retry_s = min(2 * retry_s, 1.0)

    async def flushed(self) -> None:
        """Wait until everything given so far is published."""
        sets = (self._blocks, *self._tiers.values())
        while (
            self._wake.is_set()
            or any(blocks.changed for blocks in sets)
            or self._received
            or self._whole
        ):
            self._published.clear()
            await self._published.wait()

    async def leave(self) -> None:
        """Remove card and blocks and notify routers. Errors of Redis are only logged."""
        if self._card is None or self._superseded:
            return
        card, keys = self._card, self.keys
        report = Report(
            worker=card.worker,
            epoch=card.epoch,
            sequence=self._sequence + 1,
            load=Load(),
            state="gone",
        )
        try:
            await self._redis.eval(
                LEAVE,
                6,
                keys.card(card.worker),
                keys.blocks(card.worker, card.epoch),
                keys.events,
                keys.workers,
                *(keys.tier(card.worker, card.epoch, tier) for tier in TIERS),
                card.worker,
                epoch_text(card.epoch),
                str(self.settings.stream_max_reports),
                msgspec.msgpack.encode(report),
            )
            await self._redis.hdel(keys.cards, card.worker)
        except (RedisError, OSError, TimeoutError) as error:
            log.warning("cannot deregister; the lease will expire: %s", trouble(error))

    async def close(self) -> None:
        """Close the connection."""
        await self._redis.aclose()

    async def _publish(self) -> None:
        self._wake.clear()
        whole = self._whole
        if whole:
            epoch = self.card.epoch
            name, keys = self.card.worker, self.keys
            staged = {keys.blocks(name, epoch): self._blocks}
            if self._cold is not None:
                staged |= {keys.tier(name, epoch, t): s for t, s in self._tiers.items()}
            wholes = []
            for key, blocks in staged.items():
                blocks.take()  # the staged set includes it; what comes meanwhile is a delta to it
                wholes.append((key, list(blocks.whole)))
            for key, hashes in wholes:
                await self._stage(key, hashes)
            if self.card.epoch != epoch:
                return  # a new epoch began meanwhile, and has set the wake-up
        card, card_changed = self.card, self._card_changed
        received, self._received = self._received, []
        stored, evicted = self._blocks.take()
        cached, load, previous = len(self._blocks.whole), self._load, self._sequence
        report = Report(
            worker=card.worker,
            epoch=card.epoch,
            sequence=previous + 1,
            load=load,
            stored=stored,
            evicted=evicted,
            received=received,
            state=card.state,
            resync=whole,
            cold=self._take_cold(),
        )
        try:
            if card_changed:
                await self._redis.hset(self.keys.cards, card.worker, msgspec.json.encode(card))
            answer = await self._send(card, report, previous, cached, card_changed)
        except (RedisError, OSError, TimeoutError):
            self._received = received + self._received
            raise
        if self.card.epoch != card.epoch:  # a new epoch began meanwhile: it publishes its own set
            self._received = received + self._received
            return
        if answer == b"superseded":
            self._superseded, self._connected = True, False
            self._reason = f"another worker with a later epoch goes by the name {card.worker}"
            log.error("%s; this one stops publishing", self._reason)
        elif answer == b"lost":
            if not whole and self._connected:
                self._losses += 1
                log.warning("Redis lost keys of this worker: publishing its whole set again")
            self._received = received + self._received
            self._whole = self._card_changed = True
            self._wake.set()
        else:
            self._sequence = report.sequence
            self._reports += 1
            self._whole_sets += whole
            self._connected, self._reason = True, ""
            self._whole = False
            self._card_changed = self._card_changed and not card_changed
        self._published.set()

    def _take_cold(self) -> ColdReport | msgspec.UnsetType:
        if self._cold is None:
            return msgspec.UNSET
        cpu, disk = self._tiers["cpu"], self._tiers["disk"]
        cpu_stored, cpu_evicted = cpu.take()
        disk_stored, disk_evicted = disk.take()
        return msgspec.structs.replace(
            self._cold,
            cpu_stored=cpu_stored,
            cpu_evicted=cpu_evicted,
            disk_stored=disk_stored,
            disk_evicted=disk_evicted,
            cpu_blocks=len(cpu.whole),
            disk_blocks=len(disk.whole),
        )

    async def _stage(self, key: str, hashes: list[bytes]) -> None:
        """Write the whole set under another name; PUBLISH puts it in place."""
        staging = key + ":new"
        await self._redis.delete(staging)
        blocks = iter(hashes)
        while chunk := list(islice(blocks, STAGE_CHUNK)):
            await self._redis.sadd(staging, *chunk)
        await self._redis.pexpire(staging, int(self.settings.blocks_ttl_s * 1000))

    async def _send(
        self, card: WorkerCard, report: Report, previous: int, cached: int, card_changed: bool
    ) -> bytes:
        keys, settings = self.keys, self.settings
        blocks = keys.blocks(card.worker, card.epoch)
        tier_keys: list[str] = []
        tier_values: list[bytes | str] = []
        if isinstance(cold := report.cold, ColdReport):
            for tier in TIERS:
                key = keys.tier(card.worker, card.epoch, tier)
                tier_keys += [key, key + ":new"]
            tier_values += [cold.cpu_stored, cold.cpu_evicted, str(cold.cpu_blocks)]
            tier_values += [cold.disk_stored, cold.disk_evicted, str(cold.disk_blocks)]
        answer: bytes = await self._redis.eval(
            PUBLISH,
            5 + len(tier_keys),
            keys.card(card.worker),
            blocks,
            keys.events,
            keys.workers,
            blocks + ":new",
            *tier_keys,
            "whole" if report.resync else "delta",
            card.worker,
            epoch_text(card.epoch),
            str(previous),
            str(report.sequence),
            msgspec.json.encode(card) if card_changed or report.resync else b"",
            report.stored,
            report.evicted,
            str(cached),
            str(int(settings.lease_s * 1000)),
            str(int(settings.blocks_ttl_s * 1000)),
            str(settings.stream_max_reports),
            msgspec.msgpack.encode(report),
            *tier_values,
        )
        return answer
