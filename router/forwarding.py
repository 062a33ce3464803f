"""One attempt of a request at one worker: send it, relay the response or return the failure."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Literal, NamedTuple

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
from router.dispatch import Placement
from router.http_messages import Request, Response, Stream
from router.worker_connections import (
    WorkerAnswer,
    WorkerConnections,
    WorkerLost,
    WorkerStalled,
    WorkerUnreachable,
)

log = logging.getLogger(__name__)

EVENT_END = b"\n\n"
STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}

Reason = Literal["connect", "full", "unavailable", "failed", "dropped", "stalled", "timeout"]
_REASONS: dict[int, Reason] = {429: "full", 503: "unavailable"}

REQUEST_FAULTS = frozenset({400, 413, 422})
"""Statuses of a request that no worker would accept."""


class Answered(NamedTuple):
    """The worker responded, or refused a request that no worker would accept.

    response      for the client; None if it was sent as a stream
    broken_off    the stream ended with an error event because the worker was lost
    """

    response: Response | None
    broken_off: bool = False


class Failed(NamedTuple):
    """The attempt failed, and nothing was sent to the client.

    reason   connect: the worker cannot be reached. full, unavailable, failed: it answered 429, 503,
             another status. dropped: the connection ended early. stalled: the worker gave no sign
             of life, or its response stood still. timeout: no response began
    error    for the client if there is no other attempt
    """

    reason: Reason
    error: RequestError


class EventBuffer:
    """Passes complete server-sent events on and buffers an incomplete one.

    So a client never receives half an event, even if the worker dies while it sends one.
    """

    def __init__(self) -> None:
        self._begun = b""

    def feed(self, chunk: bytes) -> bytes:
        """The complete events after `chunk`, unchanged."""
        if not self._begun and chunk.endswith(EVENT_END):
            return chunk
        data = self._begun + chunk
        cut = data.rfind(EVENT_END)
        cut = 0 if cut < 0 else cut + len(EVENT_END)
        self._begun = data[cut:]
        return data[:cut]

    def rest(self) -> bytes:
        """The buffered rest, after the stream has ended properly."""
        return self._begun


class Forwarder:
    """Makes attempts over shared connections, which the gateway owns.

    first_byte_timeout_s   time for a worker to begin its response
    """

    def __init__(self, workers: WorkerConnections, first_byte_timeout_s: float) -> None:
        self._workers = workers
        self._first_byte_timeout_s = first_byte_timeout_s

    async def attempt(
        self,
        client: Request,
        generate: GenerateRequest,
        placement: Placement,
        began: Callable[[int], None],
    ) -> Answered | Failed:
        """Send the request to the worker of its placement.

        `began` is called at the first byte of a response, with the prompt tokens that the worker
        has reused. Raises ClientGone. If the caller is cancelled, the worker's connection is closed
        at once, which cancels the request there.
        """
        worker = placement.worker
        try:
            upstream = await self._workers.post(
                placement.address,
                "/generate",
                msgspec.msgpack.encode(generate),
                self._first_byte_timeout_s,
            )
        except WorkerUnreachable:
            return Failed(
                "connect",
                RequestError(
                    f"the worker {worker} cannot be reached: retry in a moment",
                    status=503,
                    type=SERVICE_UNAVAILABLE,
                    code="worker_unreachable",
                ),
            )
        except TimeoutError:
            return Failed(
                "timeout",
                RequestError(
                    f"the worker {worker} did not start a response within "
                    f"{self._first_byte_timeout_s:g} s: retry, or send a shorter prompt",
                    status=504,
                    type="server_error",
                    code="first_byte_timeout",
                ),
            )
        except WorkerLost as error:
            return _lost(worker, error)
        try:
            if upstream.status != 200:
                return await _refused(upstream, worker)
            first = await (upstream.some() if generate.stream else upstream.read())
            hit_tokens = upstream.headers.get(HEADER_HIT_TOKENS, "0")
            began(int(hit_tokens) if hit_tokens.isdecimal() else 0)
            headers = {
                HEADER_REQUEST_ID: generate.request_id,
                HEADER_WORKER: worker,
                HEADER_POLICY: placement.policy,
                HEADER_PREDICTED_HIT_TOKENS: str(placement.predicted_hit_tokens),
                HEADER_PROMPT_TOKENS: str(len(generate.token_ids) // 4),
                HEADER_HIT_TOKENS: hit_tokens,
                "Content-Type": upstream.headers.get("content-type", "application/json"),
            }
            if not generate.stream:
                return Answered(Response(first, headers=headers))
            stream = client.begin({**headers, **STREAM_HEADERS})
            return Answered(None, broken_off=await _breaks_off(upstream, first, stream, worker))
        except WorkerLost as error:
            return _lost(worker, error)
        finally:
            upstream.close()


async def _breaks_off(upstream: WorkerAnswer, first: bytes, stream: Stream, worker: str) -> bool:
    """Relay each chunk as it arrives. Returns whether the worker was lost before the end.

    From here on, a failure is an event in the stream.
    """
    events = EventBuffer()
    chunk = first
    while chunk:
        whole = events.feed(chunk)
        if upstream.ended:
            stream.end(whole + events.rest())
            return False
        await stream.write(whole)
        try:
            chunk = await upstream.some()
        except WorkerLost as error:
            stream.end(b"data: " + _lost(worker, error).error.body() + EVENT_END)
            return True
    stream.end(events.rest())
    return False


async def _refused(upstream: WorkerAnswer, worker: str) -> Answered | Failed:
    """Pass on what no worker would accept. All other statuses concern this worker only: retry.

    An unexpected status, such as 401 or 404, becomes 502: the worker, or a process that has taken
    its port, does not serve this pool.
    """
    body = await upstream.read()
    status = upstream.status
    if status in REQUEST_FAULTS:
        kind = upstream.headers.get("content-type", "application/json")
        return Answered(Response(body, status, {"Content-Type": kind}))
    if status < 500 and status != 429:
        status = 502
    try:
        told = msgspec.json.decode(body, type=ErrorAnswer).error
    except msgspec.MsgspecError:
        error = RequestError(
            f"the worker {worker} answered with status {upstream.status}: retry",
            status=status,
            type="server_error",
            code="worker_failed",
        )
    else:
        kind = told.type if status == upstream.status else "server_error"
        error = RequestError(
            told.message, status=status, type=kind, param=told.param, code=told.code
        )
    return Failed(_REASONS.get(status, "failed"), error)


def _lost(worker: str, error: WorkerLost) -> Failed:
    stalled = isinstance(error, WorkerStalled)
    what = "stopped responding" if stalled else "closed the connection"
    log.warning("worker %s %s before its response was complete: %s", worker, what, error)
    return Failed(
        "stalled" if stalled else "dropped",
        RequestError(
            f"the worker {worker} {what} before its response was complete: retry",
            status=502,
            type="server_error",
            code="worker_lost",
        ),
    )
