"""Prefill speed of this worker, fitted to its own steps and robust to stalls.

A step takes `c + b × prefill tokens + e × pairs + d × decodes`, where a pair is one query attending
to one key. Over a window of the latest steps with prefill, the four are fitted by iteratively
reweighted, non-negative least squares on relative residuals: Huber's weights first, then Tukey's
biweight, so that a stalled step does not count. (Huber & Ronchetti,
"Robust Statistics", 2nd ed., sections 7.8 and 4.8.)

Two numbers are reported: `b` including the fixed cost of steps spread over their tokens, which is
well determined even if all chunks have one size, and `e`. Until there are enough steps, the numbers
are the initial ones: timed in the empty pool (`worker.first_speed`) or from a profile.
"""

from __future__ import annotations

from itertools import combinations
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

WINDOW_STEPS = 256
"""Window of steps with prefill; older ones are dropped."""

MIN_STEPS = 8
MIN_TOKENS = 256
"""Minimum of steps and prefill tokens before a fit."""

FIT_EVERY_STEPS = 32
"""A fit takes about 1 ms."""

DIGITS = 3
"""Significant digits reported; smaller changes are not."""

HUBER = 1.345
TUKEY = 4.685
"""Residuals above which weights decrease (Huber) or are 0 (Tukey), in robust deviations."""

RELUCTANCE = np.array([3e-4, 1e-9, 3e-4, 3e-4])
"""Reluctance of fixed cost, tokens, pairs, decodes. If all steps are alike, tokens explain their
time, which extrapolates best to prompts of other sizes."""

LEAST_SPREAD = 0.01
"""Relative residuals below this are never outliers."""

FloatArray = NDArray[np.float64]


class StepWork(NamedTuple):
    """The work of one step.

    prefill_tokens   of all sequences
    prefill_pairs    query-key pairs of their attention
    decodes          sequences that decoded one token
    synced           a token was sampled, so the device has finished when the step returns
    """

    prefill_tokens: int
    prefill_pairs: int
    decodes: int
    synced: bool


class Speed(NamedTuple):
    """Seconds of prefill per token and per query-key pair of its attention."""

    s_per_token: float = 0.0
    s_per_pair: float = 0.0

    @classmethod
    def rounded(cls, s_per_token: float, s_per_pair: float) -> Speed:
        """To `DIGITS`."""
        return cls(float(f"{s_per_token:.{DIGITS}g}"), float(f"{s_per_pair:.{DIGITS}g}"))


UNKNOWN = Speed()


class PrefillSpeed:
    """Add every step; `speed` is the fit, or `first` before there is one."""

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
        """Add a step, with a clock in seconds at its start and end.

        A step that samples nothing may still run on the device when it returns, so it is added to
        the next one.
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
        """Ignore a failed step and its time."""
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
    """Robust non-negative coefficients `[k]` with `features @ coefficients` close to `seconds`.

    features `[n, k]`: steps, prefill tokens, pairs, decodes, or those of `reluctance_of` (`[k]`);
    seconds `[n]`, positive. Residuals are relative to the measured time.
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
    """Weighted least squares with non-negative coefficients: `[k]`, k small.

    The optimum is the best of all subsets of columns whose solution is non-negative. `reluctance`
    `[k]` keeps columns small that explain no more than others.
    """
    k = columns.shape[1]
    weighted = columns * weights[:, None]
    gram, right = weighted.T @ columns, weighted.T @ target
    total = float(np.trace(gram))
    if not total > 0:  # every row is an outlier
        return np.zeros(k)
    gram[np.diag_indices(k)] *= 1.0 + reluctance
    gram[np.diag_indices(k)] += 1e-12 * total  # a column with outliers only
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
