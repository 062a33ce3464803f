"""From the gateway to a worker and back: post, stream through, retry, cancel.

A request may be tried at another worker as long as nothing was sent to the client. What a
worker's status says concerns this request only: no status keeps a worker from the next one.
"""

from __future__ import annotations

import logging
import time

import msgspec

from cluster.protocol import (
    HEADER_HIT_TOKENS,
    HEADER_POLICY,
    HEADER_PREDICTED_HIT_TOKENS,
    HEADER_PROMPT_TOKENS,
    HEADER_REQUEST_ID,
    HEADER_WORKER,
    SERVICE_UNAVAILABLE,
    ErrorAnswer,
    GenerateRequest,
    RequestError,
)
from cluster.settings import GatewaySettings
from router.admission import Admission
from router.dispatch import Dispatcher, Placement
from router.edge import no_ready_worker
from router.http_messages import Request, Response
from router.metrics import Metrics
from router.tokenization import Prompt
from router.worker_connections import (
    WorkerAnswer,
    WorkerConnections,
    WorkerLost,
    WorkerUnreachable,
)

log = logging.getLogger(__name__)

EVENT_END = b"\n\n"
STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class _TryElsewhere(Exception):
    """An attempt failed before anything was sent. `error` is the answer if it was the last."""

    def __init__(self, reason: str, error: RequestError) -> None:
        super().__init__(reason)
        self.reason = reason
        self.error = error


class EventBuffer:
    """Passes whole server-sent events on and holds back the beginning of one that is not whole.

    So a client never sees half an event, even where a worker dies in the midst of it.
    """

    def __init__(self) -> None:
        self._begun = b""

    def feed(self, chunk: bytes) -> bytes:
        """The whole events that are there after `chunk`, unchanged."""
        if not self._begun and chunk.endswith(EVENT_END):
            return chunk
        data = self._begun + chunk
        cut = data.rfind(EVENT_END)
        cut = 0 if cut < 0 else cut + len(EVENT_END)
        self._begun = data[cut:]
        return data[:cut]

    def rest(self) -> bytes:
        """What was held back, when the stream has ended properly."""
        return self._begun


