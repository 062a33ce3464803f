"""The gateway: one OpenAI endpoint before a pool of workers."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import secrets
import sys
import time
from collections.abc import Callable
from typing import Literal, Protocol

import aiohttp
import msgspec

from cluster.bus_status import BusStatus
from cluster.metric_definition import CONTENT_TYPE
from cluster.protocol import (
    HEADER_EXPLAIN,
    GenerateRequest,
    ModelInfo,
    RequestError,
    WorkerCard,
    pool_token,
)
from cluster.settings import Settings
from router.admin import Admin
from router.admission import Admission, Outdated
from router.background import SWITCH_INTERVAL_S, Background
from router.dispatch import Dispatcher
from router.edge import (
    Edge,
    Route,
    body_too_large,
    json_response,
    malformed,
    no_ready_worker,
    too_many_connections,
)
from router.encoding import TooManyTokens
from router.fleet import Fleet
from router.forwarding import Forwarder
from router.http_messages import Request, Response
from router.http_server import HttpServer
from router.liveness import HealthProbe
from router.member import ModelGroup
from router.metrics import (
    ENCODER_INFO,
    OPEN_CONNECTIONS,
    QUEUED_REQUESTS,
    Metrics,
    encoder_samples,
)
from router.openai_api import ApiRequest, parse_chat, parse_completion, parse_either
from router.policies import parse_policy
from router.readiness import ReadyView, readiness
from router.shadow import Shadows, parse_shadows
from router.tokenization import Prompt, Tokenization, context_too_short
from router.worker_admin import WorkerAdmin
from router.worker_connections import WorkerConnections

log = logging.getLogger(__name__)

DRAIN_S = 5.0
"""Answers under way may take so long to end when the gateway stops."""

GC_ALLOCATIONS = 20_000
"""Garbage is looked for after so many new objects. A request makes some hundred that live a few
milliseconds; Python's own 700 would look through them several times a request."""

PARSED_AT_ONCE = 256 * 1024
"""Larger bodies (bytes) are parsed in a thread: so many take 1 ms, or 20 of the smallest values."""

FETCH_TIMEOUT_S = 30.0
"""For a worker to hand over its tokenizer."""


class BusFollower(Protocol):
    """Feeds the fleet; `cluster.follower.Follower` is one."""

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
    """Answer of `/v1/models`."""

    data: list[ModelEntry]
    object: Literal["list"] = "list"


