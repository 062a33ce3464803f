"""Measures of one arm, as formulas over its outcomes.

TTFT counts from the intended send time to the first text, E2E to the end; TPOT is
(E2E − TTFT)/(n − 1); ITL is taken per token. The cached-token ratio is Σ cached / Σ prompt
tokens. Latencies are of requests that ended well.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from loadgen.outcomes import Outcome


class SloError(ValueError):
    """An invalid latency bound."""


class Spread(msgspec.Struct, frozen=True):
    """Mean and percentiles (linear between samples); None where there are no samples."""

    mean: float | None
    p50: float | None
    p90: float | None
    p99: float | None


class Slo(msgspec.Struct, frozen=True):
    """Upper latency bounds in milliseconds; None: no bound."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None


class WorkerWork(msgspec.Struct, frozen=True):
    """The work of one worker in an arm, from the responses that named it."""

    worker: str
    requests: int
    computed_tokens: int
    cached_tokens: int


class RepeatMeasures(msgspec.Struct, frozen=True, kw_only=True):
    """The headline figures of one replay of an arm, to see how much replays differ."""

    ttft_ms: Spread
    tpot_ms: Spread
    e2e_ms: Spread
    cached_token_ratio: float | None
    goodput: float
    imbalance: float | None


class ArmMeasures(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one arm, over all its repeats.

    requests             of all repeats, as are tokens and the work of the workers
    duration_s           first intended send to last end, summed over the repeats
    cached_token_ratio   None where no answer carried usage
    goodput              requests per second that met every bound; failed and unfinished ones do not
    kept_share           share of the requests that did
    imbalance            max / mean over the workers of prompt tokens computed, mean of the repeats
    predicted_hit_error_tokens   mean of |predicted − actual hit|, None where headers lack
    repeats              each replay by itself
    """

    requests: int
    errors: int
    duration_s: float
    ttft_ms: Spread
    tpot_ms: Spread
    itl_ms: Spread
    e2e_ms: Spread
    cached_token_ratio: float | None
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    goodput: float
    kept_share: float
    imbalance: float | None
    predicted_hit_error_tokens: float | None
    client_lag_ms: Spread
    workers: list[WorkerWork]
    repeats: list[RepeatMeasures]


_SLO_NAMES = {"ttft": "ttft_ms", "tpot": "tpot_ms", "e2e": "e2e_ms", "e2el": "e2e_ms"}


def parse_slo(texts: Iterable[str]) -> Slo:
    """Bounds such as "ttft:2000" and "tpot:100", in milliseconds. Raises SloError."""
    bounds: dict[str, float] = {}
    for text in texts:
        name, _, number = text.partition(":")
        try:
            bound = float(number)
        except ValueError:
            bound = -1.0
        if name not in _SLO_NAMES or not bound > 0:
            raise SloError(
                f"{text!r} is not a latency bound: write ttft:MS, tpot:MS or e2el:MS, such as "
                "ttft:2000"
            )
        bounds[_SLO_NAMES[name]] = bound
    return Slo(**bounds)


def spread(samples: Iterable[float | None]) -> Spread:
    """Mean, p50, p90 and p99 of the samples that are not None."""
    values = np.array([sample for sample in samples if sample is not None])
    if not values.size:
        return Spread(None, None, None, None)
    p50, p90, p99 = (float(value) for value in np.percentile(values, (50, 90, 99)))
    return Spread(float(values.mean()), p50, p90, p99)


def measure(outcomes: Sequence[Outcome], slo: Slo, workers: Iterable[str] = ()) -> ArmMeasures:
    """The measures of an arm that was replayed once; see `measure_repeats`."""
    return measure_repeats([outcomes], slo, workers)


def measure_repeats(
    repeats: Sequence[Sequence[Outcome]], slo: Slo, workers: Iterable[str] = ()
) -> ArmMeasures:
    """The measures of one arm, of whose replays each is a list of outcomes.

    `workers` names the whole fleet: one that got nothing counts in the imbalance.
    """
    workers = list(workers)
    outcomes = [outcome for repeat in repeats for outcome in repeat]
    good = [outcome for outcome in outcomes if outcome.status == "ok"]
    prompt, cached = _tokens(outcomes)
    duration_s = sum(_duration_s(repeat) for repeat in repeats)
    kept = sum(keeps(outcome, slo) for outcome in outcomes)
    each = [_measure_repeat(repeat, slo, workers) for repeat in repeats]
    errors_of_prediction = [
        abs(outcome.predicted_hit_tokens - outcome.hit_tokens)
        for outcome in good
        if outcome.predicted_hit_tokens is not None and outcome.hit_tokens is not None
    ]
    return ArmMeasures(
        requests=len(outcomes),
        errors=len(outcomes) - len(good),
        duration_s=duration_s,
        ttft_ms=spread(outcome.ttft_ms for outcome in good),
        tpot_ms=spread(outcome.tpot_ms for outcome in good),
        itl_ms=spread(gap for outcome in good for gap in outcome.itl_ms),
        e2e_ms=spread(outcome.e2e_ms for outcome in good),
        cached_token_ratio=cached / prompt if prompt else None,
        prompt_tokens=prompt,
        cached_tokens=cached,
        completion_tokens=sum(outcome.completion_tokens or 0 for outcome in good),
        goodput=kept / duration_s if duration_s > 0 else 0.0,
        kept_share=kept / len(outcomes) if outcomes else 0.0,
        imbalance=spread(repeat.imbalance for repeat in each).mean,
        predicted_hit_error_tokens=spread(errors_of_prediction).mean,
        client_lag_ms=spread(outcome.lag_ms for outcome in outcomes),
        workers=work(_counted(outcomes), workers),
        repeats=each,
    )


def _measure_repeat(
    outcomes: Sequence[Outcome], slo: Slo, workers: Iterable[str]
) -> RepeatMeasures:
    good = [outcome for outcome in outcomes if outcome.status == "ok"]
    prompt, cached = _tokens(outcomes)
    duration_s = _duration_s(outcomes)
    kept = sum(keeps(outcome, slo) for outcome in outcomes)
    shares = work(_counted(outcomes), workers)
    return RepeatMeasures(
        ttft_ms=spread(outcome.ttft_ms for outcome in good),
        tpot_ms=spread(outcome.tpot_ms for outcome in good),
        e2e_ms=spread(outcome.e2e_ms for outcome in good),
        cached_token_ratio=cached / prompt if prompt else None,
        goodput=kept / duration_s if duration_s > 0 else 0.0,
        imbalance=imbalance([share.computed_tokens for share in shares]),
    )


def _counted(outcomes: Iterable[Outcome]) -> list[Outcome]:
    """Those whose prompt tokens are known."""
    return [
        outcome
        for outcome in outcomes
        if outcome.status == "ok"
        and outcome.prompt_tokens is not None
        and outcome.cached_tokens is not None
    ]


def _tokens(outcomes: Iterable[Outcome]) -> tuple[int, int]:
    """Prompt tokens, and those of them that were cached."""
    counted = _counted(outcomes)
    prompt = sum(outcome.prompt_tokens or 0 for outcome in counted)
    return prompt, sum(outcome.cached_tokens or 0 for outcome in counted)


def _duration_s(outcomes: Sequence[Outcome]) -> float:
    begin_s = min((outcome.intended_s for outcome in outcomes), default=0.0)
    end_s = max((outcome.end_s or 0.0 for outcome in outcomes), default=0.0)
    return max(end_s - begin_s, 0.0)


def keeps(outcome: Outcome, slo: Slo) -> bool:
    """Whether an answer ended well and within every bound; one token has no TPOT to miss."""
    if outcome.status != "ok":
        return False
    pairs = (
        (outcome.ttft_ms, slo.ttft_ms),
        (outcome.tpot_ms, slo.tpot_ms),
        (outcome.e2e_ms, slo.e2e_ms),
    )
    return all(bound is None or value is None or value <= bound for value, bound in pairs)


def work(outcomes: Iterable[Outcome], workers: Iterable[str] = ()) -> list[WorkerWork]:
    """Work per worker, by name; workers of `workers` without any are there with zeros."""
    totals = {worker: [0, 0, 0] for worker in workers}
    for outcome in outcomes:
        if not outcome.worker:
            continue
        cached = outcome.cached_tokens or 0
        total = totals.setdefault(outcome.worker, [0, 0, 0])
        total[0] += 1
        total[1] += (outcome.prompt_tokens or 0) - cached
        total[2] += cached
    return [WorkerWork(worker, *total) for worker, total in sorted(totals.items())]


def imbalance(computed_tokens: Sequence[int]) -> float | None:
    """Max / mean: 1 is even, the number of workers is all on one; None without any work."""
    total = sum(computed_tokens)
    return max(computed_tokens) * len(computed_tokens) / total if total else None
