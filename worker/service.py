"""A worker's state: its engine process, the epoch of its cache, and what it publishes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterator
from typing import Any

from redis.exceptions import RedisError
from tokenizers import Tokenizer

from cluster.blocks import Namespace
from cluster.bus import Publisher
from cluster.pool_record import GivenWeights, PoolRecord
from cluster.protocol import Load, RequestError, WorkerCard
from cluster.redis_client import trouble
from cluster.settings import Settings
from worker.engine_client import EngineClient, NotPossible
from worker.messages import Changes, EngineInfo
from worker.warmup import WarmupError, warm_up

log = logging.getLogger(__name__)

RECORD_RETRY_S = 1.0
"""Interval between attempts to read or write the pool's record in Redis."""


class WorkerService:
    """A worker from start to end; `worker.server` is its HTTP interface.

        load() ──▶ starting ──announce()──▶ ready ──drain()──▶ draining ──close()──▶ gone
                                            ▲   │ engine ends or stalls
                           it sends again ──┴── failed

    name          unique in the pool while it runs; a restart under the same name is a new epoch
    gcs_storage   where the Ray cluster that runs this worker keeps its state, told in `/health`;
                  "" without Ray
    """

    def __init__(self, settings: Settings, name: str) -> None:
        if not settings.redis_url:
            raise ValueError(
                "a worker needs the address of Redis: set redis_url (STEMROUTE_REDIS_URL)"
            )
        self.settings = settings
        self.name = name
        self.engine = EngineClient(
            settings.worker, self._on_changes, self._on_flushed, self._on_weights
        )
        self.publisher = Publisher(settings.redis_url, settings.pool, settings.bus)
        self.url = ""
        self.gcs_storage = ""
        self._info: EngineInfo | None = None
        self._epoch = self._epoch_floor = 0
        self._tasks: list[asyncio.Task[Any]] = []
        self._idle = asyncio.Event()
        self._idle.set()
        self._in_flight = 0
        self._draining = False
        self._replacing = False
        self._record = PoolRecord(settings.redis_url, settings.pool, timeout_s=settings.bus.lease_s)
        self._changing = asyncio.Lock()
        self._recording: asyncio.Task[None] | None = None
        self._tokenizer: Tokenizer | None = None
        self._early: list[tuple[Changes, Load]] = []

    @property
    def info(self) -> EngineInfo:
        """Description of the engine. Raises RuntimeError before it is ready."""
        if self._info is None:
            raise RuntimeError("the worker is not ready yet")
        return self._info

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        if self._tokenizer is None:
            self._tokenizer = Tokenizer.from_str(self.info.model.tokenizer_json)
        return self._tokenizer

    @property
    def epoch(self) -> int:
        """The current epoch of the cache."""
        return self._epoch

    @property
    def secret(self) -> bytes:
        """The pool's secret, part of every block hash."""
        return self.settings.secret.encode()

    def problem(self) -> str:
        """Why the worker cannot serve; "" if it can."""
        if self._info is None:
            return "the worker is starting"
        if self._draining:
            return "the worker is draining"
        if self._replacing:
            return "the worker is loading new weights"
        return self.failure()

    def failure(self) -> str:
        """Why the worker has to be replaced; "" if it serves, or will without help."""
        if self.publisher.status.superseded:
            return self.publisher.status.reason
        return self.engine.problem()

    async def load(self) -> EngineInfo:
        """Start the engine, load its model and warm up.

        Raises EngineDead if that fails, WarmupError if the warm-up file cannot be used.
        """
        info = await self.engine.start(await self._look_up())
        await self._warm_up(info)
        self._info = info
        return info

    def announce(self, url: str) -> None:
        """Publish the card, so that gateways send requests to `url`."""
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
        """Flush the cache, begin a new epoch and return it."""
        await self.engine.flush()
        return self._epoch

    async def load_weights(self, model: str, *, pool: bool) -> int:
        """Run `change_weights` to its end, even if the caller is cancelled."""
        task = asyncio.create_task(self.change_weights(model, pool=pool), name="new weights")
        self._tasks.append(task)
        task.add_done_callback(self._forget_task)
        return await asyncio.shield(task)

    async def change_weights(self, model: str, *, pool: bool) -> int:
        """Serve another model of the same architecture under the same name; return its epoch.

        The worker serves while the model is read. Then it rejects new requests and lets running
        ones end within the time limit of a drain; the rest fails with the reason. With `pool` the
        model is recorded in Redis, for workers that start later. Raises RequestError: 400 if the
        model cannot be used (without effect), 409 if weights are being loaded already.
        """
        if self._changing.locked():
            raise RequestError(
                "this worker is already loading new weights; try again when it is ready",
                status=409,
                code="weights_loading",
            )
        async with self._changing:
            try:
                await self.engine.prepare_weights(model)
            except NotPossible as error:
                raise RequestError(str(error), param="model", code="weights_refused") from error
            self._replacing = True
            self.publisher.set_state("draining")
            try:
                await self._until_idle()
                await self.engine.apply_weights()
                if pool:
                    self._record_weights(model)
                await self._warm_up(self.info)
            except WarmupError as error:
                log.error("warm-up failed; serving the new weights without it: %s", error)
            finally:
                self._replacing = False
                if not self._draining and not self.engine.problem():
                    self.publisher.set_state("ready")
            if self._recording is not None:
                await asyncio.wait({self._recording}, timeout=RECORD_RETRY_S)
        return self._epoch

    async def _look_up(self) -> GivenWeights | None:
        """Read from Redis: weights that replace those in the settings, and the last epoch under
        this name, which the next one must exceed even if the clock was set back.

        Waits for Redis, without which no gateway would find the worker.
        """
        while True:
            try:
                self._epoch_floor = await self._record.last_epoch(self.name)
                given = await self._record.weights(self.settings.worker.model)
            except (RedisError, OSError, TimeoutError) as error:
                log.warning(
                    "cannot read the pool's weights from Redis, retrying: %s", trouble(error)
                )
                await asyncio.sleep(RECORD_RETRY_S)
                continue
            if given is not None:
                log.info("loading %s, to which the pool was reloaded", given.model)
            return given

    def _record_weights(self, model: str) -> None:
        """Record the pool's weights in Redis in the background, instead of earlier ones."""
        if self._recording is not None:
            self._recording.cancel()
        self._recording = asyncio.create_task(self._remember(model), name="record")

    async def _remember(self, model: str) -> None:
        given = GivenWeights(model=model, name=self.info.model.model)
        while True:
            try:
                await self._record.give_weights(self.settings.worker.model, given)
                return
            except (RedisError, OSError, TimeoutError) as error:
                log.warning(
                    "cannot store the pool's weights in Redis, retrying: %s", trouble(error)
                )
                await asyncio.sleep(RECORD_RETRY_S)

    def _forget_task(self, task: asyncio.Task[int]) -> None:
        if task in self._tasks:
            self._tasks.remove(task)
        if not task.cancelled() and task.exception() is not None:
            log.warning("the weights were not changed: %s", task.exception())

    async def _warm_up(self, info: EngineInfo) -> None:
        path = self.settings.worker.warmup_file
        if path:
            await warm_up(self.engine, info.model, self.secret, path)

    async def _until_idle(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.settings.worker.drain_timeout_s):
                await self._idle.wait()

    @contextlib.contextmanager
    def serving(self) -> Iterator[None]:
        """Count a request as in flight, for draining."""
        self._in_flight += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._in_flight -= 1
            if self._in_flight == 0:
                self._idle.set()

    async def drain(self) -> None:
        """Take no more requests and wait for those in flight, up to a time limit."""
        self._draining = True
        if self._epoch and not self.engine.problem():
            self.publisher.set_state("draining")
            await self._until_idle()

    async def close(self) -> None:
        """Remove the card and end the engine. Requests in flight fail."""
        tasks, self._tasks = list(self._tasks), []
        if self._recording is not None:
            tasks.append(self._recording)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._epoch:
            await self.publisher.leave()
        await self.engine.stop()
        await self.publisher.close()
        await self._record.close()

    def _begin_epoch(self) -> None:
        info, settings = self.info, self.settings
        namespace: Namespace = info.model.namespace
        self._epoch = max(time.time_ns(), self._epoch + 1, self._epoch_floor + 1)
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
                state="draining" if self._draining or self._replacing else "ready",
            )
        )
        self.publisher.update(
            load=Load(
                free_blocks=info.capacity_blocks,
                prefill_s_per_token=info.prefill.s_per_token,
                prefill_s_per_pair=info.prefill.s_per_pair,
            )
        )
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
            cold=changes.cold,
        )

    def _on_flushed(self, received: list[str], load: Load) -> None:
        self._begin_epoch()
        self.publisher.update(load=load, received=received)

    def _on_weights(self, info: EngineInfo, received: list[str], load: Load) -> None:
        self._info, self._tokenizer = info, None
        self._begin_epoch()
        self.publisher.update(load=load, received=received)

    async def _watch_engine(self) -> None:
        """Tell routers at once when the engine fails, or has come back; Ray learns it from the
        health check."""
        while True:
            problem = self.engine.problem()
            if problem:
                log.error("worker %s: %s", self.name, problem)
                self.publisher.set_state("failed")
            else:
                unready = self._draining or self._replacing
                self.publisher.set_state("draining" if unready else "ready")
            await self.engine.changed.wait()
            self.engine.changed.clear()
