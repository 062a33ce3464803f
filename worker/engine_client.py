"""The server's side of the engine process: start it, talk to it, detect its end."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Callable

import msgspec
import zmq
import zmq.asyncio

from cluster.blocks import split_hashes
from cluster.pool_record import GivenWeights
from cluster.protocol import Load, RequestError
from cluster.settings import WorkerSettings
from worker.messages import (
    Add,
    ApplyWeights,
    Blocks,
    Cancel,
    Changes,
    Died,
    EngineInfo,
    EngineRequest,
    Flush,
    Flushed,
    FromEngine,
    GetBlocks,
    GetStats,
    NotDone,
    Output,
    Pin,
    Pinned,
    PrepareWeights,
    Ready,
    StartEngine,
    Stats,
    Stepped,
    Stop,
    WeightsLoaded,
    WeightsPrepared,
    decode_from_engine,
    encode,
)
from worker.owned_folder import OwnedFolder
from worker.silence import Silence, is_stopped

log = logging.getLogger(__name__)

TICK_S = 0.25
"""Interval between checks for the end and for the silence of the engine."""

OnChanges = Callable[[Changes, Load], None]
OnFlushed = Callable[[list[str], Load], None]
OnWeights = Callable[[EngineInfo, list[str], Load], None]


class EngineDead(RuntimeError):
    """The engine process has ended or does not respond. The message gives the reason, if known."""


class NotPossible(RuntimeError):
    """The engine could not do what was requested and continues as before. The message says why."""


class EngineClient:
    """One engine process. Call `start` first and `stop` last.

    on_changes   called for every change of cache and load, in order
    on_flushed   called when a new epoch begins, in the same order
    on_weights   called when a new model, and with it a new epoch, begins, in the same order
    changed      set when `problem` has changed

    An engine that sends nothing for too long is stalled: all waiting calls fail. If it sends
    something again, it can be used again.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        on_changes: OnChanges,
        on_flushed: OnFlushed,
        on_weights: OnWeights,
    ) -> None:
        self._settings = settings
        self._on_changes = on_changes
        self._on_flushed = on_flushed
        self._on_weights = on_weights
        self._process: subprocess.Popen[bytes] | None = None
        self._folder: OwnedFolder | None = None
        self._context: zmq.asyncio.Context | None = None
        self._socket: zmq.asyncio.Socket | None = None
        self._reader: asyncio.Task[None] | None = None
        self._queues: dict[str, asyncio.Queue[Output | Exception]] = {}
        self._answers: dict[int, asyncio.Future[object]] = {}
        self._tickets = itertools.count(1)
        self._loading: set[int] = set()  # tickets of the calls that load weights
        self._silence: Silence | None = None  # None: the model is being loaded
        self._dead = ""
        self._stalled = ""
        self.changed = asyncio.Event()
        self._info: EngineInfo | None = None

    @property
    def pid(self) -> int:
        """Process id of the engine."""
        assert self._process is not None, "start() first"
        return self._process.pid

    @property
    def running(self) -> int:
        """Requests that have not ended."""
        return len(self._queues)

    def problem(self) -> str:
        """Why the engine cannot be used now; "" if it can."""
        if self._dead:
            return self._dead
        if self._process is None:
            return "the engine has not been started"
        code = self._process.poll()
        if code is not None:
            return f"the engine process has ended with exit code {code}"
        return self._stalled

    async def start(self, weights: GivenWeights | None = None) -> EngineInfo:
        """Start the process and load the model; `weights` replaces that of the settings.

        Raises EngineDead if it ends before that.
        """
        self._folder = OwnedFolder("stemroute-engine-")
        address = f"ipc://{self._folder.path / 'engine'}"
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.set_hwm(0)
        self._socket.bind(address)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        self._process = await asyncio.to_thread(
            subprocess.Popen,
            [sys.executable, "-m", "worker.engine_process"],
            stdin=subprocess.PIPE,
            env=environment,
        )
        assert self._process.stdin is not None
        settings = self._settings
        if weights is not None:
            settings = msgspec.structs.replace(
                settings, model=weights.model, served_name=weights.name
            )
        start = StartEngine(socket=address, settings=settings)
        self._process.stdin.write(msgspec.json.encode(start) + b"\n")
        self._process.stdin.flush()
        ready = asyncio.get_running_loop().create_future()
        self._answers[0] = ready
        self._reader = asyncio.create_task(self._read())
        info = self._info = await ready
        self._remove_folder()  # both ends are connected, so the socket file is not needed any more
        assert isinstance(info, EngineInfo)
        self._silence = Silence(settings.stall_timeout_s, info.token_budget, info.context_tokens)
        return info

    async def generate(self, request: EngineRequest) -> AsyncGenerator[Output, None]:
        """Run a request. Leaving the iteration early cancels it.

        Raises RequestError if the engine refuses it, EngineDead if the engine ends or stalls.
        """
        self._raise_if_dead()
        if request.request_id in self._queues:
            raise RequestError(f"the request id {request.request_id} is in use", status=409)
        queue: asyncio.Queue[Output | Exception] = asyncio.Queue()
        self._queues[request.request_id] = queue
        ended = False
        try:
            await self._send(Add(request))
            while not ended:
                item = await queue.get()
                if isinstance(item, Exception):
                    ended = not isinstance(item, EngineDead)  # a stalled engine may come back
                    raise item
                ended = bool(item.finish_reason)
                yield item
        finally:
            del self._queues[request.request_id]
            if not ended and not self._dead:
                with contextlib.suppress(zmq.ZMQError):
                    self._send_now(Cancel(request.request_id))

    async def flush(self) -> None:
        """Empty the cache; `on_flushed` has been called when this returns."""
        await self._ask(Flush(next(self._tickets)))

    async def blocks(self) -> list[bytes]:
        """Hashes of all blocks cached on the device now, from the engine itself."""
        return split_hashes((await self.listing()).joined)

    async def listing(self) -> Blocks:
        """The same joined, and the hashes of the cold tiers."""
        blocks = await self._ask(GetBlocks(next(self._tickets)))
        assert isinstance(blocks, Blocks)
        return blocks

    async def stats(self) -> Stats:
        """The engine's counts."""
        stats = await self._ask(GetStats(next(self._tickets)))
        assert isinstance(stats, Stats)
        return stats

    async def pin(self, namespace_root: bytes, token_ids: bytes) -> int:
        """Protect a prompt's cached blocks from eviction. Returns how many tokens are pinned."""
        tokens = await self._ask(Pin(next(self._tickets), namespace_root, token_ids))
        assert isinstance(tokens, int)
        return tokens

    async def prepare_weights(self, model: str) -> None:
        """Read another model into memory while requests run.

        Raises NotPossible if the model cannot be used.
        """
        await self._load(PrepareWeights(next(self._tickets), model))

    async def apply_weights(self) -> None:
        """Switch to the prepared model; `on_weights` has been called when this returns.

        Running requests fail.
        """
        await self._load(ApplyWeights(next(self._tickets)))

    async def _load(self, message: PrepareWeights | ApplyWeights) -> None:
        self._loading.add(message.ticket)
        try:
            await self._ask(message)
        finally:
            self._loading.discard(message.ticket)

    async def stop(self) -> None:
        """End the process, by force if it does not stop or is stalled. Running requests fail."""
        if self._process is None:
            return
        self._silence = None
        if self._stalled or is_stopped(self._process.pid):
            self._process.kill()
        elif self._process.poll() is None and self._socket is not None and not self._dead:
            with contextlib.suppress(zmq.ZMQError):
                await self._send(Stop())
        assert self._process.stdin is not None
        try:
            saving_s = self._settings.save_timeout_s if self._settings.disk_tier_gb else 0.0
            await asyncio.to_thread(self._process.wait, 5 + saving_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._die("the engine has been stopped")
        if self._reader is not None:
            self._reader.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._reader
        if self._socket is not None and self._context is not None:
            self._socket.close(linger=0)
            self._context.term()
        self._remove_folder()

    def _remove_folder(self) -> None:
        if self._folder is not None:
            self._folder.remove()

    async def _read(self) -> None:
        assert self._socket is not None
        assert self._process is not None
        while True:
            began_s = time.monotonic()
            heard = await self._socket.poll(int(TICK_S * 1000))
            waited_s = time.monotonic() - began_s
            late = waited_s > 2 * TICK_S  # this process itself was stopped or had no CPU time
            if self._silence is not None and not late:
                self._silence.waited(waited_s, busy=bool(self._queues))
            if heard:
                self._hear(decode_from_engine(await self._socket.recv()))
                continue
            code = self._process.poll()
            if code is not None:
                self._die(f"the engine process has ended with exit code {code}")
                return
            if not late:
                self._look_at_silence(self._process.pid)

    def _hear(self, message: FromEngine) -> None:
        stalled, self._stalled = self._stalled, ""
        self._take(message)
        if self._silence is not None:
            load = message.load if isinstance(message, Stepped) else None
            self._silence.heard(load, stalled=bool(stalled))
        if stalled:
            log.warning("the engine has come back after: %s", stalled)
            self.changed.set()

    def _look_at_silence(self, pid: int) -> None:
        if self._silence is None or self._stalled:
            return
        problem = self._silence.problem(pid, busy=bool(self._queues), loading=bool(self._loading))
        if problem:
            self._stalled = problem
            self._fail_waiting(problem)

    def _take(self, message: FromEngine) -> None:
        match message:
            case Stepped():
                self._on_changes(message.changes, message.load)
                for output in message.outputs:
                    if queue := self._queues.get(output.request_id):
                        queue.put_nowait(output)
                for refused in message.refused:
                    if queue := self._queues.get(refused.request_id):
                        queue.put_nowait(
                            RequestError(
                                refused.message,
                                status=refused.status,
                                type=refused.type,
                                param=refused.param,
                                code=refused.code,
                            )
                        )
            case Flushed(ticket=ticket):
                self._on_flushed(message.received, message.load)
                self._answer(ticket, None)
            case Blocks(ticket):
                self._answer(ticket, message)
            case Stats(ticket):
                self._answer(ticket, message)
            case Pinned(ticket, tokens):
                self._answer(ticket, tokens)
            case WeightsPrepared(ticket):
                self._answer(ticket, None)
            case WeightsLoaded(ticket=ticket):
                self._on_weights(message.info, message.received, message.load)
                self._answer(ticket, None)
            case NotDone(ticket, reason):
                self._answer(ticket, NotPossible(reason))
            case Ready(info):
                self._answer(0, info)
            case Died(reason):
                self._die(f"the engine has failed: {reason}")

    def _answer(self, ticket: int, value: object) -> None:
        future = self._answers.pop(ticket, None)
        if future is None or future.done():
            return
        if isinstance(value, NotPossible):
            future.set_exception(value)
        else:
            future.set_result(value)

    def _die(self, reason: str) -> None:
        """Fail all waiting calls with the reason why the engine is gone."""
        if not self._dead:
            self._dead = reason
            self._fail_waiting(reason)

    def _fail_waiting(self, reason: str) -> None:
        for queue in self._queues.values():
            queue.put_nowait(EngineDead(reason))
        for future in self._answers.values():
            if not future.done():
                future.set_exception(EngineDead(reason))
        self._answers.clear()
        self.changed.set()

    def _raise_if_dead(self) -> None:
        problem = self.problem()
        if problem:
            raise EngineDead(problem)

    async def _ask(
        self, message: Flush | GetBlocks | GetStats | Pin | PrepareWeights | ApplyWeights
    ) -> object:
        self._raise_if_dead()
        future: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        self._answers[message.ticket] = future
        await self._send(message)
        return await future

    async def _send(self, message: object) -> None:
        assert self._socket is not None
        await self._socket.send(encode(message))

    def _send_now(self, message: object) -> None:
        """Send without awaiting: the socket has no high-water mark."""
        assert self._socket is not None
        future = self._socket.send(encode(message), zmq.NOBLOCK)
        if isinstance(future, asyncio.Future):
            future.add_done_callback(lambda f: f.cancelled() or f.exception())
