"""The search for the highest rate that still meets a bound. Pure: what is tried, others try."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple


class Bracket(NamedTuple):
    """The answer lies between: `low` met the bound (0: none did), `high` did not (inf: all did)."""

    low: float
    high: float

    def narrow(self, precision: float) -> bool:
        """Whether the two are within `precision` (0.1 is 10 %) of each other."""
        return self.high <= self.low * (1 + precision)


class RateSearch:
    """Doubles or halves until the answer is between two rates, then bisects in ratios.

    search = RateSearch(start=2.0, precision=0.1, max_trials=12)
    for rate in search.rates():
        search.tell(met=...)
    search.bracket
    """

    def __init__(self, start: float, precision: float, max_trials: int) -> None:
        self.bracket = Bracket(0.0, math.inf)
        self._rate = start
        self._precision = precision
        self._trials_left = max_trials

    def rates(self) -> Iterator[float]:
        """The next rate to try, until the bracket is narrow enough or trials run out."""
        while self._trials_left > 0 and not self.bracket.narrow(self._precision):
            self._trials_left -= 1
            yield self._rate

    def tell(self, *, met: bool) -> None:
        """Whether the rate that was yielded last met the bound."""
        low, high = self.bracket
        self.bracket = Bracket(self._rate, high) if met else Bracket(low, self._rate)
        low, high = self.bracket
        if high == math.inf:
            self._rate = low * 2
        elif low == 0:
            self._rate = high / 2
        else:
            self._rate = math.sqrt(low * high)
