"""The clock of a simulation: things happen in the order of their times."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any


class Timer:
    """A call that is due once, unless it is cancelled before."""

    __slots__ = ("_callback",)

    def __init__(self, callback: Callable[[], object]) -> None:
        self._callback: Callable[[], object] | None = callback

    def cancel(self) -> None:
        """Do not make the call; harmless when it was made."""
        self._callback = None

    def __call__(self) -> None:
        if self._callback is not None:
            self._callback()


class Clock:
    """Virtual time in seconds. What is due at one time happens in the order in which it was set.

    A `router.admission.Scheduler`.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._count = 0

    def at(self, time_s: float, action: Callable[..., object], *arguments: Any) -> None:
        """Call `action(*arguments)` at `time_s`; at once where that has passed."""
        self._count += 1
        heapq.heappush(self._due, (max(time_s, self.now), self._count, action, arguments))

    def call_soon(self, callback: Callable[[], object]) -> Timer:
        """Call after what is due now already."""
        return self.call_later(0.0, callback)

    def call_later(self, delay_s: float, callback: Callable[[], object]) -> Timer:
        """Call in `delay_s` from now."""
        timer = Timer(callback)
        self.at(self.now + delay_s, timer)
        return timer

    def run(self) -> None:
        """Until nothing is due any more."""
        due = self._due
        while due:
            self.now, _, action, arguments = heapq.heappop(due)
            action(*arguments)
