"""One attempt of a request at one worker: send it, relay the response or return the failure."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from contextlib import suppress
from typing import Literal, NamedTuple

import msgspec

from cluster.blocks import pack_tokens
from cluster.frames import FrameReader
from cluster.protocol import (
    HEADER_HIT_TOKENS,
    HEADER_PROGRESS,
    SERVICE_UNAVAILABLE,
    ErrorAnswer,
    GenerateRequest,
    RequestError,
    Sampling,
)
from router.delivery import BodyReader, Delivery, EventReader
from router.dispatch import Placement
from router.http_messages import Response
from router.worker_connections import (
    WorkerAnswer,
    WorkerConnections,
    WorkerLost,
    WorkerStalled,
    WorkerUnreachable,
)

log = logging.getLogger(__name__)

Reason = Literal["connect", "full", "unavailable", "failed", "dropped", "stalled", "timeout"]
_REASONS: dict[int, Reason] = {429: "full", 503: "unavailable"}

OWN_TIMEOUT_S = 3.0
"""Time for a worker to answer a request of the gateway's own."""

REQUEST_FAULTS = frozenset({400, 413, 422})
"""Statuses of a request that no worker would accept."""


class Answered(NamedTuple):
    """The worker responded, or refused a request that no worker would accept.

    response   for the client; None if it was sent as a stream
    """

    response: Response | None


class Failed(NamedTuple):
    """The attempt failed. `Delivery` knows what was sent to the client.

    reason   connect: the worker cannot be reached. full, unavailable, failed: it answered 429, 503,
             another status, or an error at the end of its body. dropped: the connection ended
             early. stalled: the worker gave no sign of life, or its response stood still. timeout:
             no response began
    error    for the client if there is no other attempt
    """

    reason: Reason
    error: RequestError


class Forwarder:
    """Makes attempts over shared connections, which the gateway owns.

    first_byte_timeout_s   time for a worker to begin its response
    """

    def __init__(self, workers: WorkerConnections, first_byte_timeout_s: float) -> None:
        self._workers = workers
        self._first_byte_timeout_s = first_byte_timeout_s

    async def attempt(
        self, delivery: Delivery, placement: Placement, began: Callable[[int], None]
    ) -> Answered | Failed:
        """Send the request to the worker of its placement, and relay the response.

        `began` is called at the first byte of a response, with the prompt tokens that the worker
        has reused. Raises ClientGone. If the caller is cancelled, the worker's connection is closed
        at once, which cancels the request there.
        """
        worker = placement.worker
        try:
            upstream = await self._workers.post(
                placement.address,
                "/generate",
                msgspec.msgpack.encode(delivery.generate),
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
                return await _refused(upstream, worker, begun=delivery.begun)
            return await _relay(upstream, delivery, placement, began)
        except WorkerLost as error:
            return _lost(worker, error)
        finally:
            upstream.close()

    async def serves(self, address: str, like: GenerateRequest) -> bool:
        """Whether the worker answers a request for one token, to the model of `like`."""
        own = GenerateRequest(
            request_id=secrets.token_hex(16),
            model=like.model,
            kind="completion",
            token_ids=pack_tokens([0]),
            sampling=Sampling(max_tokens=1, temperature=0.0),
        )
        body = msgspec.msgpack.encode(own)
        try:
            answer = await self._workers.post(address, "/generate", body, OWN_TIMEOUT_S)
        except (WorkerUnreachable, WorkerLost, TimeoutError):
            return False
        answer.close()
        return answer.status in (200, 429)


async def _relay(
    upstream: WorkerAnswer,
    delivery: Delivery,
    placement: Placement,
    began: Callable[[int], None],
) -> Answered | Failed:
    """Pass the body on as it arrives. Raises WorkerLost, ClientGone."""
    headers = upstream.headers
    frames = FrameReader() if headers.get(HEADER_PROGRESS) == "1" else None
    reader: BodyReader = frames or EventReader()
    try:
        chunk = await upstream.some()
        hit_tokens = headers.get(HEADER_HIT_TOKENS, "")
        hit = int(hit_tokens) if hit_tokens.isdecimal() else 0
        if delivery.hit_tokens is None:
            began(hit)
        delivery.answered(placement, hit, headers.get("content-type", "application/json"))
        while chunk:
            data = reader.feed(chunk)
            if upstream.ended if frames is None else frames.last:
                break
            await delivery.send(data)
            if frames is not None and frames.error:
                delivery.interrupted(reader.ids)
                return Failed("failed", _told(frames.error, 500, placement.worker))
            chunk = await upstream.some()
        else:
            if frames is not None:
                raise WorkerLost("the body ended before its last frame")
            data = b""
    except WorkerLost:
        delivery.interrupted(reader.ids)
        raise
    response = delivery.end(data + reader.rest())
    with suppress(WorkerLost):
        while not upstream.ended:  # the end of the framing, to keep the connection
            await upstream.some()
    return Answered(response)


async def _refused(upstream: WorkerAnswer, worker: str, *, begun: bool) -> Answered | Failed:
    """Pass on what no worker would accept. All other statuses concern this worker only: retry.

    An unexpected status, such as 401 or 404, becomes 502: the worker, or a process that has taken
    its port, does not serve this pool.
    """
    body = await upstream.read()
    status = upstream.status
    if status in REQUEST_FAULTS and not begun:
        kind = upstream.headers.get("content-type", "application/json")
        return Answered(Response(body, status, {"Content-Type": kind}))
    if status < 500 and status != 429:
        status = 502
    return Failed(_REASONS.get(status, "failed"), _told(body, status, worker, upstream.status))


def _told(body: bytes, status: int, worker: str, told_status: int = 0) -> RequestError:
    """The error of a worker's body, with `status` for the client."""
    try:
        told = msgspec.json.decode(body, type=ErrorAnswer).error
    except msgspec.MsgspecError:
        return RequestError(
            f"the worker {worker} answered with status {told_status or status}: retry",
            status=status,
            type="server_error",
            code="worker_failed",
        )
    kind = told.type if told_status in (0, status) else "server_error"
    return RequestError(told.message, status=status, type=kind, param=told.param, code=told.code)


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
