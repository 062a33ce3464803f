"""The bus over Redis, router side: reads stream, cards and sets for `following.Following`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time

from redis.exceptions import NoPermissionError, RedisError, ResponseError

from cluster.bus import TIERS, BusKeys, heed_cancellation
from cluster.bus_status import BusStatus
from cluster.following import FleetSink, Following, Held, Need
from cluster.liveness import Liveness, Probe
from cluster.redis_client import connect, trouble
from cluster.redis_memory import MemoryWatch
from cluster.settings import BusSettings

log = logging.getLogger(__name__)

BATCH_REPORTS = 2000
"""Reports taken from the stream in one read."""

LATE_S = 1.0
LATE_HEARTBEATS = 3
"""A worker without a report for this long is late; the greater value counts."""

MEMORY_CHECK_S = 5.0
"""How often Redis is asked for its memory."""

NO_ENTRY = b"0-0"
"""Before the first entry of a stream."""


class Follower:
    """Keeps a sink's picture of a pool's workers equal to what the workers publish.

    probe   asks workers whose lease has lapsed; without it they are gone
    """

    def __init__(
        self,
        redis_url: str,
        pool: str,
        sink: FleetSink,
        settings: BusSettings,
        namespace_secret: bytes = b"",
        probe: Probe | None = None,
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
        self._stream = connect(redis_url, timeout_s=timeout_s, key=self.keys.events)
        self._reader = connect(redis_url, timeout_s=timeout_s, key=self.keys.workers)
        self._last_id = NO_ENTRY
        self._connected = False
        self._lost_at: float | None = time.monotonic()
        self._trouble = "Redis has not been read yet"
        self._liveness = Liveness(self.following, probe)
        self._late_s = min(
            0.8 * settings.lease_s, max(LATE_S, LATE_HEARTBEATS * settings.heartbeat_s)
        )
        self._problem = ""  # why workers do not report, while that is so
        self._late: list[float] = []  # seconds without a report, of workers that do not report
        self._problem_at = self._examined_at = self._written_at = time.monotonic()
        self._memory = MemoryWatch()
        self._memory_checked_at = 0.0

    @property
    def status(self) -> BusStatus:
        """How following goes."""
        now, reason = time.monotonic(), ""
        if not self._connected:
            away_s = 0.0 if self._lost_at is None else now - self._lost_at
            reason = f"{self._trouble}; the index is as it was {away_s:.1f} s ago"
        elif self._problem:
            longest_s = max(self._late) + now - self._problem_at
            since = time.strftime("%H:%M:%S UTC", time.gmtime(time.time() - longest_s))
            reason = (
                f"{self._problem}; {len(self._late)} of {self.following.known} workers do not "
                f"report, the first since {since} ({longest_s:.1f} s ago)"
            )
        following = self.following
        return BusStatus(
            connected=self._connected,
            stale=bool(reason),
            reason=reason,
            reports=following.reports,
            gaps=following.gaps,
            disagreements=following.disagreements,
            disagreeing=following.disagreeing,
            repairs=following.repairs,
            unreadable=following.unreadable,
            refused=following.refused,
            report_ages_s=following.report_ages_s(now),
            kept=following.kept,
            warning=self._memory.warning,
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
                    reason = trouble(error)
                    if self._connected or reason != self._trouble:
                        log.warning("the index is not kept up to date: %s", reason)
                    if self._connected or self._lost_at is None:
                        self._lost_at = time.monotonic()
                    self._connected, self._trouble = False, reason
                    await self._look_anew()
                    await asyncio.sleep(retry_s)
                    retry_s = min(2 * retry_s, 1.0)
        finally:
            await self._liveness.close()
            await self._stream.aclose()
            await self._reader.aclose()

    async def _catch_up(self) -> None:
        """Read every worker's set; reports after the place noted here bring it up to date."""
        self._last_id = await self._newest_id()
        self.following.renew_leases(time.monotonic())
        for raw in await self._reader.smembers(self.keys.workers):
            worker = _text(raw)
            known = self.following.knows(worker)
            await self._settle(Need(worker, None, repair=known))
            if not known and not self.following.knows(worker):
                await self._recall(worker)
        self._connected, self._lost_at = True, None
        self._problem, self._examined_at = "", time.monotonic()

    async def _recall(self, worker: str) -> None:
        """A worker without a lease, which lapses too where Redis takes no writes: it is asked."""
        card = await self._reader.hget(self.keys.cards, worker)
        if card is not None:
            self._liveness.recall(_text(card).encode())

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
        await self._look_at_reports()
        await self._look_after_silent()
        await self._check_memory()

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
                sequence, card = fields.get(b"sequence", b""), fields.get(b"card", b"")
                return Held(card_number(epoch_raw), card_number(sequence), card, *map(list, sets))

    async def _look_at_reports(self) -> None:
        """Where workers do not report, find out whether Redis takes writes."""
        now = time.monotonic()
        if now - self._examined_at < self.settings.heartbeat_s:
            return
        self._examined_at = now
        ages = self.following.report_ages_s(now).values()
        late = [age for age in ages if age >= self._late_s]
        if late and now - self._written_at < self._late_s:
            return
        problem = await self._why_late(everybody=len(late) == len(ages)) if late else ""
        if problem != self._problem:
            log.warning("%s", problem or f"workers report again after: {self._problem}")
            if not problem:  # those that come back need a moment
                self.following.renew_leases(now)
        self._problem, self._late, self._problem_at = problem, late, now
        if problem:
            await self._look_anew()

    async def _why_late(self, *, everybody: bool) -> str:
        """ "" where Redis takes writes and some workers report: the others have a problem."""
        self._written_at = time.monotonic()
        reason = "Redis takes writes, but no worker reports" if everybody else ""
        try:
            await self._reader.set(self.keys.writable, b"1", px=int(1000 * self.settings.lease_s))
        except NoPermissionError:
            return "no worker reports" if everybody else ""
        except ResponseError as error:
            return trouble(error)
        return reason

    async def _look_anew(self) -> None:
        """End the connections, so that the next ones lead to the primary of now.

        Where another server took over under the same name, an old connection hears nothing.
        """
        for client in (self._stream, self._reader):
            with contextlib.suppress(RedisError, OSError, TimeoutError):
                await client.connection_pool.disconnect()

    async def _check_memory(self) -> None:
        now = time.monotonic()
        if now - self._memory_checked_at < MEMORY_CHECK_S:
            return
        self._memory_checked_at = now
        with contextlib.suppress(ResponseError):  # not permitted, or not offered
            self._memory.look(await self._reader.info("memory", "stats"), now)

    async def _look_after_silent(self) -> None:
        """Redis keeps the leases; silence asks for them."""
        lapsed = []
        for worker in self.following.silent(time.monotonic()):
            if self._liveness.asking(worker):
                continue
            if await self._reader.exists(self.keys.card(worker)):
                self.following.answer_silence(worker, has_lease=True, now=time.monotonic())
            else:
                lapsed.append(worker)
        for worker in self._liveness.decide(lapsed, bus_fails=bool(self._problem)):
            await self._forget_name(worker)
        for worker in self.following.refused:
            if not await self._reader.exists(self.keys.card(worker)):
                self.following.forgive(worker)

    async def _forget_name(self, worker: str) -> None:
        with contextlib.suppress(ResponseError):  # a Redis that takes no writes keeps the name
            await self._reader.srem(self.keys.workers, worker)
            await self._reader.hdel(self.keys.cards, worker)

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


def card_number(raw: bytes | str) -> int:
    """A field of a card's hash; 0 where it is no number: the card then shows what is wrong."""
    return int(raw) if raw.isdigit() else 0


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
