"""What this router sees of its own requests to a model: how often they come, how long they stay."""

from __future__ import annotations

from math import exp

MEMORY_S = 60.0
"""An arrival counts less by the factor e after so long."""

LEAST_S = 5.0
"""The first arrivals count as spread over so long at least: a burst at the beginning is no rate."""

ANEW = 5
"""After a silence of more than `MEMORY_S`, so many arrivals without another such silence are new
traffic. What came before the silence, and the silence itself, then no longer count: they would
make the rate seem too low for as long as the memory lasts. Traffic whose arrivals are always so far
apart never gets there."""


class Traffic:
    """An average over the latest arrivals, weighed by their age, and a count of those not ended: a
    few numbers, however many come.

    Times are in seconds of whatever clock the caller reads.
    """

    __slots__ = ("_before", "_began", "_last", "_resumed", "_since", "_weight", "in_flight")

    def __init__(self) -> None:
        self.in_flight = 0
        self._weight = 0.0  # of all arrivals, at the time of the last one
        self._began = self._last = 0.0
        self._resumed = 0.0  # the first arrival after the latest silence
        self._since = 0  # arrivals from then on
        self._before = 0.0  # weight then of those before

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
        """Arrivals a second; 0 before the first. Falls while nobody comes."""
        if not self._weight:
            return 0.0
        weight = self._weight * exp((self._last - now) / MEMORY_S)
        # what a steady stream since the first arrival would weigh, at one a second
        known_s = max(LEAST_S, now - self._began)
        return weight / (MEMORY_S * (1.0 - exp(-known_s / MEMORY_S)))

    def stay_s(self, now: float) -> float:
        """Seconds from a request's placement to its end at the present load, by Little's law; 0
        where none is in flight.

        Of this router's own requests alone, so that others that send to the same workers do not
        distort it. Where none has come for long the rate says little, and in the end nothing; then
        it is no more than the time since the first one that counts.
        """
        if not self.in_flight:
            return 0.0
        longest_s = max(MEMORY_S, now - self._began)
        rate = self.per_s(now)
        return min(self.in_flight / rate, longest_s) if rate else longest_s
