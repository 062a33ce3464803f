"""The gateway: one OpenAI endpoint before a pool of workers."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import sys
import time
from collections.abc import Callable
from typing import Literal, Protocol

import aiohttp
import msgspec

from cluster.bus_status import BusStatus
from cluster.metric_definition import CONTENT_TYPE
from cluster.protocol import ModelInfo, WorkerCard, pool_token
from cluster.settings import GatewaySettings, Settings
from router.admin import Admin
from router.admission import Admission, no_worker
from router.background import SWITCH_INTERVAL_S, Background
from router.combined import Combined
from router.counts import ConnectionCounts, RequestCounts
from router.dispatch import Dispatcher
from router.edge import Edge, Route, json_response
from router.fleet import Fleet
from router.forwarding import Forwarder
from router.http_messages import Request, Response
from router.http_server import HttpServer
from router.liveness import HealthProbe
from router.metrics import (
    ENCODER_INFO,
    OPEN_CONNECTIONS,
    OVERLOAD_REFUSALS,
    QUEUED_REQUESTS,
    Metrics,
    encoder_samples,
)
from router.openai_api import ApiRequest, parse_chat, parse_completion, parse_either
from router.policies import parse_policy
from router.readiness import ReadyView, readiness
from router.serving import Serving
from router.shadow import Shadows, parse_shadows
from router.siblings import Siblings
from router.stalls import ANSWER_WITHIN, StallWatch
from router.tokenization import Tokenization
from router.worker_admin import WorkerAdmin
from router.worker_calls import WorkerCalls
from router.worker_connections import WorkerConnections

log = logging.getLogger(__name__)

GC_ALLOCATIONS = 20_000
"""New objects between two garbage collections. A request makes some hundred objects that live a few
milliseconds; Python's default of 700 would scan them several times per request."""

PARSED_AT_ONCE = 256 * 1024
"""Larger bodies (bytes) are parsed in a thread. This size takes 1 ms, or 20 ms if it is all tiny
values."""

FETCH_TIMEOUT_S = 30.0
"""Time for a worker to send its tokenizer."""

LEASE_PROBE_S, LEASE_PROBES = 2.0, 3
"""A worker whose lease has lapsed is gone if it answers none of so many requests in this time each;
a busy one may answer late."""


class BusFollower(Protocol):
    """Feeds the fleet, as `cluster.follower.Follower` does."""

    @property
    def status(self) -> BusStatus: ...

    async def run(self) -> None: ...


class ModelEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One model in `/v1/models`. `max_model_len`: longest prompt + output, in tokens."""

    id: str
    created: int
    max_model_len: int
    object: Literal["model"] = "model"
    owned_by: str = "stemroute"


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """Response of `/v1/models`."""

    data: list[ModelEntry]
    object: Literal["list"] = "list"


class Gateway:
    """A gateway that can be started and stopped once.

    follower_factory   makes the follower that feeds the fleet; the default follows Redis
    siblings           the gateway's processes, if it has several
    """

    def __init__(
        self,
        settings: Settings,
        follower_factory: Callable[[Fleet], BusFollower] | None = None,
        *,
        siblings: Siblings | None = None,
    ) -> None:
        self.settings = settings
        self.fleet = Fleet(max_pairs=settings.gateway.index_max_pairs)
        self.url = ""
        self._follower = (follower_factory or self._redis_follower)(self.fleet)
        shadows = Shadows(parse_shadows(settings.gateway.shadow))
        self.metrics = Metrics(self.fleet, self._bus_status, shadows)
        self.dispatcher = Dispatcher(
            self.fleet,
            parse_policy(settings.gateway.policy),
            self.metrics,
            shadows=shadows,
            holds_back=settings.gateway.queue > 0,
        )
        self.admission: Admission
        self._siblings = siblings
        self._started_at = int(time.time())
        self._following: asyncio.Task[None] | None = None
        self._cleanup = contextlib.AsyncExitStack()
        self._session: aiohttp.ClientSession
        self._calls: WorkerCalls
        self._workers: WorkerConnections
        self._background: Background
        self._tokenization: Tokenization
        self._serving: Serving
        self._server: HttpServer

    async def start(self) -> None:
        """Bind, and follow the bus. Sets `url`. Raises OSError if the port is in use."""
        try:
            await self._start()
        except BaseException:
            await self._cleanup.aclose()
            raise

    async def stop(self) -> None:
        """Become unready, then accept no new requests, let responses end and stop everything.

        Idempotent. If it is cancelled, responses are cut off at once.
        """
        await self._cleanup.aclose()

    async def _start(self) -> None:
        settings = self.settings.gateway
        headers = _headers_to_workers(self.settings.secret)
        self._session = await self._cleanup.enter_async_context(
            aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar(), headers=headers)
        )
        self._calls = WorkerCalls(self._session, settings.connect_timeout_s)
        self._workers = WorkerConnections(
            {**headers, "Content-Type": "application/msgpack"}, settings.connect_timeout_s
        )
        self._cleanup.callback(self._workers.close)
        self._background = Background()
        self._cleanup.callback(self._background.close)
        self._tokenization = Tokenization(
            self._fetch_model, self.settings.secret.encode(), self._background
        )
        encoders = self._tokenization.encoder_infos
        self.metrics.expose(ENCODER_INFO, lambda: encoder_samples(encoders()))
        self.admission = Admission(
            self.dispatcher,
            asyncio.get_running_loop(),
            settings.queue,
            settings.queue_timeout_s,
            settings.max_wait_s,
        )
        refused = self.admission.refused
        self.metrics.expose(OVERLOAD_REFUSALS, lambda: {(code,): n for code, n in refused.items()})
        self.metrics.expose(QUEUED_REQUESTS, lambda: self.admission.waiting)
        self._cleanup.callback(self.admission.close)
        self._serving = Serving(
            settings,
            self.dispatcher,
            self.admission,
            self._tokenization,
            Forwarder(self._workers, settings.first_byte_timeout_s),
            self.metrics,
        )
        self._following = asyncio.create_task(self._follower.run(), name="bus follower")
        self._cleanup.push_async_callback(self._end, self._following)
        watch = asyncio.create_task(self._stall_watch().run(), name="stall watch")
        self._cleanup.push_async_callback(self._end, watch)
        edge = Edge(settings, self.metrics.requests)
        edge.add(await self._routes())
        self._server = _server(edge, settings, self.metrics.connections)
        self.metrics.expose(OPEN_CONNECTIONS, lambda: len(self._server.connections))
        host, port = await self._server.start(
            settings.host, settings.port, shared=self._siblings is not None
        )
        self._cleanup.push_async_callback(
            self._server.stop, settings.drain_timeout_s, settings.drain_notice_s
        )
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def _routes(self) -> list[Route]:
        """The routes for clients. With siblings, this process listens to them from now on."""
        admin = Admin(
            self.settings.pool,
            self.fleet,
            self.dispatcher,
            self._calls,
            self._bus_status,
            self._tokenization.encoder_infos,
        )
        routes = [
            Route("POST", "/v1/chat/completions", self._chat),
            Route("POST", "/v1/completions", self._completion),
            Route("GET", "/v1/models", self._models),
            Route("GET", "/v1/models/{model}", self._model),
            Route("GET", "/health", self._health),
            Route("GET", "/ready", self._ready),
            Route("GET", "/metrics", self._metrics),
            Route("POST", "/admin/explain", self._explain),
            *admin.routes(),
            *WorkerAdmin(self.fleet, self._calls).routes(),
        ]
        if self._siblings is None:
            return routes
        self._cleanup.push_async_callback(self._siblings.close)
        combined = Combined(self._siblings, routes, admin.await_flush)
        settings = self.settings.gateway
        private = Edge(settings, RequestCounts())
        private.add(combined.private_routes())
        server = _server(private, settings, ConnectionCounts())
        await server.start_unix(self._siblings.socket_path)
        self._cleanup.push_async_callback(server.stop, settings.drain_timeout_s)
        return combined.routes()

    def _redis_follower(self, fleet: Fleet) -> BusFollower:
        from cluster.follower import Follower

        return Follower(
            self.settings.redis_url,
            self.settings.pool,
            fleet,
            self.settings.bus,
            self.settings.secret.encode(),
            HealthProbe(lambda: self._session, LEASE_PROBE_S, LEASE_PROBES),
        )

    def _stall_watch(self) -> StallWatch:
        timeout_s = self.settings.gateway.stall_timeout_s
        probe = HealthProbe(lambda: self._session, ANSWER_WITHIN * timeout_s)
        inter_token_s = self.settings.gateway.inter_token_timeout_s
        return StallWatch(self.fleet, self._workers, probe, timeout_s, inter_token_s)

    async def _end(self, task: asyncio.Task[None]) -> None:
        task.cancel()
        try:
            await task
        except asyncio.CancelledError:
            pass
        except Exception:
            log.exception("the %s had failed", task.get_name())

    async def _fetch_model(self, card: WorkerCard) -> ModelInfo:
        return await self._calls.ask("GET", f"{card.address}/model", ModelInfo, FETCH_TIMEOUT_S)

    async def _chat(self, request: Request) -> Response | None:
        arrived = time.perf_counter()
        asked = await self._parsed(request, parse_chat)
        return await self._serving.serve(request, asked, arrived)

    async def _completion(self, request: Request) -> Response | None:
        arrived = time.perf_counter()
        asked = await self._parsed(request, parse_completion)
        return await self._serving.serve(request, asked, arrived)

    async def _explain(self, request: Request) -> Response:
        asked = await self._parsed(request, parse_either)
        return json_response(await self._serving.explain(asked))

    async def _parsed(
        self, request: Request, parse: Callable[[bytes, int], ApiRequest]
    ) -> ApiRequest:
        body, most = request.body, self.settings.gateway.max_messages
        return await self._background.run(len(body), PARSED_AT_ONCE, lambda: parse(body, most))

    async def _models(self, request: Request) -> Response:
        return json_response(ModelList(data=[self._entry(name) for name in self.fleet.models()]))

    async def _model(self, request: Request) -> Response:
        name = request.argument
        group = self.fleet.group(name)
        if group is None or not group.mask:
            raise no_worker(self.fleet, name)
        return json_response(self._entry(name))

    def _entry(self, name: str) -> ModelEntry:
        group = self.fleet.group(name)
        return ModelEntry(
            id=name,
            created=self._started_at,
            max_model_len=group.context_tokens if group is not None else 0,
        )

    async def _health(self, request: Request) -> Response:
        return json_response({"status": "ok"})

    async def _ready(self, request: Request) -> Response:
        view = self.readiness()
        return json_response(view, status=200 if view.ready else 503)

    async def _metrics(self, request: Request) -> Response:
        return Response(self.metrics.text(), headers={"Content-Type": CONTENT_TYPE})

    def readiness(self) -> ReadyView:
        """Whether requests can be served, and by prefix, with the reasons in words if not."""
        stopping = self._server.closing
        return readiness(self.settings.pool, self.fleet, self._bus_status(), stopping=stopping)

    def _bus_status(self) -> BusStatus:
        """The follower's status, or that it has stopped."""
        status = self._follower.status
        if self._following is None or not self._following.done():
            return status
        reason = "the bus follower has stopped; see the gateway's log"
        return msgspec.structs.replace(status, connected=False, stale=True, reason=reason)


