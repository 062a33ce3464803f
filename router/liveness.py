"""Health probes: how a gateway checks a worker directly when Redis cannot tell."""

from __future__ import annotations

from collections.abc import Callable

import aiohttp
import msgspec

from cluster.liveness import Health
from cluster.protocol import WorkerCard

ANSWER_TIMEOUT_S = 2.0
ATTEMPTS = 3
"""A busy worker may answer late; one that refuses the connection is not probed again."""


class _HealthAnswer(msgspec.Struct):
    """The response of a worker's `/health`."""

    worker: str
    ready: bool


class HealthProbe:
    """A `cluster.liveness.Probe`: `GET /health` of the worker.

    session   returns the gateway's session, once it has started
    """

    def __init__(self, session: Callable[[], aiohttp.ClientSession]) -> None:
        self._session = session

    async def __call__(self, card: WorkerCard) -> Health:
        """Probe, and retry after a timeout."""
        for _ in range(ATTEMPTS):
            try:
                return await self._ask(card)
            except TimeoutError:
                continue
            except (aiohttp.ClientError, OSError, msgspec.MsgspecError) as error:
                return _no_answer(f"it cannot be reached: {str(error) or repr(error)}")
        return _no_answer(
            f"it did not answer {ATTEMPTS} requests within {ANSWER_TIMEOUT_S:g} s each"
        )

    async def _ask(self, card: WorkerCard) -> Health:
        url = f"{card.address}/health"
        timeout = aiohttp.ClientTimeout(total=ANSWER_TIMEOUT_S)
        async with self._session().get(url, timeout=timeout) as answer:
            health = msgspec.json.decode(await answer.read(), type=_HealthAnswer)
        if health.worker != card.worker:
            return _no_answer(f"another worker, {health.worker}, answers at its address")
        return Health(answers=True, ready=health.ready, reason="")


def _no_answer(reason: str) -> Health:
    return Health(answers=False, ready=False, reason=reason)
