"""The bus and the workers behind it, as `stemroute doctor` sees them from outside."""

from __future__ import annotations

import contextlib
import time
from functools import partial
from typing import Any, NamedTuple

import httpx
import msgspec
import redis.asyncio as aioredis
from redis.exceptions import RedisError, ResponseError

from cluster.blocks import Namespace, split_hashes
from cluster.bus import BusKeys
from cluster.card_check import card_problem
from cluster.follower import NO_ENTRY, card_number, stream_entries
from cluster.protocol import PROTOCOL_VERSION, BlockList, WorkerCard
from cluster.redis_client import trouble
from cluster.redis_memory import MemoryWatch
from cluster.settings import Settings
from ops.gcs_storage import HOW_TO_START, IN_MEMORY
from ops.links import Broken, Skip, Step, settled

LOST_WITH_HEAD = (
    "The Ray head keeps its state in memory: if it is lost, all workers are lost with it. To "
    f"prevent that, set serve.gcs_fault_tolerance=true for up, or start the head with: "
    f"{HOW_TO_START}"
)


class Announced(NamedTuple):
    """A worker's card as it lies in Redis. `card` is None where it cannot be read."""

    worker: str
    epoch: int
    sequence: int
    version: int
    card: WorkerCard | None


class _Version(msgspec.Struct):
    """Of a card that may not be understood otherwise."""

    version: int


class _From(msgspec.Struct):
    """Of a report that may not be understood otherwise."""

    worker: str