def _server(edge: Edge, settings: GatewaySettings, counts: ConnectionCounts) -> HttpServer:
    return HttpServer(
        edge.service(),
        max_connections=settings.max_connections,
        write_timeout_s=settings.write_timeout_s,
        max_held_bytes=settings.max_held_body_bytes,
        counts=counts,
    )


def _headers_to_workers(secret: str) -> dict[str, str]:
    """Headers of every request to a worker: uncompressed answers, and the pool's token."""
    token = pool_token(secret)
    headers = {"Accept-Encoding": "identity"}
    if token:
        headers["Authorization"] = f"Bearer {token}"
    return headers


async def serve_gateway(
    settings: Settings,
    *,
    ready: Callable[[str], None] | None = None,
    siblings: Siblings | None = None,
) -> None:
    """Serve until cancelled. `ready` is called with the base URL once the port is bound.

    siblings   the gateway's processes, if it has several
    """
    gateway = Gateway(settings, siblings=siblings)
    await gateway.start()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    gc.freeze()  # modules and the like stay: the collector skips them
    gc.set_threshold(GC_ALLOCATIONS, *gc.get_threshold()[1:])
    try:
        if ready is not None:
            ready(gateway.url)
        await asyncio.get_running_loop().create_future()
    finally:
        await gateway.stop()
