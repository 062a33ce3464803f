"""Arrival rate and duration of this router's own requests to a model."""

from __future__ import annotations

from math import exp

MEMORY_S = 60.0
"""The weight of an arrival falls by the factor e in this time."""

LEAST_S = 5.0
"""The first arrivals are spread over at least this time, so that a first burst is not taken for a
rate."""

ANEW = 5
"""After a silence of more than `MEMORY_S`, this many arrivals without another such silence are new
traffic. Then the silence and the arrivals before it no longer count: they would make the rate too
low as long as they have weight. Traffic whose arrivals are always so far apart never reaches it."""


class Traffic:
    """An average over arrivals, weighted by their age, and a count of those that have not ended, in
    constant memory.

    Times are in seconds of the caller's clock.
    """

    __slots__ = ("_before", "_began", "_last", "_resumed", "_since", "_weight", "in_flight")

    def __init__(self) -> None:
        self.in_flight = 0
        self._weight = 0.0  # weight of all arrivals, at the time of the last one
        self._began = self._last = 0.0
        self._resumed = 0.0  # the first arrival after the latest silence
        self._since = 0  # arrivals from then on
        self._before = 0.0  # weight, at that time, of the arrivals before

    def come(self, now: float) -> None:
        """A request was placed."""
        weight = self._weight * exp((self._last - now) / MEMORY_S)
        if not self._weight:
            self._began = self._resumed = now
        elif now - self._last > MEMORY_S:
            self._resumed, self._since, self._before = now, 0, weight
        self._since += 1
        if self._since == ANEW:
            weight -= self._before * exp((self._resumed - now) / MEMORY_S)
            self._began = self._resumed
        self._weight = 1.0 + weight
        self._last = now
        self.in_flight += 1

    def end(self) -> None:
        """A request's response ended or failed."""
        self.in_flight -= 1

    def per_s(self, now: float) -> float:
        """Arrivals per second; 0 before the first. Falls while no request arrives."""
        if not self._weight:
            return 0.0
        weight = self._weight * exp((self._last - now) / MEMORY_S)
        # the weight of one arrival per second since the first arrival
        known_s = max(LEAST_S, now - self._began)
        return weight / (MEMORY_S * (1.0 - exp(-known_s / MEMORY_S)))

    def stay_s(self, now: float) -> float:
        """Mean seconds from a request's placement to its end at the present load, by Little's law;
        0 if none is in flight.

        It counts only this router's own requests, so that other senders to the same workers do not
        distort it. After a long time without arrivals the rate says little. So the result is at
        most the time since the first arrival that counts, or `MEMORY_S` if that is longer.
        """
        if not self.in_flight:
            return 0.0
        longest_s = max(MEMORY_S, now - self._began)
        rate = self.per_s(now)
        return min(self.in_flight / rate, longest_s) if rate else longest_s
