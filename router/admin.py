"""`/admin`: see the fleet and decisions, change the policy, flush all caches."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import msgspec

from cluster.bus_status import BusStatus
from cluster.protocol import HEADER_EXPLAIN, HEADER_REQUEST_ID, RequestError, WorkerState
from router.dispatch import Dispatcher
from router.edge import Route, admin_body, json_response
from router.encoding import EncoderInfo
from router.fleet import Fleet
from router.http_messages import Request, Response
from router.policies import PolicyError, available, parse_policy
from router.readiness import disagreeing, index_view
from router.recent_decisions import MOST_DECISIONS
from router.shadow import ShadowView
from router.worker_calls import CallFailed, WorkerCalls

FLUSH_TIMEOUT_S = 10.0
"""Time for every worker to flush and for the new epochs to arrive over the bus."""


class PolicyAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The current policy, and the names of all policies."""

    policy: str
    available: list[str]


class PolicyChange(msgspec.Struct, frozen=True):
    """Body of `POST /admin/policy`."""

    policy: str


class FlushAnswer(msgspec.Struct, frozen=True):
    """The new epoch of every worker."""

    workers: dict[str, int]


class _Flushed(msgspec.Struct):
    """A worker's answer to `POST /admin/flush`."""

    worker: str
    epoch: int


class ShadowAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of `GET /admin/shadow`: `live` first; empty where no shadow policy is set."""

    arms: list[ShadowView]


class BusView(msgspec.Struct, frozen=True, kw_only=True):
    """State of the bus follower; `stale` and `reason` are those of `index` in `/ready`.

    warning   a problem of the bus, in words; "" where there is none
    """

    connected: bool
    stale: bool
    reason: str
    warning: str
    reports: int
    gaps: int
    disagreements: int
    repairs: int


class WorkerView(msgspec.Struct, frozen=True, kw_only=True):
    """One worker as this gateway sees it. The load includes requests that this gateway has sent.

    indexed_blocks   its blocks in this gateway's index; `cached_blocks` is from its report
    dropped_blocks   its blocks that the index dropped because it was full
    routed           requests sent to it since it appeared
    left_out         why it gets no requests although it is ready; "" if it does
    report_age_s     seconds since its last report; None before the first
    kept             its lease has expired, but it answers directly
    """

    worker: str
    epoch: int
    address: str
    model: str
    state: WorkerState
    device: str
    suspect: bool
    left_out: str
    pending_prefill_tokens: int
    running: int
    waiting: int
    free_blocks: int
    cached_blocks: int
    capacity_blocks: int
    indexed_blocks: int
    dropped_blocks: int
    routed: int
    block_size: int
    report_age_s: float | None
    kept: bool


class FleetView(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of `GET /admin/fleet`.

    refused       worker -> why it is not used
    disagreeing   worker -> how its reports differ from the blocks that it has published
    encoders      the library that encodes, for each tokenizer that requests have used
    """

    pool: str
    policy: str
    requests_total: int
    in_flight: int
    bus: BusView
    refused: dict[str, str]
    disagreeing: dict[str, str]
    encoders: list[EncoderInfo]
    workers: list[WorkerView]


@contextlib.asynccontextmanager
async def _flush_timeout() -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(FLUSH_TIMEOUT_S):
            yield
    except TimeoutError as error:
        raise RequestError(
            f"not every worker began a new epoch within {FLUSH_TIMEOUT_S:g} s: see "
            "/admin/fleet and /ready for workers that do not report",
            status=504,
            type="server_error",
            code="flush_timeout",
        ) from error


