"""The clock of a simulation: things happen in the order of their times."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any


class Clock:
    """Virtual time in seconds. What is due at one time happens in the order in which it was set."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._count = 0

    def at(self, time_s: float, action: Callable[..., object], *arguments: Any) -> None:
        """Call `action(*arguments)` at `time_s`; at once where that has passed."""
        self._count += 1
        heapq.heappush(self._due, (max(time_s, self.now), self._count, action, arguments))

    def run(self) -> None:
        """Until nothing is due any more."""
        due = self._due
        while due:
            self.now, _, action, arguments = heapq.heappop(due)
            action(*arguments)
