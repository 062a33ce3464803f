"""The figures of a summary as text and table cells, for the terminal and the report."""

from __future__ import annotations

from collections.abc import Callable

from loadgen.arrivals import Arrivals
from loadgen.ideal import Ideal
from loadgen.measures import ArmMeasures, Slo
from loadgen.paired import Difference, Paired
from loadgen.summary import Summary

MISSING = "–"
COLUMNS = (
    "policy",
    "requests",
    "errors",
    "cached / ideal",
    "TTFT mean ms",
    "p50",
    "p90",
    "p99",
    "TPOT ms",
    "E2E ms",
    "goodput /s",
    "imbalance",
)


def cells(policy: str, arm: ArmMeasures, ideal: Ideal | None) -> list[str]:
    """One row of the table, in the order of `COLUMNS`."""
    return [
        policy,
        str(arm.requests),
        str(arm.errors),
        hits(arm, ideal),
        milliseconds(arm.ttft_ms.mean),
        milliseconds(arm.ttft_ms.p50),
        milliseconds(arm.ttft_ms.p90),
        milliseconds(arm.ttft_ms.p99),
        milliseconds(arm.tpot_ms.mean),
        milliseconds(arm.e2e_ms.mean),
        number(arm.goodput),
        number(arm.imbalance),
    ]


def hits(arm: ArmMeasures, ideal: Ideal | None) -> str:
    """The cached-token ratio beside that of an infinite cache, such as "40.5 / 71.3 %"."""
    if arm.cached_token_ratio is None or ideal is None:
        return percent(arm.cached_token_ratio)
    return f"{100 * arm.cached_token_ratio:.1f} / {percent(ideal.cached_token_ratio)}"


def milliseconds(value: float | None) -> str:
    """Such as "1,234", or "12.3" below 100; without the unit."""
    if value is None:
        return MISSING
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}"


def percent(share: float | None) -> str:
    """Such as "61.2 %"."""
    return MISSING if share is None else f"{100 * share:.1f} %"


def number(value: float | None) -> str:
    """Two decimals."""
    return MISSING if value is None else f"{value:.2f}"


def ratio_line(policy: str, paired: Paired) -> str:
    """One arm against the first, in a sentence."""
    parts = [
        _part("cached tokens", paired.cached_token_ratio, _points),
        _part("TTFT mean", paired.ttft_ms, _signed_ms),
        _part("TPOT mean", paired.tpot_ms, _signed_ms),
        _part("E2E mean", paired.e2e_ms, _signed_ms),
    ]
    told = "; ".join(part for part in parts if part) or "nothing to compare"
    return f"{policy} against {paired.against}, {paired.pairs} pairs: {told}"


def load_lines(summary: Summary) -> list[str]:
    """How the requests were sent and what has to be known of that, in sentences."""
    lines = []
    if summary.max_concurrency is not None:
        lines.append(
            f"closed loop, at most {summary.max_concurrency} requests in flight: a slow gateway "
            "receives fewer requests, queueing is hidden, and times count from the send"
        )
    if summary.emulated:
        lines.append("emulated accelerators: times follow a cost model")
    if not summary.cold:
        lines.append(
            "caches were not flushed: hits on earlier requests count, which the ideal does not "
            "include"
        )
    if summary.paired and summary.repeats == 1:
        lines.append(
            "one run per policy: it does not show how much runs differ, nor do the intervals; use "
            "--repeats 3"
        )
    return lines + summary.source.notes


def arrivals_text(arrivals: Arrivals | None) -> str:
    """Such as "Poisson, 2 a second"."""
    if arrivals is None:
        return "as in the file"
    shape = {1.0: "Poisson", float("inf"): "constant gaps"}.get(
        arrivals.burstiness, f"gamma, burstiness {arrivals.burstiness:g}"
    )
    if arrivals.ramp_up_strategy is not None:
        return (
            f"{shape}, {arrivals.ramp_up_strategy} ramp from {arrivals.ramp_up_start_rps:g} to "
            f"{arrivals.ramp_up_end_rps:g} a second"
        )
    if arrivals.request_rate == float("inf"):
        return "all at once"
    return f"{shape}, {arrivals.request_rate:g} a second"


def slo_text(slo: Slo) -> str:
    """Such as "TTFT 2,000 ms, TPOT 100 ms"; "" where there is no bound."""
    bounds = {"TTFT": slo.ttft_ms, "TPOT": slo.tpot_ms, "E2E": slo.e2e_ms}
    return ", ".join(
        f"{name} {milliseconds(bound)} ms" for name, bound in bounds.items() if bound is not None
    )


def size_line(summary: Summary) -> str | None:
    """The working set beside the caches, None where it is not known."""
    if summary.ideal is None or not summary.fleet:
        return None
    capacities = [worker.capacity_tokens for worker in summary.fleet]
    if not all(capacities):
        return None
    return (
        f"working set about {summary.ideal.distinct_tokens:,} tokens; caches hold "
        f"{max(capacities):,} a worker, {sum(capacities):,} together; an infinite cache would "
        f"reuse about {percent(summary.ideal.cached_token_ratio)}"
    )


def _part(name: str, found: Difference | None, form: Callable[[float], str]) -> str:
    if found is None:
        return ""
    times = "" if found.ratio is None else f" × {found.ratio:.2f}"
    return f"{name}{times} ({form(found.difference)}, 95 % {form(found.low)} to {form(found.high)})"


def _signed_ms(value: float) -> str:
    digits = 0 if abs(value) >= 10 else 1
    return f"{value:+,.{digits}f} ms".replace("-", "−")


def _points(value: float) -> str:
    return f"{100 * value:+.1f} points".replace("-", "−")