class Forwarder:
    """Forwards requests over shared connections, whose owner is the gateway."""

    def __init__(
        self,
        workers: WorkerConnections,
        settings: GatewaySettings,
        dispatcher: Dispatcher,
        admission: Admission,
        metrics: Metrics,
    ) -> None:
        self._workers = workers
        self._admission = admission
        self._settings = settings
        self._dispatcher = dispatcher
        self._metrics = metrics

    async def forward(
        self, client: Request, generate: GenerateRequest, prompt: Prompt, arrived: float
    ) -> Response | None:
        """Answer `client` from a worker: a whole answer is returned, a stream is written and
        ended. Raises RequestError where none can serve, Outdated where the prompt must be hashed
        anew before anything is sent.

        `arrived` is `time.perf_counter()` at the request's arrival. When the client goes away
        the server cancels this call; the worker's connection is closed at once, which cancels
        the request there.
        """
        body = msgspec.msgpack.encode(generate)
        tried: list[str] = []
        failure = no_ready_worker(f"no worker of the model `{generate.model}` is ready")
        while len(tried) < self._settings.attempts:
            placement = await self._admission.place(
                generate.model, prompt, generate.request_id, excluded=tried
            )
            if placement is None:
                break
            tried.append(placement.worker)
            try:
                return await self._attempt(client, generate, body, prompt, placement, arrived)
            except _TryElsewhere as attempt:
                failure = attempt.error
                self._metrics.attempts.note(attempt.reason)
                log.info(
                    "request %s: worker %s: %s", generate.request_id, placement.worker, failure
                )
            finally:
                self._dispatcher.fleet.release(placement.booking)
        raise failure

    async def _attempt(
        self,
        client: Request,
        generate: GenerateRequest,
        body: bytes,
        prompt: Prompt,
        placement: Placement,
        arrived: float,
    ) -> Response | None:
        upstream = await self._post(placement, body)
        try:
            if upstream.status != 200:
                return await _refusal(upstream, placement.worker)
            headers = {
                HEADER_REQUEST_ID: generate.request_id,
                HEADER_WORKER: placement.worker,
                HEADER_POLICY: placement.policy,
                HEADER_PREDICTED_HIT_TOKENS: str(placement.predicted_hit_tokens),
                HEADER_PROMPT_TOKENS: str(prompt.tokens),
                HEADER_HIT_TOKENS: upstream.headers.get(HEADER_HIT_TOKENS, "0"),
                "Content-Type": upstream.headers.get("content-type", "application/json"),
            }
            try:
                first = await (upstream.some() if generate.stream else upstream.read())
            except WorkerLost as error:
                raise _dropped(placement.worker, error) from error
            self._count(prompt, placement, upstream, arrived)
            self._dispatcher.shadows.began(generate.request_id)
            if not generate.stream:
                return Response(first, headers=headers)
            await self._relay(upstream, first, client, headers, placement.worker)
            return None
        finally:
            upstream.close()

    async def _post(self, placement: Placement, body: bytes) -> WorkerAnswer:
        settings, worker = self._settings, placement.worker
        try:
            return await self._workers.post(
                placement.address, "/generate", body, settings.first_byte_timeout_s
            )
        except WorkerUnreachable as error:
            self._dispatcher.fleet.suspect(worker)
            raise _TryElsewhere(
                "connect",
                RequestError(
                    f"the worker {worker} cannot be reached: try again in a moment",
                    status=503,
                    type=SERVICE_UNAVAILABLE,
                    code="worker_unreachable",
                ),
            ) from error
        except TimeoutError as error:
            raise RequestError(
                f"the worker {worker} did not begin to answer within "
                f"{settings.first_byte_timeout_s:g} s: try again, or send a shorter prompt",
                status=504,
                type="server_error",
                code="first_byte_timeout",
            ) from error
        except WorkerLost as error:
            raise _dropped(worker, error) from error

    async def _relay(
        self,
        upstream: WorkerAnswer,
        first: bytes,
        client: Request,
        headers: dict[str, str],
        worker: str,
    ) -> None:
        """Write each chunk as it comes. From here on a failure is an event in the stream."""
        stream = client.begin({**headers, **STREAM_HEADERS})
        events = EventBuffer()
        chunk = first
        while chunk:
            whole = events.feed(chunk)
            if upstream.ended:
                stream.end(whole + events.rest())
                return
            await stream.write(whole)
            try:
                chunk = await upstream.some()
            except WorkerLost as error:
                self._metrics.attempts.broken_streams += 1
                lost = _dropped(worker, error).error
                stream.end(b"data: " + lost.body() + EVENT_END)
                return
        stream.end(events.rest())

    def _count(
        self,
        prompt: Prompt,
        placement: Placement,
        upstream: WorkerAnswer,
        arrived: float,
    ) -> None:
        told = upstream.headers.get(HEADER_HIT_TOKENS, "0")
        self._metrics.answers.note(
            first_byte_s=time.perf_counter() - arrived,
            prompt=prompt.tokens,
            predicted=placement.predicted_hit_tokens,
            hit=int(told) if told.isdecimal() else 0,
            best_hit=placement.candidates.best_hit_tokens,
        )


async def _refusal(upstream: WorkerAnswer, worker: str) -> Response:
    """Pass a 4xx on as it is; raise _TryElsewhere for 429 and all others."""
    try:
        body = await upstream.read()
    except WorkerLost as error:
        raise _dropped(worker, error) from error
    status = upstream.status
    if status != 429 and 400 <= status < 500:
        kind = upstream.headers.get("content-type", "application/json")
        return Response(body, status, {"Content-Type": kind})
    if status < 400:
        status = 502  # neither an answer nor a refusal
    reason = {429: "full", 503: "unavailable"}.get(status, "failed")
    try:
        told = msgspec.json.decode(body, type=ErrorAnswer).error
    except msgspec.MsgspecError:
        raise _TryElsewhere(
            reason,
            RequestError(
                f"the worker {worker} answered with status {upstream.status}: try again in a "
                "moment",
                status=status,
                type="server_error",
                code="worker_failed",
            ),
        ) from None
    raise _TryElsewhere(
        reason,
        RequestError(told.message, status=status, type=told.type, param=told.param, code=told.code),
    )


def _dropped(worker: str, error: BaseException) -> _TryElsewhere:
    log.warning("worker %s broke its answer off: %r", worker, error)
    return _TryElsewhere(
        "dropped",
        RequestError(
            f"the worker {worker} closed the connection before the answer was complete: try again",
            status=502,
            type="server_error",
            code="worker_lost",
        ),
    )
