"""The bus over Redis, router side: reads stream, cards and sets for `following.Following`."""

from __future__ import annotations

import asyncio
import logging
import time

from redis.exceptions import RedisError

from cluster.bus import TIERS, BusKeys, connect, heed_cancellation
from cluster.bus_status import BusStatus
from cluster.following import FleetSink, Following, Held, Need
from cluster.settings import BusSettings

log = logging.getLogger(__name__)

BATCH_REPORTS = 2000
"""Reports taken from the stream in one read."""

NO_ENTRY = b"0-0"
"""Before the first entry of a stream."""


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
        self.settings = settings
        self.following = Following(
            sink,
            secret=namespace_secret,
            lease_s=settings.lease_s,
            heartbeat_s=settings.heartbeat_s,
        )
        timeout_s = max(1.0, settings.lease_s)
        self._stream = connect(redis_url, timeout_s=timeout_s)
        self._reader = connect(redis_url, timeout_s=timeout_s)
        self._last_id = NO_ENTRY
        self._connected = False
        self._lost_at: float | None = time.monotonic()
        self._trouble = "Redis has not been read yet"

    @property
    def status(self) -> BusStatus:
        """How following goes."""
        reason = ""
        if not self._connected:
            away_s = 0.0 if self._lost_at is None else time.monotonic() - self._lost_at
            reason = f"{self._trouble}; the index is as it was {away_s:.1f} s ago"
        following = self.following
        return BusStatus(
            connected=self._connected,
            stale=not self._connected,
            reason=reason,
            reports=following.reports,
            gaps=following.gaps,
            disagreements=following.disagreements,
            disagreeing=following.disagreeing,
            repairs=following.repairs,
            unreadable=following.unreadable,
            refused=following.refused,
            report_ages_s=following.report_ages_s(time.monotonic()),
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
        self._last_id = await self._newest_id()
        self.following.renew_leases(time.monotonic())
        for raw in await self._reader.smembers(self.keys.workers):
            worker = _text(raw)
            await self._settle(Need(worker, None, repair=self.following.knows(worker)))
        self._connected, self._lost_at = True, None

    async def _read_once(self) -> None:
        heed_cancellation()
        block_ms = max(1, int(self.settings.heartbeat_s * 1000))
        answer = await self._stream.xread(
            {self.keys.events: self._last_id}, count=BATCH_REPORTS, block=block_ms
        )
        streams = stream_entries(answer)
        if not streams:
            await self._find_place()
        for _, entries in streams:
            for entry_id, fields in entries:
                need = self.following.take(fields.get(b"r", b""), time.monotonic())
                if need is not None:
                    await self._settle(need)
                self._last_id = entry_id
        await self._look_after_silent()

    async def _settle(self, need: Need) -> None:
        self.following.settle(need, await self._read_worker(need.worker), time.monotonic())

    async def _read_worker(self, worker: str) -> Held | None:
        """A worker's card and whole sets in one transaction; None where its lease has ended."""
        while True:
            epoch_raw = await self._reader.hget(self.keys.card(worker), "epoch")
            if epoch_raw is None:
                return None
            pipe = self._reader.pipeline(transaction=True)
            pipe.hgetall(self.keys.card(worker))
            blocks = f"{self.keys.prefix}blocks:{worker}:{_text(epoch_raw)}"
            for key in (blocks, *(f"{blocks}:{tier}" for tier in TIERS)):
                pipe.smembers(key)
            fields, *sets = await pipe.execute()
            if fields.get(b"epoch") == epoch_raw:
                return Held(
                    int(epoch_raw), int(fields[b"sequence"]), fields[b"card"], *map(list, sets)
                )

    async def _look_after_silent(self) -> None:
        """Redis keeps the leases; silence asks for them."""
        for worker in self.following.silent(time.monotonic()):
            has_lease = bool(await self._reader.exists(self.keys.card(worker)))
            if not has_lease:
                await self._reader.srem(self.keys.workers, worker)
            self.following.answer_silence(worker, has_lease=has_lease, now=time.monotonic())
        for worker in self.following.refused:
            if not await self._reader.exists(self.keys.card(worker)):
                self.following.forgive(worker)

    async def _find_place(self) -> None:
        """Nothing came: where the stream began anew at lower ids, read it from its beginning.

        That happens when it was deleted, or when another Redis whose clock is behind took over.
        """
        newest = await self._newest_id()
        if _order(newest) < _order(self._last_id):
            log.warning("the stream of reports began anew: reading it from its beginning")
            self._last_id = NO_ENTRY

    async def _newest_id(self) -> bytes:
        entries: list[tuple[bytes, object]] = await self._reader.xrevrange(  # type: ignore[assignment]
            self.keys.events, count=1
        )
        return entries[0][0] if entries else NO_ENTRY


def _order(entry_id: bytes) -> tuple[int, int]:
    """A stream entry's id, to compare: milliseconds, and a count within."""
    milliseconds, _, count = entry_id.partition(b"-")
    return int(milliseconds), int(count)


def _text(raw: bytes | str) -> str:
    return raw if isinstance(raw, str) else raw.decode()


def stream_entries(answer: object) -> list[tuple[bytes, list[tuple[bytes, dict[bytes, bytes]]]]]:
    """The answer of XREAD in one shape: RESP2 gives pairs, RESP3 a map of lists of pages."""
    if not answer:
        return []
    if isinstance(answer, dict):
        return [(k, page) for k, pages in answer.items() for page in pages]
    assert isinstance(answer, list)
    return answer
