"""Health probes: how a gateway checks a worker directly when Redis cannot tell."""

from __future__ import annotations

from collections.abc import Callable

import aiohttp
import msgspec

from cluster.liveness import Health
from cluster.protocol import WorkerCard


class _HealthAnswer(msgspec.Struct):
    """The response of a worker's `/health`."""

    worker: str
    ready: bool
    reason: str = ""


class HealthProbe:
    """A `cluster.liveness.Probe`: `GET /health` of the worker.

    session    returns the gateway's session, once it has started
    timeout_s  of one request
    attempts   requests that may time out; a refused connection is not retried
    """

    def __init__(
        self, session: Callable[[], aiohttp.ClientSession], timeout_s: float, attempts: int = 1
    ) -> None:
        self._session = session
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._attempts = attempts

    async def __call__(self, card: WorkerCard) -> Health:
        """Probe, and retry after a timeout."""
        for _ in range(self._attempts):
            try:
                return await self._ask(card)
            except TimeoutError:
                continue
            except (aiohttp.ClientError, OSError, msgspec.MsgspecError) as error:
                return _no_answer(f"it cannot be reached: {str(error) or repr(error)}")
        requests = "1 request" if self._attempts == 1 else f"{self._attempts} requests"
        return _no_answer(f"it did not answer {requests} within {self._timeout.total:g} s each")

    async def _ask(self, card: WorkerCard) -> Health:
        url = f"{card.address}/health"
        async with self._session().get(url, timeout=self._timeout) as answer:
            health = msgspec.json.decode(await answer.read(), type=_HealthAnswer)
        if health.worker != card.worker:
            return _no_answer(f"another worker, {health.worker}, answers at its address")
        return Health(answers=True, ready=health.ready, reason=health.reason)


def _no_answer(reason: str) -> Health:
    return Health(answers=False, ready=False, reason=reason)
