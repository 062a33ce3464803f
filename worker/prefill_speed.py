"""How quick this worker prefills: fitted from its own steps, robust to stalls.

A step takes `c + b × prefill tokens + e × pairs + d × decodes`, where a pair is one query
looking at one key. Over a window of the latest steps with prefill, the four are fitted by
iteratively reweighted, non-negative least squares on relative residuals: Huber's weights first,
then Tukey's biweight, so that a step that was held up does not count. (Huber & Ronchetti,
"Robust Statistics", 2nd ed., sections 7.8 and 4.8.)

What is reported are two numbers: `b` with the steps' fixed cost spread over their tokens, which
is also well determined where all chunks are of one size, and `e`. Until there are steps enough they
are what was known at the start: timed in the empty pool (`worker.first_speed`), or a profile's.
"""

from __future__ import annotations

from itertools import combinations
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

WINDOW_STEPS = 256
"""Steps with prefill that are looked at; older ones are forgotten."""

MIN_STEPS = 8
MIN_TOKENS = 256
"""Nothing is fitted before so many steps and prefill tokens."""

FIT_EVERY_STEPS = 32
"""A fit takes about 1 ms."""

DIGITS = 3
"""Significant digits reported: smaller changes are no news."""

HUBER = 1.345
TUKEY = 4.685
"""Where residuals begin to count less / do not count, in robust standard deviations."""

RELUCTANCE = np.array([3e-4, 1e-9, 3e-4, 3e-4])
"""Of fixed cost, tokens, pairs, decodes. Where steps look all alike, tokens explain them: that
carries over to prompts of other sizes least badly."""

LEAST_SPREAD = 0.01
"""Relative residuals below this are never taken for outliers."""

FloatArray = NDArray[np.float64]


class StepWork(NamedTuple):
    """What one step computed.

    prefill_tokens   of all sequences
    prefill_pairs    query-key pairs of their attention
    decodes          sequences that got one token more
    synced           a token was sampled, so that the device has finished when the step returns
    """

    prefill_tokens: int
    prefill_pairs: int
    decodes: int
    synced: bool


class Speed(NamedTuple):
    """Seconds to prefill: for each token, and for each query-key pair of its attention."""

    s_per_token: float = 0.0
    s_per_pair: float = 0.0

    @classmethod
    def rounded(cls, s_per_token: float, s_per_pair: float) -> Speed:
        """To `DIGITS`."""
        return cls(float(f"{s_per_token:.{DIGITS}g}"), float(f"{s_per_pair:.{DIGITS}g}"))


UNKNOWN = Speed()


class PrefillSpeed:
    """Give it every step; it tells `speed`: `first` until it knows better."""

    def __init__(self, first: Speed = UNKNOWN) -> None:
        self.speed = first
        self._fitted = False
        # columns: steps, prefill tokens, prefill pairs, decodes, seconds
        self._rows = np.zeros((WINDOW_STEPS, 5))
        self._count = 0
        self._since_fit = 0
        self._open: list[float] | None = None
        self._open_since = 0.0

    def observe(self, work: StepWork, began_s: float, ended_s: float) -> None:
        """One step, with a clock in seconds at its begin and end.

        A step that samples nothing may still run on the device when it returns, so it is added
        to the next one.
        """
        row = [1.0, float(work.prefill_tokens), float(work.prefill_pairs), float(work.decodes)]
        if self._open is not None:
            row = [one + other for one, other in zip(self._open, row, strict=True)]
        else:
            self._open_since = began_s
        if not work.synced:
            self._open = row
            return
        self._open = None
        seconds = ended_s - self._open_since
        if row[1] and seconds > 0:
            self._rows[self._count % WINDOW_STEPS] = [*row, seconds]
            self._count += 1
            self._since_fit += 1
            enough = self._count >= MIN_STEPS and self._rows[:, 1].sum() >= MIN_TOKENS
            if enough and (self._since_fit >= FIT_EVERY_STEPS or not self._fitted):
                self._fit()

    def interrupted(self) -> None:
        """A step failed: its time says nothing."""
        self._open = None

    def _fit(self) -> None:
        self._since_fit = 0
        rows = self._rows[: min(self._count, WINDOW_STEPS)]
        fixed, token, pair, _ = fit_step_time(rows[:, :4], rows[:, 4])
        steps, tokens = rows[:, 0].sum(), rows[:, 1].sum()
        each = token + fixed * steps / tokens
        if each > 0:
            self.speed = Speed.rounded(each, pair)
            self._fitted = True


def fit_step_time(
    features: FloatArray, seconds: FloatArray, reluctance_of: FloatArray = RELUCTANCE
) -> FloatArray:
    """Non-negative coefficients `[k]` with `features @ coefficients` near `seconds`, robustly.

    features `[n, k]`: steps, prefill tokens, pairs, decodes, or what `reluctance_of` (`[k]`) is
    for; seconds `[n]`, positive. Residuals count relative to the time they deviate from.
    """
    scale = features.max(axis=0)
    used = scale > 0
    columns = features[:, used] / scale[used]
    weights = 1.0 / seconds**2
    reluctance = reluctance_of[used]
    solution = _not_negative(columns, seconds, weights, reluctance)
    for turn in range(10):
        predicted = np.maximum(columns @ solution, 1e-12)
        residuals = np.abs(seconds - predicted) / predicted
        spread = max(1.4826 * float(np.median(residuals)), LEAST_SPREAD)
        if turn < 5:
            trust = np.minimum(1.0, HUBER * spread / np.maximum(residuals, 1e-12))
        else:
            trust = np.maximum(0.0, 1.0 - (residuals / (TUKEY * spread)) ** 2) ** 2
        solution = _not_negative(columns, seconds, trust / predicted**2, reluctance)
    coefficients = np.zeros(len(scale))
    coefficients[used] = solution / scale[used]
    return coefficients


def _not_negative(
    columns: FloatArray, target: FloatArray, weights: FloatArray, reluctance: FloatArray
) -> FloatArray:
    """Weighted least squares with coefficients that are not negative: `[k]`, k small.

    The best of all sets of columns whose own solution is not negative is the optimum.
    `reluctance` `[k]` keeps columns small that explain no more than others do.
    """
    k = columns.shape[1]
    weighted = columns * weights[:, None]
    gram, right = weighted.T @ columns, weighted.T @ target
    total = float(np.trace(gram))
    if not total > 0:  # every row was taken for an outlier
        return np.zeros(k)
    gram[np.diag_indices(k)] *= 1.0 + reluctance
    gram[np.diag_indices(k)] += 1e-12 * total  # a column of outliers only
    solution: FloatArray = np.linalg.solve(gram, right).astype(np.float64, copy=False)
    if (solution >= 0).all():
        return solution
    best, best_value = np.zeros(k), 0.0
    for size in range(1, k):
        for chosen in combinations(range(k), size):
            part = list(chosen)
            own = np.linalg.solve(gram[np.ix_(part, part)], right[part])
            value = -float(right[part] @ own)
            if value < best_value and (own >= 0).all():
                best, best_value = np.zeros(k), value
                best[part] = own
    return best