class BusLinks:
    """Redis, the workers' cards and reports in it, and the workers themselves.

    redis     a client; None where no Redis is named
    workers   an HTTP client that shows the pool's token
    usable    after `digests`: cards of the workers that hash as this secret does
    """

    def __init__(
        self,
        settings: Settings,
        redis: aioredis.Redis | None,
        workers: httpx.AsyncClient,
        patience_s: float,
    ) -> None:
        self.usable: list[WorkerCard] = []
        self._settings = settings
        self._client = redis
        self._workers = workers
        self._patience_s = patience_s
        self._keys = BusKeys(settings.pool)
        self._announced: list[Announced] = []
        self._reached: set[str] = set()
        self._redis_answers = False

    def steps(self) -> list[Step]:
        """The links in order; each builds on those before it."""
        return [
            Step("redis", self._redis_link),
            Step("writes", self._writes_link),
            Step("cards", self._cards_link),
            Step("versions", self._versions_link),
            Step("digests", self._digests_link),
            Step("epochs", self._epochs_link),
            Step("reports", self._reports_link),
            Step("workers", self._workers_link),
            Step("blocks", self._blocks_link),
        ]

    async def listing(self, card: WorkerCard) -> BlockList:
        """What the worker caches, by its own word. Raises Broken where it does not answer."""
        answer = await self._ask(card, "blocks")
        if answer.status_code == 401:
            raise Broken(
                f"{card.worker} refuses this pool's token",
                "set the same STEMROUTE_SECRET for workers, gateways and this command",
            )
        if answer.status_code != 200:
            raise Broken(
                f"{card.worker} does not list its blocks: status {answer.status_code}",
                f"see the log of {card.worker}",
            )
        try:
            return msgspec.msgpack.decode(answer.content, type=BlockList)
        except msgspec.DecodeError as error:
            raise Broken(
                f"the list of {card.worker}'s blocks cannot be read: {error}",
                f"see whether another server listens at {card.address}",
            ) from error

    async def _ask(self, card: WorkerCard, path: str) -> httpx.Response:
        try:
            return await self._workers.get(f"{card.address}/{path}")
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise Broken(
                f"{card.worker} cannot be reached at {card.address} ({error!r})",
                "gateways must reach that address: set worker.advertise_host, open the port",
            ) from error

    async def _redis_link(self) -> str:
        if self._client is None:
            raise Broken(
                "no Redis is named", "give --redis-url or STEMROUTE_REDIS_URL, as the gateway has"
            )
        try:
            info = await self._client.info("server")
        except (RedisError, OSError, TimeoutError) as error:
            raise Broken(
                trouble(error),
                "start it, or correct host, port and password (STEMROUTE_REDIS_URL, "
                "STEMROUTE_REDIS_PASSWORD)",
            ) from error
        version = str(info.get("valkey_version") or info["redis_version"])
        if int(version.split(".")[0]) < 7:
            raise Broken(f"Redis {version} is too old", "use Redis 7, Valkey 7 or newer")
        self._redis_answers = True
        return f"version {version} answers"

    async def _writes_link(self) -> str:
        try:
            await self._redis.set(self._keys.writable, b"1", px=1000)
        except ResponseError as error:
            raise Broken(
                trouble(error),
                "reports do not get through until Redis takes writes: workers go on serving, but "
                "gateways no longer learn of their load and caches",
            ) from error
        memory = MemoryWatch()
        with contextlib.suppress(ResponseError):  # not permitted, or not offered
            memory.look({"evicted_keys": 0}, 0.0)
            memory.look(await self._redis.info("memory", "stats"), 0.0)
        if memory.warning:
            raise Broken(memory.warning, "CONFIG SET maxmemory, or another Redis for this pool")
        return "Redis takes writes, and evicts nothing"

    async def _cards_link(self) -> str:
        for raw in sorted(await self._redis.smembers(self._keys.workers)):
            worker = _text(raw)
            fields: Any = await self._redis.hgetall(self._keys.card(worker))
            if fields:
                self._announced.append(_announced(worker, fields))
        if not self._announced:
            pools = await self._other_pools()
            others = f"; there are workers in the pools {', '.join(pools)}" if pools else ""
            raise Broken(
                f"no worker is registered in the pool {self._settings.pool!r}{others}",
                "set the same pool (STEMROUTE_POOL) for workers and gateways"
                if pools
                else "start workers with this Redis, and see their logs",
            )
        names = ", ".join(each.worker for each in self._announced)
        return f"{len(self._announced)} in the pool {self._settings.pool!r}: {names}"

    async def _versions_link(self) -> str:
        self._need_cards()
        wrong = [
            f"{each.worker} speaks version {each.version}"
            for each in self._announced
            if each.version != PROTOCOL_VERSION
        ]
        unreadable = [each.worker for each in self._announced if each.card is None]
        if wrong or unreadable:
            found = wrong or [f"the card of {worker} cannot be read" for worker in unreadable]
            raise Broken(
                f"{'; '.join(found)}; this program speaks {PROTOCOL_VERSION}",
                "run the same version of stemroute on workers and gateways",
            )
        return f"all speak protocol version {PROTOCOL_VERSION}"

    async def _digests_link(self) -> str:
        self._need_cards()
        cards = [each.card for each in self._announced if each.card is not None]
        secret = self._settings.secret.encode()
        apart = [card.worker for card in cards if card_problem(card, secret)]
        if apart:
            raise Broken(
                f"the block hashes of {', '.join(apart)} differ from those made with this secret",
                "set the same STEMROUTE_SECRET for workers, gateways and this command",
            )
        self.usable = cards
        for card in cards:
            first = next(other for other in cards if other.model == card.model)
            if card.namespace != first.namespace:
                raise Broken(
                    f"{card.worker} and {first.worker} both serve {card.model}, but cannot share "
                    f"blocks: {_unlike(card.namespace, first.namespace)}",
                    "give all workers of a model the same weights, tokenizer, dtype and block size",
                )
        return "all workers hash as this secret does, and those of a model agree"

    async def _epochs_link(self) -> str:
        self._need_cards()
        told = []
        for each in self._announced:
            if each.card is not None and each.card.epoch != each.epoch:
                raise Broken(
                    f"the card of {each.worker} is of epoch {each.card.epoch}, its lease of "
                    f"{each.epoch}",
                    f"restart {each.worker}: two workers may have this name",
                )
            key = self._keys.blocks(each.worker, each.epoch)
            told.append(f"{each.worker} {await self._redis.scard(key)} blocks")
        return "one life each: " + ", ".join(told)

    async def _reports_link(self) -> str:
        self._need_cards()
        waiting = {each.worker for each in self._announced}
        heartbeat_s = self._settings.bus.heartbeat_s
        patience_s = max(self._patience_s, 3 * heartbeat_s)
        deadline = time.monotonic() + patience_s
        newest: Any = await self._redis.xrevrange(self._keys.events, count=1)
        place: bytes = newest[0][0] if newest else NO_ENTRY
        heard = 0
        while waiting and (left_s := deadline - time.monotonic()) > 0:
            block_ms = max(1, int(min(left_s, heartbeat_s) * 1000))
            answer = await self._redis.xread({self._keys.events: place}, block=block_ms)
            for _, entries in stream_entries(answer):
                for entry_id, fields in entries:
                    place = entry_id
                    heard += 1
                    with contextlib.suppress(msgspec.DecodeError):
                        waiting.discard(
                            msgspec.msgpack.decode(fields.get(b"r", b""), type=_From).worker
                        )
        if waiting:
            raise Broken(
                f"no report of {', '.join(sorted(waiting))} came within {patience_s:g} s",
                "their processes hang, are gone, or cannot reach Redis: see their logs",
            )
        return f"every worker reports ({heard} reports heard)"

    async def _workers_link(self) -> str:
        self._need_usable()
        note = ""
        for card in self.usable:
            await self.listing(card)
            health = await self._ask(card, "health")
            if health.status_code != 200:
                raise Broken(f"{card.worker} is unhealthy: {health.text}", f"restart {card.worker}")
            if unpublished := _said_in(health, "bus"):
                raise Broken(
                    f"{card.worker} cannot publish: {unpublished}",
                    "its requests are answered; let Redis take its reports",
                )
            self._reached.add(card.worker)
            if _said_in(health, "gcs_storage") == IN_MEMORY:
                note = f". {LOST_WITH_HEAD}"
        return f"{len(self.usable)} reached and healthy{note}"

    async def _blocks_link(self) -> str:
        self._need_blocks()
        for card in self.usable:
            differing = await settled(partial(self._differing_blocks, card), self._patience_s)
            if differing:
                raise Broken(
                    f"{differing} blocks that {card.worker} caches are not what Redis has of it",
                    f"its next full report corrects this; if it remains, restart {card.worker}",
                )
        return "Redis has exactly the blocks that the workers cache"

    async def _differing_blocks(self, card: WorkerCard) -> int:
        listing = await self.listing(card)
        key = self._keys.blocks(card.worker, listing.epoch)
        own = {key: listing.blocks, f"{key}:cpu": listing.cpu, f"{key}:disk": listing.disk}
        differing = 0
        for name, joined in own.items():
            held: Any = await self._redis.smembers(name)
            differing += len(set(split_hashes(joined)) ^ set(held))
        return differing

    @property
    def _redis(self) -> aioredis.Redis:
        if self._client is None or not self._redis_answers:
            raise Skip("Redis cannot be reached")
        return self._client

    async def _other_pools(self) -> list[str]:
        keys = self._redis.scan_iter(match="stem:{*}:workers", count=1000)
        return sorted(
            [_text(key).removeprefix("stem:{").removesuffix("}:workers") async for key in keys]
        )

    def _need_cards(self) -> None:
        if not self._announced:
            raise Skip("no worker is registered")

    def _need_usable(self) -> None:
        if not self.usable:
            raise Skip("no worker hashes as this secret does")

    def _need_blocks(self) -> None:
        if not self.usable or len(self._reached) < len(self.usable):
            raise Skip("not every worker was reached")


def _said_in(health: httpx.Response, field: str) -> str:
    """A field of the worker's health, such as why it cannot publish; "" where it says nothing."""
    with contextlib.suppress(ValueError, AttributeError):
        return str(health.json().get(field, ""))
    return ""


def _announced(worker: str, fields: dict[bytes, bytes]) -> Announced:
    raw = fields.get(b"card", b"")
    card, version = None, 0
    with contextlib.suppress(msgspec.DecodeError):
        version = msgspec.json.decode(raw, type=_Version).version
        card = msgspec.json.decode(raw, type=WorkerCard)
    return Announced(
        worker,
        card_number(fields.get(b"epoch", b"")),
        card_number(fields.get(b"sequence", b"")),
        version,
        card,
    )


def _unlike(one: Namespace, other: Namespace) -> str:
    return ", ".join(
        f"{name} {getattr(one, name)!r} and {getattr(other, name)!r}"
        for name in Namespace.__struct_fields__
        if getattr(one, name) != getattr(other, name)
    )


def _text(raw: bytes | str) -> str:
    return raw if isinstance(raw, str) else raw.decode()
