"""Endpoints of a gateway with several processes: one response for all of them.

The process that a client reaches answers for all. Counts are added up. Every process follows the
reports of all workers, so the process that was asked returns its own view of the fleet. Metrics
keep one series per process, with the label `process`. All other endpoints are the same in every
process.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from cluster.metric_definition import exposition, with_labels
from cluster.protocol import ErrorAnswer, RequestError
from router.admin import FLUSH_TIMEOUT_S, FleetView, ShadowAnswer
from router.edge import Route, json_response
from router.http_messages import Handler, Request, Response
from router.readiness import ReadyView
from router.shadow import sum_of_views
from router.siblings import SiblingAnswer, Siblings
from router.worker_admin import WEIGHTS_TIMEOUT_S

PRIVATE = "/process"
"""Prefix of the paths between processes, which are served on their own sockets only."""


class Combined:
    """Handlers for clients.

    local         this process's own routes
    await_flush   responds when this process has the epochs in a request's body
    """

    def __init__(self, siblings: Siblings, local: Sequence[Route], await_flush: Handler) -> None:
        self._siblings = siblings
        self._await_flush = await_flush
        self._routes = local
        self._local = {(route.method, route.path): route.handler for route in local}

    def routes(self) -> list[Route]:
        """The local routes, with the combined handlers in place of those that cover one process."""
        combining: dict[tuple[str, str], Handler] = {
            ("GET", "/ready"): self._ready,
            ("GET", "/metrics"): self._metrics,
            ("GET", "/admin/fleet"): self._fleet,
            ("GET", "/admin/shadow"): self._shadow,
            ("GET", "/admin/decisions/{request_id}"): self._decision,
            ("POST", "/admin/policy"): self._set_policy,
            ("POST", "/admin/flush"): self._flush,
            ("POST", "/admin/weights"): self._change_weights,
        }
        return [
            route._replace(handler=combining.get((route.method, route.path), route.handler))
            for route in self._routes
        ]

    def private_routes(self) -> list[Route]:
        """Routes for the other processes."""
        return [
            *(route._replace(path=PRIVATE + route.path) for route in self._routes),
            Route("POST", f"{PRIVATE}/flushed", self._await_flush),
        ]

    async def _ready(self, request: Request) -> Response:
        """Ready if all processes are; reasons name the process."""
        response = await self._own(request)
        own = msgspec.json.decode(response.body, type=ReadyView)
        reasons, degraded = list(own.reasons), list(own.degraded)
        for answer in await self._siblings.ask_all("GET", f"{PRIVATE}/ready"):
            view = msgspec.json.decode(answer.body, type=ReadyView)
            reasons += [f"process {answer.number}: {reason}" for reason in view.reasons]
            degraded += [f"process {answer.number}: {reason}" for reason in view.degraded]
        view = msgspec.structs.replace(own, ready=not reasons, reasons=reasons, degraded=degraded)
        return json_response(view, status=503 if reasons else 200)

    async def _metrics(self, request: Request) -> Response:
        own = await self._own(request)
        texts = {self._siblings.number: own.body}
        for answer in await self._siblings.ask_all("GET", f"{PRIVATE}/metrics"):
            texts[answer.number] = answer.body
        return Response(labelled(texts), headers=own.headers)

    async def _fleet(self, request: Request) -> Response:
        views = [
            msgspec.json.decode(body, type=FleetView)
            for body in await self._bodies(request, "/admin/fleet")
        ]
        own = views[0]
        routed = Counter[str]()
        for view in views:
            routed.update({worker.worker: worker.routed for worker in view.workers})
        stale = [view.bus for view in views if view.bus.stale]
        return json_response(
            msgspec.structs.replace(
                own,
                requests_total=sum(view.requests_total for view in views),
                in_flight=sum(view.in_flight for view in views),
                bus=stale[0] if stale else own.bus,
                refused={name: why for view in views for name, why in view.refused.items()},
                disagreeing={name: why for view in views for name, why in view.disagreeing.items()},
                encoders=list(dict.fromkeys(each for view in views for each in view.encoders)),
                workers=[
                    msgspec.structs.replace(worker, routed=routed[worker.worker])
                    for worker in own.workers
                ],
            )
        )

    async def _shadow(self, request: Request) -> Response:
        answers = [
            msgspec.json.decode(body, type=ShadowAnswer).arms
            for body in await self._bodies(request, "/admin/shadow")
        ]
        return json_response(
            ShadowAnswer(arms=[sum_of_views(arms) for arms in zip(*answers, strict=True)])
        )

    async def _decision(self, request: Request) -> Response:
        """The decision, from the process that made it."""
        try:
            return await self._own(request)
        except RequestError:
            path = f"{PRIVATE}/admin/decisions/{request.argument}"
            for answer in await self._siblings.ask_all("GET", path):
                if answer.status == 200:
                    return json_response(msgspec.Raw(answer.body))
            raise

    async def _set_policy(self, request: Request) -> Response:
        own = await self._own(request)
        path = f"{PRIVATE}/admin/policy"
        for answer in await self._siblings.ask_all("POST", path, request.body):
            _refuse_failure(answer)
        return own

    async def _flush(self, request: Request) -> Response:
        """Flush the workers, and wait until the index of every process has the new epochs."""
        own = await self._own(request)
        path = f"{PRIVATE}/flushed"
        answers = await self._siblings.ask_all("POST", path, own.body, 2 * FLUSH_TIMEOUT_S)
        for answer in answers:
            _refuse_failure(answer)
        return own

    async def _change_weights(self, request: Request) -> Response:
        """Always in process 0, so that two changes never run at once."""
        if self._siblings.number == 0:
            return await self._own(request)
        path = f"{PRIVATE}/admin/weights"
        answer = await self._siblings.ask(0, "POST", path, request.body, WEIGHTS_TIMEOUT_S)
        _refuse_failure(answer)
        return json_response(msgspec.Raw(answer.body))

    async def _own(self, request: Request) -> Response:
        response = await self._local[request.method.replace("HEAD", "GET"), request.endpoint](
            request
        )
        assert response is not None, "none of these is a stream"
        return response

    async def _bodies(self, request: Request, path: str) -> list[bytes]:
        """The responses of all processes, this one's first."""
        own = await self._own(request)
        answers = await self._siblings.ask_all("GET", PRIVATE + path)
        return [own.body, *(answer.body for answer in answers)]


def labelled(texts: dict[int, bytes]) -> bytes:
    """Merge the metrics of processes (Prometheus text format), adding the label `process`."""
    families: dict[str, Metric] = {}
    for number, text in sorted(texts.items()):
        parsed = text_string_to_metric_families(text.decode())
        for family in with_labels(parsed, {"process": str(number)}):
            known = families.setdefault(family.name, family)
            if known is not family:
                known.samples += family.samples
    return exposition(families.values())


def _refuse_failure(answer: SiblingAnswer) -> None:
    if answer.status != 200:
        told = msgspec.json.decode(answer.body, type=ErrorAnswer).error
        raise RequestError(
            f"process {answer.number} of this gateway: {told.message}",
            status=answer.status,
            type=told.type,
            param=told.param,
            code=told.code,
        )