class Gateway:
    """A gateway that can be started and stopped once.

    follower_factory   makes what feeds the fleet; the default follows Redis
    drain_s            answers under way may take so long to end at `stop`
    """

    def __init__(
        self,
        settings: Settings,
        follower_factory: Callable[[Fleet], BusFollower] | None = None,
        *,
        drain_s: float = DRAIN_S,
    ) -> None:
        self.settings = settings
        self.fleet = Fleet(max_pairs=settings.gateway.index_max_pairs)
        self.url = ""
        self._follower = (follower_factory or self._redis_follower)(self.fleet)
        shadows = Shadows(parse_shadows(settings.gateway.shadow))
        self.metrics = Metrics(self.fleet, self._bus_status, shadows)
        self.dispatcher = Dispatcher(
            self.fleet, parse_policy(settings.gateway.policy), self.metrics, shadows=shadows
        )
        self.admission = Admission(
            self.dispatcher, settings.gateway.queue, settings.gateway.queue_timeout_s
        )
        self.metrics.expose(QUEUED_REQUESTS, lambda: self.admission.waiting)
        self._drain_s = drain_s
        self._started_at = int(time.time())
        self._following: asyncio.Task[None] | None = None
        self._cleanup = contextlib.AsyncExitStack()
        self._session: aiohttp.ClientSession
        self._workers: WorkerConnections
        self._background: Background
        self._tokenization: Tokenization
        self._forwarder: Forwarder
        self._server: HttpServer

    async def start(self) -> None:
        """Bind, and follow the bus. `url` is set afterwards. Raises OSError for a taken port."""
        try:
            await self._start()
        except BaseException:
            await self._cleanup.aclose()
            raise

    async def stop(self) -> None:
        """Take no new requests, let answers end, then end everything. Harmless when repeated."""
        await self._cleanup.aclose()

    async def _start(self) -> None:
        settings = self.settings.gateway
        headers = _headers_to_workers(self.settings.secret)
        self._session = await self._cleanup.enter_async_context(
            aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar(), headers=headers)
        )
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
        self._cleanup.callback(self.admission.close)
        self._forwarder = Forwarder(
            self._workers, settings, self.dispatcher, self.admission, self.metrics
        )
        self._following = asyncio.create_task(self._follower.run(), name="bus follower")
        self._cleanup.push_async_callback(self._stop_following, self._following)
        edge = self._edge()
        self._server = HttpServer(
            admit=edge.admit,
            answer=edge.answer,
            malformed=malformed,
            too_large=body_too_large(settings.max_body_bytes),
            max_body_bytes=settings.max_body_bytes,
            full=too_many_connections(settings.max_connections),
            max_connections=settings.max_connections,
            write_timeout_s=settings.write_timeout_s,
            counts=self.metrics.connections,
        )
        self.metrics.expose(OPEN_CONNECTIONS, lambda: len(self._server.connections))
        host, port = await self._server.start(settings.host, settings.port)
        self._cleanup.push_async_callback(self._server.stop, self._drain_s)
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def _edge(self) -> Edge:
        edge = Edge(self.settings.gateway, self.metrics.requests)
        admin = Admin(
            self.settings.pool,
            self.fleet,
            self.dispatcher,
            self._session,
            self._bus_status,
            self._tokenization.encoder_infos,
        )
        edge.add(
            [
                Route("POST", "/v1/chat/completions", self._chat),
                Route("POST", "/v1/completions", self._completion),
                Route("GET", "/v1/models", self._models),
                Route("GET", "/v1/models/{model}", self._model),
                Route("GET", "/health", self._health),
                Route("GET", "/ready", self._ready),
                Route("GET", "/metrics", self._metrics),
                Route("POST", "/admin/explain", self._explain),
                *admin.routes(),
                *WorkerAdmin(self.fleet, self._session).routes(),
            ]
        )
        return edge

    def _redis_follower(self, fleet: Fleet) -> BusFollower:
        from cluster.follower import Follower

        return Follower(
            self.settings.redis_url,
            self.settings.pool,
            fleet,
            self.settings.bus,
            self.settings.secret.encode(),
            HealthProbe(lambda: self._session),
        )

    async def _stop_following(self, task: asyncio.Task[None]) -> None:
        task.cancel()
        try:
            await task
        except asyncio.CancelledError:
            pass
        except Exception:
            log.exception("the bus follower had failed")

    async def _fetch_model(self, card: WorkerCard) -> ModelInfo:
        timeout = aiohttp.ClientTimeout(
            total=FETCH_TIMEOUT_S, sock_connect=self.settings.gateway.connect_timeout_s
        )
        async with self._session.get(f"{card.address}/model", timeout=timeout) as answer:
            if answer.status != 200:
                raise ValueError(f"/model answered with status {answer.status}")
            return msgspec.json.decode(await answer.read(), type=ModelInfo)

    async def _chat(self, request: Request) -> Response | None:
        return await self._generate(request, parse_chat)

    async def _completion(self, request: Request) -> Response | None:
        return await self._generate(request, parse_completion)

    async def _generate(
        self, request: Request, parse: Callable[[bytes, int], ApiRequest]
    ) -> Response | None:
        arrived = time.perf_counter()
        asked, request_id = await self._parsed(request.body, parse), secrets.token_hex(16)
        if request.headers.get(HEADER_EXPLAIN) == "1":
            self.dispatcher.recent.want(request_id, asked.kind)
        try:
            while True:
                prompt, context_tokens = await self._prompt(asked, request_id)
                generate = self._to_worker(asked, request_id, prompt, context_tokens)
                try:
                    return await self._forwarder.forward(request, generate, prompt, arrived)
                except Outdated:
                    continue
        finally:
            self.admission.leave(request_id)
            self.dispatcher.shadows.ended(request_id)
            self.dispatcher.recent.ended(request_id)

    async def _parsed(self, body: bytes, parse: Callable[[bytes, int], ApiRequest]) -> ApiRequest:
        most = self.settings.gateway.max_messages
        return await self._background.run(len(body), PARSED_AT_ONCE, lambda: parse(body, most))

    def _to_worker(
        self, asked: ApiRequest, request_id: str, prompt: Prompt, context_tokens: int
    ) -> GenerateRequest:
        """What a worker is sent. Raises RequestError (400) where the context is too short."""
        room = context_tokens - prompt.tokens
        if room < 1:
            raise context_too_short(asked, TooManyTokens(prompt.tokens, exact=True), context_tokens)
        wanted = asked.max_tokens or self.settings.gateway.default_max_tokens
        return GenerateRequest(
            request_id=request_id,
            model=asked.model,
            kind=asked.kind,
            token_ids=prompt.token_ids,
            sampling=msgspec.structs.replace(asked.sampling, max_tokens=min(wanted, room)),
            stream=asked.stream,
            include_usage=asked.include_usage,
            continuous_usage=asked.continuous_usage,
            cache_salt=asked.cache_salt,
            request_type=asked.request_type,
            turn=asked.turn,
        )

    async def _explain(self, request: Request) -> Response:
        """Decide as for a chat or completion with this body, without sending it."""
        asked = await self._parsed(request.body, parse_either)
        prompt, _ = await self._prompt(asked)
        return json_response(self.dispatcher.explain(asked.model, asked.kind, prompt))

    async def _prompt(self, asked: ApiRequest, request_id: str = "") -> tuple[Prompt, int]:
        """The prompt as the model's workers know it, and their context in tokens.

        With a `request_id` it waits for a worker that is ready, where there is a queue.
        """
        while True:
            if request_id:
                await self.admission.ready(asked.model, request_id)
            group = self._group(asked.model)
            namespace = self.fleet.at(int(group.slots[0])).card.namespace
            encoder = self._tokenization.known_encoder(namespace)
            if encoder is None:
                cards = [self.fleet.at(int(slot)).card for slot in group.slots]
                encoder = await self._tokenization.encoder(cards)
            prompt = await self._tokenization.prompt(
                asked, encoder, namespace, group.context_tokens
            )
            now = self.fleet.group(asked.model)
            reference = None if now is None else now.reference
            if now is not None and reference is not None and reference.namespace == namespace:
                return prompt, now.context_tokens

    def _group(self, model: str) -> ModelGroup:
        """The workers that may serve `model`: at least one. Raises RequestError (404, 503)."""
        group = self.fleet.group(model)
        known = self.fleet.known_models()
        if group is None and known:
            names = ", ".join(f"`{name}`" for name in known)
            raise RequestError(
                f"the model `{model}` does not exist here: there is {names}",
                status=404,
                param="model",
                code="model_not_found",
            )
        if group is None or not len(group.slots):
            raise no_ready_worker(f"no worker of the model `{model}` is ready")
        return group

    async def _models(self, request: Request) -> Response:
        return json_response(ModelList(data=[self._entry(name) for name in self.fleet.models()]))

    async def _model(self, request: Request) -> Response:
        name = request.argument
        self._group(name)
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
        """Whether requests can be served by prefix, and in words why not."""
        return readiness(self.settings.pool, self.fleet, self._bus_status())

    def _bus_status(self) -> BusStatus:
        """What the follower tells of itself, and where it has ended, that."""
        status = self._follower.status
        if self._following is None or not self._following.done():
            return status
        reason = "the bus follower has ended; the log says why"
        return msgspec.structs.replace(status, connected=False, stale=True, reason=reason)


def _headers_to_workers(secret: str) -> dict[str, str]:
    """Headers of every request to a worker: uncompressed answers, and the pool's token."""
    token = pool_token(secret)
    headers = {"Accept-Encoding": "identity"}
    if token:
        headers["Authorization"] = f"Bearer {token}"
    return headers


async def serve_gateway(settings: Settings, *, ready: Callable[[str], None] | None = None) -> None:
    """Serve until cancelled. `ready` is called with the base URL once the port is bound."""
    gateway = Gateway(settings)
    await gateway.start()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    gc.freeze()  # modules and such stay: never look through them
    gc.set_threshold(GC_ALLOCATIONS, *gc.get_threshold()[1:])
    try:
        if ready is not None:
            ready(gateway.url)
        await asyncio.get_running_loop().create_future()
    finally:
        await gateway.stop()
