"""How long a request may have to wait before it starts; beyond that it is refused at once.

The limit is `max_wait_s`, and less where the model's requests are known to wait less: then it is
`SLACK` times the 99th percentile of their expected waits while nothing was refused. A queue that
stays full for as long as more arrives than fits would only make all requests late, and start none
sooner. Waits before and during an overload are not usual ones.
"""

from __future__ import annotations

from collections import deque
from math import ceil

USUAL_REQUESTS = 512
"""The usual wait is that of the latest so many requests that had to wait."""

LEAST_REQUESTS = 32
"""With fewer of them, the usual wait is unknown."""

USUAL_S = 600.0
"""Requests longer ago do not count."""

CALM_S = 20.0
"""A wait is a usual one if nothing is refused within this time after it."""

KNOWN_S = 1.0
"""The usual wait is computed again after this time."""

SLACK = 1.4
"""Of the usual wait: room for chance, and for load that grows."""

LEAST_STARTS = 12
"""The limit is never shorter than the time in which this many requests of the model start: so many
wait at times under a load that the workers can carry."""

LONGEST_RETRY_S = 60
"""Clients are never told to stay away for longer."""


class UsualWaits:
    """The expected waits of a model's admitted requests. Times are seconds of the caller's clock.

    Only those that had to wait count, or the usual wait would depend on how many did not.
    """

    def __init__(self) -> None:
        self._recent: deque[tuple[float, float]] = deque()  # (arrival, wait), not known to be calm
        self._usual: deque[tuple[float, float]] = deque(maxlen=USUAL_REQUESTS)
        self._p99_s: float | None = None
        self._known_until = 0.0  # when `_p99_s` is computed again

    def note(self, now: float, wait_s: float) -> None:
        """A request was admitted that has to wait."""
        self._recent.append((now, wait_s))

    def refused(self) -> None:
        """A request was refused."""
        self._recent.clear()

    def p99_s(self, now: float) -> float | None:
        """The 99th percentile; None if too few had to wait lately."""
        if now >= self._known_until:
            recent, usual = self._recent, self._usual
            while recent and recent[0][0] <= now - CALM_S:
                usual.append(recent.popleft())
            while usual and usual[0][0] <= now - USUAL_S:
                usual.popleft()
            waits = sorted(wait_s for _, wait_s in usual)
            enough = len(waits) >= LEAST_REQUESTS
            self._p99_s = waits[int(0.99 * len(waits))] if enough else None
            self._known_until = now + KNOWN_S
        return self._p99_s


class WaitLimit:
    """The limit of one model, and when refused requests may come back.

    max_wait_s   longest expected wait; 0: no limit
    """

    def __init__(self, max_wait_s: float) -> None:
        self._max_wait_s = max_wait_s
        self._usual = UsualWaits()
        self._turn_at = 0.0  # when the next refused request will find a place

    def allowed_s(self, now: float, interval_s: float) -> float:
        """The longest expected wait that is accepted now.

        interval_s   measured seconds from one start of the model's requests to the next
        """
        if not self._max_wait_s:
            return float("inf")
        usual_s = self._usual.p99_s(now)
        if usual_s is None:
            return self._max_wait_s
        return min(self._max_wait_s, max(LEAST_STARTS * interval_s, SLACK * usual_s))

    def admitted(self, now: float, wait_s: float) -> None:
        """A request was admitted that has to wait so long."""
        self._usual.note(now, wait_s)

    def refuse(self, now: float, over_s: float, interval_s: float) -> int:
        """A request is refused because its wait is `over_s` too long. Returns the whole seconds
        after which it may come back.

        Refused requests get turns at the rate at which requests start, so that they do not all come
        back at the same time.
        """
        self._usual.refused()
        self._turn_at = max(self._turn_at + interval_s, now + over_s)
        self._turn_at = min(self._turn_at, now + LONGEST_RETRY_S)
        return max(1, ceil(self._turn_at - now))
