"""Differences between two arms, request by request, with bootstrap intervals.

Both arms replay the same file, so each request is its own control, within each repeat. The
intervals resample repeats, and pairs within them. With one repeat they know of the requests
drawn and not of what would differ if the arms were run again; with a few they know it roughly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from loadgen.measures import Slo, keeps
from loadgen.outcomes import Outcome

RESAMPLES = 1000
CONFIDENCE = 0.95


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """`arm − base` of a mean, a quantile or a ratio, and `arm / base`, each with its interval.

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
    """One arm against the first.

    pairs           requests that ended well in both, over all repeats; each of a repeat is one
    ttft_ms, …      of means; `_p50_ms` and `_p99_ms` of quantiles over the same requests
    kept_share      share of all requests that kept every bound; None where there is no bound
    """

    against: str
    pairs: int
    confidence: float
    ttft_ms: Difference | None
    ttft_p50_ms: Difference | None
    ttft_p99_ms: Difference | None
    tpot_ms: Difference | None
    tpot_p50_ms: Difference | None
    e2e_ms: Difference | None
    e2e_p50_ms: Difference | None
    cached_token_ratio: Difference | None
    kept_share: Difference | None


Weighted = tuple[float, float]
"""A request's share of a ratio: numerator and weight. A mean has weight 1."""

Pairs = list[tuple[Outcome, Outcome]]
Measure = Callable[[Outcome], Weighted | None]


def pair(
    against: str,
    base: Sequence[Sequence[Outcome]],
    arm: Sequence[Sequence[Outcome]],
    slo: Slo,
    seed: int,
) -> Paired:
    """Compare `arm` with `base`, each a list of repeats; `against` is the base's name.

    Seeded, so repeatable.
    """
    everything = [_pairs(one, other) for one, other in zip(base, arm, strict=True)]
    well = [[p for p in repeat if p[0].status == p[1].status == "ok"] for repeat in everything]

    def compare(
        measure: Measure, quantile: float | None = None, of: Sequence[Pairs] = well
    ) -> Difference | None:
        strata = []
        for repeat in of:
            both = [(measure(one), measure(other)) for one, other in repeat]
            known = [(one, other) for one, other in both if one is not None and other is not None]
            if known:
                strata.append(([one for one, _ in known], [other for _, other in known]))
        return difference(strata, seed, quantile)

    def kept(outcome: Outcome) -> Weighted:
        return float(keeps(outcome, slo)), 1.0

    return Paired(
        against=against,
        pairs=sum(map(len, well)),
        confidence=CONFIDENCE,
        ttft_ms=compare(_ttft),
        ttft_p50_ms=compare(_ttft, 0.5),
        ttft_p99_ms=compare(_ttft, 0.99),
        tpot_ms=compare(_tpot),
        tpot_p50_ms=compare(_tpot, 0.5),
        e2e_ms=compare(_e2e),
        e2e_p50_ms=compare(_e2e, 0.5),
        cached_token_ratio=compare(_cached),
        kept_share=None if slo == Slo() else compare(kept, of=everything),
    )


def difference(
    strata: Sequence[tuple[Sequence[Weighted], Sequence[Weighted]]],
    seed: int,
    quantile: float | None = None,
) -> Difference | None:
    """Difference and ratio of paired series of `(value, weight)`; None without pairs.

    strata     one `(base, arm)` a repeat, the two of equal length
    quantile   of the values (0 to 1); None takes Σ value / Σ weight

    The interval is the percentile bootstrap: repeats are drawn with replacement, and pairs with
    replacement within each.
    """
    if not strata:
        return None
    statistic = _mean if quantile is None else _quantile(quantile)
    rng = np.random.default_rng(seed)
    # One array a repeat: [pair, (base value, base weight, arm value, arm weight)].
    arrays = [np.hstack((np.array(base), np.array(arm))) for base, arm in strata]
    low_high = [50 * (1 - CONFIDENCE), 50 * (1 + CONFIDENCE)]
    samples = np.empty((RESAMPLES, 2))
    for row in range(RESAMPLES):
        drawn = [arrays[i] for i in rng.integers(0, len(arrays), len(arrays))]
        pairs = np.concatenate([a[rng.integers(0, len(a), len(a))] for a in drawn])
        samples[row] = statistic(pairs[:, :2]), statistic(pairs[:, 2:])
    everything = np.concatenate(arrays)
    first, second = statistic(everything[:, :2]), statistic(everything[:, 2:])
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


def _pairs(base: Sequence[Outcome], arm: Sequence[Outcome]) -> Pairs:
    others = {outcome.id: outcome for outcome in base}
    return [(others[outcome.id], outcome) for outcome in arm if outcome.id in others]


def _mean(weighted: NDArray[np.float64]) -> float:
    value, weight = weighted.sum(axis=0)
    return float(value / weight) if weight else 0.0


def _quantile(share: float) -> Callable[[NDArray[np.float64]], float]:
    return lambda weighted: float(np.quantile(weighted[:, 0], share))


def _ttft(outcome: Outcome) -> Weighted | None:
    return _weigh(outcome.ttft_ms)


def _tpot(outcome: Outcome) -> Weighted | None:
    return _weigh(outcome.tpot_ms)


def _e2e(outcome: Outcome) -> Weighted | None:
    return _weigh(outcome.e2e_ms)


def _weigh(value: float | None) -> Weighted | None:
    return None if value is None else (value, 1.0)


def _cached(outcome: Outcome) -> Weighted | None:
    if outcome.cached_tokens is None or not outcome.prompt_tokens:
        return None
    return float(outcome.cached_tokens), float(outcome.prompt_tokens)
