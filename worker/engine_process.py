"""The engine in a process of its own, so that streaming responses never hold its GIL.

    python -m worker.engine_process

The first line of standard input says how to build the engine. The pipe then stays open as long as
the server lives. When it closes, however the server ended, this process ends too.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
import threading
import time
from concurrent.futures import Future

import msgspec
import zmq

from cluster.blocks import join_hashes
from cluster.protocol import Load, RequestError
from cluster.settings import WorkerSettings
from worker.build import build_engine
from worker.engine import EngineCore
from worker.messages import (
    Add,
    ApplyWeights,
    Blocks,
    Cancel,
    Changes,
    Died,
    EngineInfo,
    Flush,
    Flushed,
    GetBlocks,
    GetStats,
    NotDone,
    Output,
    Pin,
    Pinned,
    PrepareWeights,
    Ready,
    Refused,
    StartEngine,
    Stats,
    Stepped,
    Stop,
    ToEngine,
    WeightsLoaded,
    WeightsPrepared,
    decode_to_engine,
    encode,
)
from worker.models import ModelError
from worker.new_weights import Prepared, WeightChange
from worker.prefill_speed import PrefillSpeed

log = logging.getLogger("worker.engine")

SIGN_OF_LIFE_MS = 500
NICENESS_ON_CPU = 5
"""Niceness of an engine on the CPU: servers and gateways on the same cores go first, because they
need little time and whole answers wait for them."""

LOADING_POLL_MS = 20
TIER_POLL_MS = 1
"""Waiting time while all work waits for blocks from a cold tier."""

SAVE_POLL_S = 0.001

DEAD_STEPS_TO_GIVE_UP = 3
"""After this many steps in a row in which nothing could be computed, the process ends and the
worker is replaced."""


class EngineLoop:
    """Takes messages, steps the engine, reports what happened."""

    def __init__(
        self,
        core: EngineCore,
        info: EngineInfo,
        settings: WorkerSettings,
        socket: zmq.Socket[bytes],
    ) -> None:
        self._core = core
        self._info = info
        self._settings = settings
        self._socket = socket
        self._change: tuple[int, WeightChange, Future[Prepared]] | None = None
        self._prepared: tuple[WeightChange, Prepared] | None = None
        self._speed = PrefillSpeed(info.prefill)
        self._refused: list[Refused] = []
        self._stopped = False

    def run(self) -> None:
        """Run until a Stop message. Raises RuntimeError when nothing can be computed any more."""
        while not self._stopped:
            idle = not self._core.has_work()
            wait_ms = SIGN_OF_LIFE_MS if self._change is None else LOADING_POLL_MS
            if not idle:
                wait_ms = TIER_POLL_MS if self._core.waits_for_loads() else 0
            heard = self._take_messages(wait_ms)
            if self._change is not None and self._change[2].done():
                self._take_prepared(*self._change)
                self._change = None
            if self._core.has_work():
                self._step()
            elif heard or idle:
                self._core.expire(time.monotonic())
                self._tell([])
        self._save()

    def _save(self) -> None:
        seconds, tiers = self._settings.save_timeout_s, self._core.tiers
        if tiers is not None and tiers.disk.capacity and seconds:
            self._tell(self._core.fail_all("the worker was stopped"))  # they wait no longer
            saved, cached = self._core.save(seconds, time.monotonic, _a_moment)
            log.info("%d of %d cached blocks were written to disk", saved, cached)

    def _take_messages(self, wait_ms: int) -> bool:
        if not self._socket.poll(wait_ms):
            return False
        while True:
            try:
                raw = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return True
            self._take(decode_to_engine(raw))

    def _take(self, message: ToEngine) -> None:
        core = self._core
        match message:
            case Add(request):
                try:
                    core.add(request)
                except RequestError as error:
                    self._refused.append(
                        Refused(
                            request_id=request.request_id,
                            message=error.message,
                            status=error.status,
                            type=error.type,
                            param=error.param,
                            code=error.code,
                        )
                    )
            case Cancel(request_id):
                core.cancel(request_id)
            case Flush(ticket):
                self._tell([])  # earlier changes belong to the old epoch
                core.flush()
                changes = core.take_changes()  # all evictions, implied by the new epoch
                self._send(Flushed(ticket=ticket, received=changes.received, load=self._load()))
            case GetBlocks(ticket):
                self._tell([])
                tiers = [] if core.tiers is None else [core.tiers.host, core.tiers.disk]
                sets = [core.cached_blocks(), *(tier.hashes() for tier in tiers)]
                self._send(Blocks(ticket, *map(join_hashes, sets)))
            case GetStats(ticket):
                self._send(Stats(ticket, core.stats(), core.eviction_ages(), core.tier_stats()))
            case Pin(ticket, namespace_root, token_ids):
                self._send(Pinned(ticket, core.pin(namespace_root, token_ids)))
            case PrepareWeights(ticket, model):
                self._prepare_weights(ticket, model)
            case ApplyWeights(ticket):
                self._apply_weights(ticket)
            case Stop():
                self._stopped = True

    def _prepare_weights(self, ticket: int, path: str) -> None:
        if self._change is not None:
            self._send(NotDone(ticket, "new weights are already being loaded"))
            return
        self._prepared = None
        try:
            change = WeightChange(self._core, self._info, self._settings)
        except ModelError as error:
            self._send(NotDone(ticket, str(error)))
            return
        self._change = ticket, change, change.prepare(path)

    def _take_prepared(self, ticket: int, change: WeightChange, ready: Future[Prepared]) -> None:
        try:
            self._prepared = change, ready.result()
        except Exception as error:  # any error of a file: the old weights stay
            unforeseen = None if isinstance(error, ModelError) else error
            log.warning("the new weights cannot be used: %s", error, exc_info=unforeseen)
            self._send(NotDone(ticket, str(error) or repr(error)))
            return
        self._send(WeightsPrepared(ticket))

    def _apply_weights(self, ticket: int) -> None:
        if self._prepared is None:
            self._send(NotDone(ticket, "no weights were prepared"))
            return
        (change, prepared), self._prepared = self._prepared, None
        self._info, outputs = change.apply(prepared)
        # Send the failures without the cache changes, which the end of the epoch implies.
        changes, load = self._core.take_changes(), self._load()
        nothing = Changes(stored=[], evicted=[], received=[])
        self._send(Stepped(outputs=outputs, refused=[], changes=nothing, load=load))
        change.open_disk(self._info)  # before the worker is ready, as it may take seconds
        self._send(
            WeightsLoaded(ticket=ticket, info=self._info, received=changes.received, load=load)
        )
        log.info("serving new weights, digest %s", self._info.model.namespace.weights[:16])

    def _step(self) -> None:
        failed_before = self._core.stats().failed_steps
        began_s = time.perf_counter()
        outputs = self._core.step(time.monotonic())
        ended_s = time.perf_counter()
        if self._core.stats().failed_steps > failed_before:
            self._speed.interrupted()
            log.error("a step failed", exc_info=self._core.last_failure)
        else:
            self._speed.observe(self._core.last_work, began_s, ended_s)
            if self._core.tiers is not None and self._speed.speed.s_per_token:
                self._core.tiers.set_prefill_speed(*self._speed.speed)
        self._tell(outputs)
        if self._core.dead_steps >= DEAD_STEPS_TO_GIVE_UP:
            raise RuntimeError(
                f"{self._core.dead_steps} steps in a row have failed: {self._core.last_failure!r}"
            )

    def _tell(self, outputs: list[Output]) -> None:
        refused, self._refused = self._refused, []
        self._send(
            Stepped(
                outputs=outputs,
                refused=refused,
                changes=self._core.take_changes(),
                load=self._load(),
            )
        )

    def _load(self) -> Load:
        return msgspec.structs.replace(
            self._core.load(),
            prefill_s_per_token=self._speed.speed.s_per_token,
            prefill_s_per_pair=self._speed.speed.s_per_pair,
        )

    def _send(self, message: object) -> None:
        self._socket.send(encode(message))


def _a_moment() -> None:
    time.sleep(SAVE_POLL_S)


def _end_with_parent() -> None:
    """Block until the server's end of the pipe closes, then end at once."""
    while os.read(0, 1):  # not sys.stdin: its lock would be held when the interpreter ends
        pass
    os._exit(0)


def main() -> None:
    """Entry point of the process."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    start = msgspec.json.decode(sys.stdin.buffer.readline(), type=StartEngine)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    context = zmq.Context()
    socket: zmq.Socket[bytes] = context.socket(zmq.PAIR)
    socket.set_hwm(0)
    socket.connect(start.socket)
    try:
        core, info = build_engine(start.settings)
        if info.device == "cpu":
            os.nice(NICENESS_ON_CPU)
        gc.collect()
        gc.freeze()  # or each full collection scans the model's objects for tens of ms
        socket.send(encode(Ready(info)))
        EngineLoop(core, info, start.settings, socket).run()
    except Exception as error:
        log.exception("the engine failed and ends")
        socket.send(encode(Died(f"{type(error).__name__}: {error}")))
        socket.close(linger=2000)
        context.term()
        sys.exit(1)
    socket.close(linger=0)
    context.term()


if __name__ == "__main__":
    main()
