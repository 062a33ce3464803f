"""Whose fault a failure is: the worker's, or the request's own.

A request that fails in the same way at two workers, after the same output, is not carried to a
third: it may be what ends them. If both still answer, but with an error, the gateway
sends each a request of its own first; one that fails as well is the worker's fault.
"""

from __future__ import annotations

import asyncio

from cluster.protocol import RequestError
from router.delivery import Delivery
from router.dispatch import Placement
from router.fleet import Fleet
from router.forwarding import Failed, Forwarder

BLAMED = frozenset({"failed", "dropped", "stalled"})
"""Reasons that may be the request's own; the others are known to be the worker's."""


class Blame:
    """The failed attempts of one request.

    excused   workers that fail other requests as well
    """

    def __init__(self, fleet: Fleet, forwarder: Forwarder) -> None:
        self.excused = 0
        self._fleet = fleet
        self._forwarder = forwarder
        self._seen: dict[tuple[object, ...], Placement] = {}

    async def own(
        self, delivery: Delivery, placement: Placement, failed: Failed
    ) -> RequestError | None:
        """An attempt has failed. The error for the client if that is the request's own fault."""
        if failed.reason not in BLAMED:
            return None
        way = (
            failed.reason,
            failed.error.status,
            failed.error.code,
            len(delivery.generate.output_ids),
        )
        before = self._seen.setdefault(way, placement)
        if before is placement:
            return None
        both = (before, placement)
        if failed.reason == "failed":
            serve = await asyncio.gather(
                *(self._forwarder.serves(each.address, delivery.generate) for each in both)
            )
            faulty = [each for each, serves in zip(both, serve, strict=True) if not serves]
            if faulty:
                for each in faulty:
                    self._fleet.trust.at_fault(each.worker)
                self.excused += len(faulty)
                del self._seen[way]
                if before not in faulty or placement not in faulty:
                    self._seen[way] = placement if before in faulty else before
                return None
        for each in both:
            self._fleet.trust.forgive(each.worker)
        error = failed.error
        return RequestError(
            f"this request failed in the same way at {before.worker} and {placement.worker}, so no "
            f"other worker was tried: {error.message}",
            status=error.status,
            type=error.type,
            param=error.param,
            code=error.code,
        )
