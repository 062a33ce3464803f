"""`/admin/cache` and `/admin/weights`: calls to every worker."""

from __future__ import annotations

import asyncio

import msgspec

from cluster.protocol import SERVICE_UNAVAILABLE, CacheView, RequestError
from router.edge import Route, admin_body, json_response
from router.fleet import Fleet
from router.http_messages import Request, Response
from router.member import Member
from router.worker_calls import CallFailed, WorkerCalls

STATS_TIMEOUT_S = 5.0
WEIGHTS_TIMEOUT_S = 3600.0
"""Time for one worker to drain and load weights: large models on slow disks take long."""


class CacheAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Response of `GET /admin/cache`. `silent` maps a worker to why its view is missing."""

    workers: list[CacheView]
    silent: dict[str, str]


class WeightsChange(msgspec.Struct, frozen=True):
    """Body of `POST /admin/weights`: a path on the workers' machines; "" means all workers, and
    those that start later."""

    model: str
    worker: str = ""


class ChangedWorker(msgspec.Struct, frozen=True):
    """A worker's answer to `POST /admin/weights`: its new epoch and the digest of its weights."""

    worker: str
    epoch: int
    weights: str


class WeightsAnswer(msgspec.Struct, frozen=True):
    """Answer of `POST /admin/weights`."""

    workers: list[ChangedWorker]


class WorkerAdmin:
    """Handlers."""

    def __init__(self, fleet: Fleet, calls: WorkerCalls) -> None:
        self._fleet = fleet
        self._calls = calls
        self._changing = asyncio.Lock()

    def routes(self) -> list[Route]:
        """The routes."""
        return [
            Route("GET", "/admin/cache", self.get_cache),
            Route("POST", "/admin/weights", self.change_weights),
        ]

    async def get_cache(self, request: Request) -> Response:
        """The cache view of every worker."""
        members = [m for m in self._fleet.members() if m.state in ("ready", "draining")]
        answers = await asyncio.gather(*(self._view_of(member) for member in members))
        return json_response(
            CacheAnswer(
                workers=[answer for answer in answers if isinstance(answer, CacheView)],
                silent={
                    member.card.worker: answer
                    for member, answer in zip(members, answers, strict=True)
                    if isinstance(answer, str)
                },
            )
        )

    async def change_weights(self, request: Request) -> Response:
        """Change one worker after the other, while the others go on serving.

        Stops at the first worker that refuses or fails. The error names the workers that have the
        new weights by then.
        """
        change = admin_body(request.body, WeightsChange, '{"model": "PATH"}', "model")
        members = [
            member
            for member in self._fleet.members()
            if member.state == "ready" and change.worker in ("", member.card.worker)
        ]
        if not members:
            raise RequestError(
                f"the worker {change.worker} is not ready"
                if change.worker
                else "no worker is ready",
                status=503,
                type=SERVICE_UNAVAILABLE,
                code="no_worker",
            )
        if self._changing.locked():
            raise RequestError("another change of weights is running", status=409)
        changed: list[ChangedWorker] = []
        async with self._changing:
            for member in members:
                changed.append(await self._change(member, change, changed))
        return json_response(WeightsAnswer(changed))

    async def _view_of(self, member: Member) -> CacheView | str:
        url = f"{member.card.address}/stats"
        try:
            return await self._calls.ask("GET", url, CacheView, STATS_TIMEOUT_S)
        except CallFailed as failed:
            return str(failed)

    async def _change(
        self, member: Member, change: WeightsChange, before: list[ChangedWorker]
    ) -> ChangedWorker:
        url = f"{member.card.address}/admin/weights"
        try:
            order = {"model": change.model, "pool": not change.worker}
            return await self._calls.ask("POST", url, ChangedWorker, WEIGHTS_TIMEOUT_S, order)
        except CallFailed as failed:
            status = failed.status if 400 <= failed.status < 500 else 502
            done = ", ".join(each.worker for each in before) or "none"
            raise RequestError(
                f"the worker {member.card.worker} did not change its weights: {failed}; "
                f"changed before it: {done}",
                status=status,
                type="invalid_request_error" if status < 500 else "server_error",
                param="model",
                code="weights_refused",
            ) from failed
