"""How fast waiting requests start, measured while some have to wait."""

from __future__ import annotations

MEMORY_STARTS = 32
"""Starts after which older ones count half."""

DIGITS = 2
"""Significant digits; smaller changes are no news."""


class StartRate:
    """Time during which requests had to wait, over the requests that started in it.

    It covers whatever limits the starts: prefill, places in the batch, KV blocks. Times are in
    seconds of the caller's clock.
    """

    def __init__(self) -> None:
        self._waited_s = 0.0
        self._starts = 0.0
        self._since: float | None = None  # the last call, if requests had to wait then

    def observe(self, now: float, started: int, waiting: bool) -> None:
        """Since the last call `started` requests have started; from `now` on, some or none wait."""
        if self._since is not None:
            self._waited_s += now - self._since
            self._starts += started
            if self._starts > 2 * MEMORY_STARTS:
                self._waited_s /= 2
                self._starts /= 2
        self._since = now if waiting else None

    @property
    def interval_s(self) -> float:
        """Mean seconds from one start to the next, rounded; 0: no request has had to wait yet."""
        return float(f"{self._waited_s / max(1.0, self._starts):.{DIGITS}g}")
