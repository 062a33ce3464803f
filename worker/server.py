"""A worker's HTTP server: gateways post prompts as tokens and get the response for the client.

    POST /generate      msgpack GenerateRequest -> OpenAI JSON, or server-sent events
    GET  /model         ModelInfo (JSON): tokenizer, chat template, namespace
    GET  /blocks        BlockList (msgpack): the cached set as the engine knows it
    GET  /health        200, or 503 with the reason
    GET  /metrics       Prometheus
    GET  /stats         CacheView (JSON): what the cache holds, reuses and evicts
    POST /admin/flush   empty the cache: {"worker": ..., "epoch": ...}
    POST /admin/weights WeightsWanted (JSON): load another model of the same architecture

The response to `/generate` starts with the first token. A failure before that has its own HTTP
status. A closed connection cancels the request at any time.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import secrets
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import msgspec
from aiohttp import web

from cluster.blocks import hash_blocks, join_hashes
from cluster.frames import error_frame
from cluster.metric_definition import CONTENT_TYPE
from cluster.protocol import (
    HEADER_HIT_TOKENS,
    HEADER_PROGRESS,
    HEADER_PROMPT_TOKENS,
    HEADER_REQUEST_ID,
    HEADER_WORKER,
    SERVICE_UNAVAILABLE,
    BlockList,
    GenerateRequest,
    RequestError,
    pool_token,
)
from cluster.settings import Settings
from worker.answers import ResponseBody
from worker.engine_client import EngineDead
from worker.messages import EngineRequest, Output
from worker.metrics import cache_view, render_metrics
from worker.service import WorkerService

log = logging.getLogger(__name__)

BACKLOG = 1024
MAX_BODY_BYTES = 64 * 1024 * 1024

OPEN_PATHS = frozenset({"/health", "/metrics"})

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

SERVICE = web.AppKey("service", WorkerService)


class WeightsWanted(msgspec.Struct, frozen=True):
    """Body of `POST /admin/weights`.

    model  directory or file on the worker's machine
    pool   whether workers of the pool that start later load it too
    """

    model: str
    pool: bool = False


_decode_request = msgspec.msgpack.Decoder(GenerateRequest).decode


class WorkerServer:
    """A whole worker with its HTTP server. `start`, then `stop` once."""

    def __init__(self, settings: Settings, name: str) -> None:
        """Raises ValueError if a setting that a worker needs is missing."""
        self.service = WorkerService(settings, name)
        self._runner: web.AppRunner | None = None
        self._stopping: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        """URL at which gateways reach the worker; "" before it has started."""
        return self.service.url

    async def start(self) -> None:
        """Load the model, open the port, publish the card. Raises EngineDead, OSError."""
        settings = self.service.settings.worker
        try:
            await self.service.load()
            self._runner = web.AppRunner(
                make_app(self.service),
                handler_cancellation=True,
                access_log=None,
                shutdown_timeout=1.0,
            )
            await self._runner.setup()
            listener = socket.create_server((settings.host, settings.port), backlog=BACKLOG)
            await web.SockSite(self._runner, listener).start()
            host = settings.advertise_host or _reachable(settings.host)
            netloc = f"[{host}]" if ":" in host else host  # an IPv6 address needs brackets
            self.service.announce(f"http://{netloc}:{listener.getsockname()[1]}")
        except BaseException:
            await self._close()
            raise

    async def stop(self) -> None:
        """Drain, remove the card, end. A second call waits for the first."""
        if self._stopping is None:
            self._stopping = asyncio.create_task(self._drain_and_close())
        await asyncio.shield(self._stopping)

    async def _drain_and_close(self) -> None:
        await self.service.drain()
        await self._close()

    async def _close(self) -> None:
        await self.service.close()
        if self._runner is not None:
            await self._runner.cleanup()


def make_app(service: WorkerService) -> web.Application:
    """The application of one worker whose engine is ready."""
    app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[_errors_as_json, _admit])
    app[SERVICE] = service
    app.router.add_post("/generate", _generate)
    app.router.add_get("/model", _model)
    app.router.add_get("/blocks", _blocks)
    app.router.add_get("/health", _health)
    app.router.add_get("/metrics", _metrics)
    app.router.add_get("/stats", _stats)
    app.router.add_post("/admin/flush", _flush)
    app.router.add_post("/admin/weights", _weights)
    return app


@web.middleware
async def _errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except RequestError as error:
        return _error(error)
    except EngineDead as error:
        return _error(RequestError(str(error), status=503, type=SERVICE_UNAVAILABLE))
    except web.HTTPException as error:
        return _error(RequestError(error.reason, status=error.status))
    except Exception:
        log.exception("%s %s failed", request.method, request.path)
        return _error(
            RequestError("the worker failed; see its log", status=500, type="server_error")
        )


@web.middleware
async def _admit(request: web.Request, handler: Handler) -> web.StreamResponse:
    """If the pool has a secret, requests need its token, except for health and metrics."""
    token = pool_token(request.app[SERVICE].settings.secret)
    if token and request.path not in OPEN_PATHS:
        given = request.headers.get("Authorization", "")
        if not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
            raise RequestError(
                "this worker only accepts requests from gateways with the secret of its pool "
                "(STEMROUTE_SECRET)",
                status=401,
                type="authentication_error",
            )
    return await handler(request)


def _error(error: RequestError) -> web.Response:
    return web.Response(body=error.body(), status=error.status, content_type="application/json")


async def _generate(request: web.Request) -> web.StreamResponse:
    service = request.app[SERVICE]
    try:
        wanted = _decode_request(await request.read())
    except msgspec.DecodeError as error:
        raise RequestError(f"the body is not a valid GenerateRequest: {error}") from error
    # No await from here to the engine, so that the weights match the hashes of the request.
    problem = service.problem()
    if problem:
        raise RequestError(problem, status=503, type=SERVICE_UNAVAILABLE)
    model = service.info.model
    if wanted.model != model.model:
        raise RequestError(
            f"this worker serves {model.model!r}, not {wanted.model!r}",
            status=404,
            param="model",
            code="model_not_found",
        )
    for name in ("token_ids", "output_ids"):
        if len(getattr(wanted, name)) % 4:
            raise RequestError(f"{name} must have 4 bytes per token", param=name)
    with service.serving():
        outputs = service.engine.generate(_engine_request(wanted, service))
        async with contextlib.aclosing(outputs):
            return await _answer(request, wanted, outputs)


def _engine_request(wanted: GenerateRequest, service: WorkerService) -> EngineRequest:
    namespace = service.info.model.namespace
    root = namespace.for_request(wanted.adapter, wanted.cache_salt).root(service.secret)
    sampling = wanted.sampling
    if sampling.seed is None:
        sampling = msgspec.structs.replace(sampling, seed=secrets.randbits(63))
    return EngineRequest(
        request_id=wanted.request_id,
        token_ids=wanted.token_ids,
        namespace_root=root,
        sampling=sampling,
        block_hashes=join_hashes(hash_blocks(root, wanted.token_ids, namespace.block_size)),
        arrival=time.monotonic(),
        request_type=wanted.request_type or wanted.kind,
        turn=wanted.turn,
        priority=wanted.priority,
        output_ids=wanted.output_ids,
    )


async def _answer(
    request: web.Request, wanted: GenerateRequest, outputs: AsyncIterator[Output]
) -> web.StreamResponse:
    first = await anext(outputs)
    _raise_if_failed(first)
    hit_tokens = wanted.hit_tokens if wanted.output_ids else first.hit_tokens
    body = ResponseBody(wanted, request.app[SERVICE].tokenizer, hit_tokens)
    headers = {
        HEADER_REQUEST_ID: wanted.request_id,
        HEADER_WORKER: request.app[SERVICE].name,
        HEADER_PROMPT_TOKENS: str(len(wanted.token_ids) // 4),
        HEADER_HIT_TOKENS: str(hit_tokens),
        "Content-Type": "text/event-stream" if wanted.stream else "application/json",
    }
    piece = body.push(first)
    if not wanted.stream and not wanted.progress:
        while not body.finished:
            output = await anext(outputs)
            _raise_if_failed(output)
            piece = body.push(output)
        return web.Response(body=piece, headers=headers)
    if wanted.progress:
        headers[HEADER_PROGRESS] = "1"
    response = web.StreamResponse(headers=headers | {"Cache-Control": "no-cache"})
    await response.prepare(request)
    try:
        await response.write(piece)
        while not body.finished:
            output = await anext(outputs)
            _raise_if_failed(output)
            if piece := body.push(output):
                await response.write(piece)
        await response.write_eof()
    except ConnectionResetError:
        log.debug("request %s: the client disconnected", wanted.request_id)
    except (EngineDead, RequestError) as error:
        # Too late for a status. Without frames, the gateway notices the end of the connection.
        log.warning("request %s failed while streaming: %s", wanted.request_id, error)
        if wanted.progress and isinstance(error, RequestError):
            with contextlib.suppress(ConnectionResetError):
                await response.write(error_frame(error.body()))
                await response.write_eof()
        elif request.transport is not None:
            request.transport.close()
    return response


def _raise_if_failed(output: Output) -> None:
    if output.finish_reason == "error":
        raise RequestError(
            f"the engine failed on this request: {output.error}", status=500, type="server_error"
        )


async def _model(request: web.Request) -> web.Response:
    body = msgspec.json.encode(request.app[SERVICE].info.model)
    return web.Response(body=body, content_type="application/json")


async def _blocks(request: web.Request) -> web.Response:
    service = request.app[SERVICE]
    held = await service.engine.listing()
    listing = BlockList(
        worker=service.name,
        epoch=service.epoch,
        blocks=held.joined,
        cpu=held.cpu,
        disk=held.disk,
    )
    return web.Response(body=msgspec.msgpack.encode(listing), content_type="application/msgpack")


async def _health(request: web.Request) -> web.Response:
    service = request.app[SERVICE]
    problem = service.problem()
    bus = service.publisher.status.reason  # no reason to reject requests
    body = {"worker": service.name, "ready": not problem, "reason": problem, "bus": bus}
    if service.gcs_storage:
        body["gcs_storage"] = service.gcs_storage
    return web.json_response(body, status=503 if problem else 200)


async def _metrics(request: web.Request) -> web.Response:
    service = request.app[SERVICE]
    return web.Response(body=await render_metrics(service), headers={"Content-Type": CONTENT_TYPE})


async def _flush(request: web.Request) -> web.Response:
    service = request.app[SERVICE]
    epoch = await service.flush()
    return web.json_response({"worker": service.name, "epoch": epoch})


async def _stats(request: web.Request) -> web.Response:
    view = await cache_view(request.app[SERVICE])
    return web.Response(body=msgspec.json.encode(view), content_type="application/json")


async def _weights(request: web.Request) -> web.Response:
    service = request.app[SERVICE]
    try:
        wanted = msgspec.json.decode(await request.read(), type=WeightsWanted)
    except msgspec.DecodeError as error:
        raise RequestError(
            f'the body must be of the form {{"model": "PATH"}}: {error}', param="model"
        ) from error
    epoch = await service.load_weights(wanted.model, pool=wanted.pool)
    weights = service.info.model.namespace.weights
    return web.json_response({"worker": service.name, "epoch": epoch, "weights": weights})


def _reachable(host: str) -> str:
    """Address for gateways if the server listens on `host`."""
    if host not in ("0.0.0.0", "::"):
        return host
    import ray.util  # only if no address of this node is configured

    address: str = ray.util.get_node_ip_address()
    return address
