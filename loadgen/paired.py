"""Differences between two arms, request by request, with bootstrap intervals.

Both arms replay the same file, so each request is its own control. The intervals resample
pairs; they know of the requests drawn, not of what would differ if the arms were run again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from loadgen.outcomes import Outcome

RESAMPLES = 2000
CONFIDENCE = 0.95


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """`arm − base` of a mean (or of a token ratio), and `arm / base`, each with its interval.

    Ratios are None where the base is 0.
    """

    base: float
    arm: float
    difference: float
    low: float
    high: float
    ratio: float | None
    ratio_low: float | None
    ratio_high: float | None


class Paired(msgspec.Struct, frozen=True, kw_only=True):
    """One arm against the first. `pairs` counts requests that ended well in both."""

    against: str
    pairs: int
    confidence: float
    ttft_ms: Difference | None
    tpot_ms: Difference | None
    e2e_ms: Difference | None
    cached_token_ratio: Difference | None


Weighted = tuple[float, float]
"""A request's share of a ratio: numerator and weight. A mean has weight 1."""


def pair(against: str, base: Sequence[Outcome], arm: Sequence[Outcome], seed: int) -> Paired:
    """Compare `arm` with `base`; `against` is the base's name. Seeded, so repeatable."""
    others = {outcome.id: outcome for outcome in base if outcome.status == "ok"}
    pairs = [
        (others[outcome.id], outcome)
        for outcome in arm
        if outcome.status == "ok" and outcome.id in others
    ]

    def compare(measure: Callable[[Outcome], Weighted | None]) -> Difference | None:
        both = [(measure(one), measure(other)) for one, other in pairs]
        known = [(one, other) for one, other in both if one is not None and other is not None]
        return difference([one for one, _ in known], [other for _, other in known], seed)

    return Paired(
        against=against,
        pairs=len(pairs),
        confidence=CONFIDENCE,
        ttft_ms=compare(lambda outcome: _weigh(outcome.ttft_ms)),
        tpot_ms=compare(lambda outcome: _weigh(outcome.tpot_ms)),
        e2e_ms=compare(lambda outcome: _weigh(outcome.e2e_ms)),
        cached_token_ratio=compare(_cached),
    )


def difference(base: Sequence[Weighted], arm: Sequence[Weighted], seed: int) -> Difference | None:
    """Difference and ratio of two paired series of `(value, weight)`; None without pairs.

    Each side is Σ value / Σ weight. The interval is the percentile bootstrap over pairs.
    """
    if not base:
        return None
    rng = np.random.default_rng(seed)
    one, other = np.array(base), np.array(arm)
    size = len(one)
    low_high = [50 * (1 - CONFIDENCE), 50 * (1 + CONFIDENCE)]
    samples = np.empty((RESAMPLES, 2))
    for row in range(RESAMPLES):
        drawn = rng.integers(0, size, size)
        samples[row] = _mean(one[drawn]), _mean(other[drawn])
    first, second = _mean(one), _mean(other)
    low, high = np.percentile(samples[:, 1] - samples[:, 0], low_high)
    ratio_low = ratio_high = None
    if (samples[:, 0] > 0).all():
        ratio_low, ratio_high = np.percentile(samples[:, 1] / samples[:, 0], low_high).tolist()
    return Difference(
        base=first,
        arm=second,
        difference=second - first,
        low=float(low),
        high=float(high),
        ratio=second / first if first else None,
        ratio_low=ratio_low,
        ratio_high=ratio_high,
    )


def _mean(weighted: NDArray[np.float64]) -> float:
    value, weight = weighted.sum(axis=0)
    return float(value / weight) if weight else 0.0


def _weigh(value: float | None) -> Weighted | None:
    return None if value is None else (value, 1.0)


def _cached(outcome: Outcome) -> Weighted | None:
    if outcome.cached_tokens is None or not outcome.prompt_tokens:
        return None
    return float(outcome.cached_tokens), float(outcome.prompt_tokens)