class Admin:
    """Handlers of `/admin`."""

    def __init__(
        self,
        pool: str,
        fleet: Fleet,
        dispatcher: Dispatcher,
        calls: WorkerCalls,
        bus: Callable[[], BusStatus],
        encoders: Callable[[], list[EncoderInfo]],
    ) -> None:
        self._pool = pool
        self._fleet = fleet
        self._dispatcher = dispatcher
        self._calls = calls
        self._bus = bus
        self._encoders = encoders
        self._changed = asyncio.Event()
        fleet.changed.subscribe(self._changed.set)

    def routes(self) -> list[Route]:
        """The routes."""
        return [
            Route("GET", "/admin/policy", self.get_policy),
            Route("POST", "/admin/policy", self.set_policy),
            Route("POST", "/admin/flush", self.flush),
            Route("GET", "/admin/fleet", self.get_fleet),
            Route("GET", "/admin/shadow", self.get_shadow),
            Route("GET", "/admin/decisions/{request_id}", self.get_decision),
        ]

    async def get_policy(self, request: Request) -> Response:
        return json_response(
            PolicyAnswer(policy=self._dispatcher.policy.name, available=available())
        )

    async def set_policy(self, request: Request) -> Response:
        change = admin_body(request.body, PolicyChange, '{"policy": "NAME"}', "policy")
        try:
            self._dispatcher.policy = parse_policy(change.policy)
        except PolicyError as error:
            raise RequestError(str(error), param="policy", code="unknown_policy") from error
        return await self.get_policy(request)

    async def flush(self, request: Request) -> Response:
        """Flush every worker, and wait until this gateway's index has the new epochs."""
        async with _flush_timeout():
            epochs = dict(
                await asyncio.gather(
                    *(
                        self._flush_worker(member.card.worker, member.card.address)
                        for member in self._fleet.members()
                        if member.state in ("ready", "draining")
                    )
                )
            )
            await self._know(epochs)
        return json_response(FlushAnswer(epochs))

    async def await_flush(self, request: Request) -> Response:
        """Wait until this gateway's index has the epochs of the FlushAnswer in the body."""
        async with _flush_timeout():
            await self._know(msgspec.json.decode(request.body, type=FlushAnswer).workers)
        return json_response({})

    async def get_fleet(self, request: Request) -> Response:
        return json_response(self.view())

    async def get_shadow(self, request: Request) -> Response:
        return json_response(ShadowAnswer(arms=self._dispatcher.shadows.views()))

    async def get_decision(self, request: Request) -> Response:
        kept = self._dispatcher.recent.find(request.argument)
        if kept is None:
            raise RequestError(
                f"no decision is kept for the request {request.argument!r}: send requests with the "
                f"header `{HEADER_EXPLAIN}: 1` and ask for the response's `{HEADER_REQUEST_ID}`; "
                f"this gateway keeps the latest {MOST_DECISIONS:,}",
                status=404,
                code="decision_not_kept",
            )
        return json_response(msgspec.Raw(kept))

    def view(self) -> FleetView:
        """The fleet now."""
        fleet, status = self._fleet, self._bus()
        index = index_view(fleet, status)
        return FleetView(
            pool=self._pool,
            policy=self._dispatcher.policy.name,
            requests_total=fleet.requests_total,
            in_flight=fleet.in_flight,
            bus=msgspec.convert(
                msgspec.structs.replace(status, stale=index.stale, reason=index.reason),
                BusView,
                from_attributes=True,
            ),
            refused={**status.refused, **fleet.refused()},
            disagreeing=disagreeing(fleet, status),
            encoders=self._encoders(),
            workers=self._workers(status),
        )

    def _workers(self, status: BusStatus) -> list[WorkerView]:
        views = []
        for member in self._fleet.members():
            card, load = member.card, self._fleet.load_of(member)
            views.append(
                WorkerView(
                    worker=card.worker,
                    epoch=card.epoch,
                    address=card.address,
                    model=card.model,
                    state=member.state,
                    device=card.device,
                    suspect=member.suspect_until > 0,
                    left_out=member.left_out,
                    pending_prefill_tokens=load.pending_prefill_tokens,
                    running=load.running,
                    waiting=load.waiting,
                    free_blocks=load.free_blocks,
                    cached_blocks=load.cached_blocks,
                    capacity_blocks=card.capacity_blocks,
                    indexed_blocks=self._fleet.index.count(member.slot),
                    dropped_blocks=self._fleet.index.dropped(member.slot),
                    routed=member.routed,
                    block_size=card.namespace.block_size,
                    report_age_s=status.report_ages_s.get(card.worker),
                    kept=card.worker in status.kept,
                )
            )
        return views

    async def _know(self, epochs: dict[str, int]) -> None:
        """Wait until the index has every worker's new epoch."""
        while True:
            # cleared before the check, so that no change is missed
            self._changed.clear()
            if not self._outdated(epochs):
                return
            await self._changed.wait()

    def _outdated(self, epochs: dict[str, int]) -> list[str]:
        """Present workers whose new epoch has not arrived yet."""
        return [
            member.card.worker
            for member in self._fleet.members()
            if member.card.epoch < epochs.get(member.card.worker, 0)
        ]

    async def _flush_worker(self, worker: str, address: str) -> tuple[str, int]:
        url = f"{address}/admin/flush"
        try:
            flushed = await self._calls.ask("POST", url, _Flushed, FLUSH_TIMEOUT_S)
        except CallFailed as failed:
            raise RequestError(
                f"the worker {worker} was not flushed: {failed}",
                status=502,
                type="server_error",
                code="flush_failed",
            ) from failed
        return worker, flushed.epoch
