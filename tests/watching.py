"""Waiting for what a gateway's fleet hears, without sleeping."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from router.gateway import Gateway

HEARD = ("on_card", "on_snapshot", "on_report", "on_gone")


class Heard:
    """Wakes whoever waits whenever the bus tells a gateway's fleet something."""

    def __init__(self, gateway: Gateway) -> None:
        self._changed = asyncio.Event()
        for name in HEARD:
            setattr(gateway.fleet, name, self._and_wake(getattr(gateway.fleet, name)))

    def _and_wake(self, method: Callable[..., object]) -> Callable[..., object]:
        def heard(*args: object) -> object:
            answer = method(*args)
            self._changed.set()
            return answer

        return heard

    async def until(self, true: Callable[[], bool], timeout_s: float = 20.0) -> None:
        """Return once `true()` holds after something was heard. Raises TimeoutError."""
        async with asyncio.timeout(timeout_s):
            while not true():
                self._changed.clear()
                await self._changed.wait()
