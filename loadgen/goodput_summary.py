"""The result of a search for the highest rate: what `goodput.json` holds."""

from __future__ import annotations

import msgspec

from loadgen.measures import ArmMeasures, Slo
from loadgen.plan import RequestSource
from loadgen.summary import WorkerFacts


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """One replay at one rate."""

    rate: float
    met: bool
    measures: ArmMeasures


class Capacity(msgspec.Struct, frozen=True, kw_only=True):
    """The highest rate of one policy. Rates are in requests per second.

    rate       highest rate tried that met the bounds; 0 where none did
    too_much   lowest rate tried that did not; None where all did
    trials     in the order they ran
    """

    rate: float
    too_much: float | None
    trials: list[Trial]

    @property
    def best(self) -> Trial | None:
        """The trial at `rate`; None where no trial met the bounds."""
        return max((t for t in self.trials if t.met), key=lambda t: t.rate, default=None)


class GoodputSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The search of every policy; the first is the base.

    source     of the first trial of the first policy
    emulated   whether any worker is an emulated accelerator: then times are a model's
    """

    url: str
    started: str
    source: RequestSource
    slo: Slo
    attainment: float
    fleet: list[WorkerFacts]
    emulated: bool
    policies: dict[str, Capacity]
    valid: bool
    reasons: list[str]


def findings(summary: GoodputSummary) -> list[str]:
    """The findings, one sentence for each policy after the first.

    A ratio is always given with the interval that the two brackets leave.
    """
    if not summary.valid:
        return []
    (base_name, base), *others = summary.policies.items()
    return [_finding(name, found, base_name, base) for name, found in others]


def _finding(name: str, found: Capacity, base_name: str, base: Capacity) -> str:
    told = f"{name} {_asked(found)}, {base_name} {_asked(base)}"
    if not (found.rate and base.rate):
        return f"{told}: no ratio"
    low = found.rate / base.too_much if base.too_much else 0.0
    high = found.too_much / base.rate if found.too_much else None
    between = f"at least × {low:.2f}" if high is None else f"× {low:.2f} to × {high:.2f}"
    if low > 1:
        return f"{told}: {name} sustains a higher rate, {between}"
    if high is not None and high < 1:
        return f"{told}: {name} sustains a lower rate, {between}"
    return f"{told}: no difference shown ({between})"


def _asked(found: Capacity) -> str:
    if not found.rate:
        return "met the bounds at no rate that was tried"
    if found.too_much is None:
        return f"met them up to {found.rate:.2f}/s, the highest that was tried"
    return f"met them up to {found.rate:.2f}/s, not at {found.too_much:.2f}/s"
