"""A worker's state: its engine process, the epoch of its cache, and what it publishes of itself."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterator

from cluster.blocks import Namespace
from cluster.bus import Publisher
from cluster.protocol import Load, WorkerCard
from cluster.settings import Settings
from worker.engine import Changes
from worker.engine_client import EngineClient
from worker.messages import EngineInfo

log = logging.getLogger(__name__)

PROBE_S = 1.0
"""A silent engine is looked at so often; its end is an event."""


class WorkerService:
    """A worker from start to end; `worker.server` gives it an HTTP face.

        load() ──▶ starting ──announce()──▶ ready ──drain()──▶ draining ──close()──▶ gone
                                             └─ engine ends ─▶ failed

    name   unique in the pool while it lives; a later life under the same name is a new epoch
    """

    def __init__(self, settings: Settings, name: str) -> None:
        if not settings.redis_url:
            raise ValueError("a worker needs redis_url (STEMROUTE_REDIS_URL): where it publishes")
        self.settings = settings
        self.name = name
        self.engine = EngineClient(settings.worker, self._on_changes, self._on_flushed)
        self.publisher = Publisher(settings.redis_url, settings.pool, settings.bus)
        self.url = ""
        self._info: EngineInfo | None = None
        self._epoch = 0
        self._tasks: list[asyncio.Task[None]] = []
        self._idle = asyncio.Event()
        self._idle.set()
        self._in_flight = 0
        self._draining = False
        self._early: list[tuple[Changes, Load]] = []

    @property
    def info(self) -> EngineInfo:
        """What the engine is. Raises RuntimeError before it is ready."""
        if self._info is None:
            raise RuntimeError("the worker has not started yet")
        return self._info

    @property
    def epoch(self) -> int:
        """The life of the cache that is published now."""
        return self._epoch

    @property
    def secret(self) -> bytes:
        """The pool's secret, part of every block hash."""
        return self.settings.secret.encode()

    def problem(self) -> str:
        """Why the worker cannot serve, in words; "" where it can."""
        if self._info is None:
            return "the worker is starting"
        if self._draining:
            return "the worker is draining"
        if self.publisher.status.superseded:
            return self.publisher.status.reason
        return self.engine.problem()

    async def load(self) -> EngineInfo:
        """Start the engine and load its model. Raises EngineDead where it cannot."""
        self._info = await self.engine.start()
        return self._info

    def announce(self, url: str) -> None:
        """Publish the card: gateways may send requests to `url` from now on."""
        self.url = url
        self._begin_epoch()
        for changes, load in self._early:
            self._on_changes(changes, load)
        self._early.clear()
        self._tasks = [
            asyncio.create_task(self.publisher.run(), name="publisher"),
            asyncio.create_task(self._watch_engine(), name="engine watch"),
        ]
        log.info("worker %s serves %s at %s", self.name, self.info.model.model, url)

    async def flush(self) -> int:
        """Empty the cache, begin a new epoch and return it."""
        await self.engine.flush()
        return self._epoch

    @contextlib.contextmanager
    def serving(self) -> Iterator[None]:
        """Counts a request as in flight, for draining."""
        self._in_flight += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._in_flight -= 1
            if self._in_flight == 0:
                self._idle.set()

    async def drain(self) -> None:
        """Take no more requests and wait for those in flight, but not for ever."""
        self._draining = True
        if self._epoch and not self.engine.problem():
            self.publisher.set_state("draining")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.settings.worker.drain_timeout_s):
                    await self._idle.wait()

    async def close(self) -> None:
        """Sign off and end the engine. Requests in flight fail."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        if self._epoch:
            await self.publisher.leave()
        await self.engine.stop()
        await self.publisher.close()

    def _begin_epoch(self) -> None:
        info, settings = self.info, self.settings
        namespace: Namespace = info.model.namespace
        self._epoch = max(time.time_ns(), self._epoch + 1)
        self.publisher.begin(
            WorkerCard(
                worker=self.name,
                epoch=self._epoch,
                address=self.url,
                model=info.model.model,
                namespace=namespace,
                namespace_check=namespace.check(self.secret),
                capacity_blocks=info.capacity_blocks,
                context_tokens=info.context_tokens,
                max_batch_size=info.max_batch_size,
                token_budget=info.token_budget,
                device=info.device,
                state="draining" if self._draining else "ready",
            )
        )
        self.publisher.update(load=Load(free_blocks=info.capacity_blocks))
        log.info("pool %s, worker %s: epoch %d", settings.pool, self.name, self._epoch)

    def _on_changes(self, changes: Changes, load: Load) -> None:
        if not self._epoch:
            self._early.append((changes, load))
            return
        self.publisher.update(
            load=load,
            stored=changes.stored,
            evicted=changes.evicted,
            received=changes.received,
        )

    def _on_flushed(self, received: list[str], load: Load) -> None:
        self._begin_epoch()
        self.publisher.update(load=load, received=received)

    async def _watch_engine(self) -> None:
        """Tell routers at once when the engine ends; Ray learns it from the health check."""
        while not (problem := self.engine.problem()):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PROBE_S):
                    await self.engine.ended.wait()
        log.error("worker %s: %s", self.name, problem)
        self.publisher.set_state("failed")
