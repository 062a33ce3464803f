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
        self._before = 0.0  # the last call
        self._since: float | None = None  # the last start, or when requests began to wait

    def observe(self, now: float, started: int, *, waiting: bool, idle: bool) -> None:
        """At `now` some requests have `started`, and others have to wait or none has.

        Only starts and the first wait matter, so that it may be called less often in between.

        idle   no request was running before those that started
        """
        if started and self._since is not None:
            self._waited_s += now - self._since
            self._starts += started
            if self._starts > 2 * MEMORY_STARTS:
                self._waited_s /= 2
                self._starts /= 2
            self._since = now
        if not waiting:
            self._since = None
        elif self._since is None:
            self._since = now if idle else self._before
        self._before = now

    def interval_s(self, now: float) -> float:
        """Mean seconds from one start to the next, rounded; 0: no request has had to wait yet.

        A present interval counts as soon as it is longer than the mean.
        """
        present_s = 0.0 if self._since is None else now - self._since
        if not self._starts:
            return _rounded(present_s)
        with_present_s = (self._waited_s + present_s) / (self._starts + 1)
        return _rounded(max(self._waited_s / self._starts, with_present_s))


def _rounded(seconds: float) -> float:
    return float(f"{seconds:.{DIGITS}g}")
