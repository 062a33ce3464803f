"""The slowest requests of every arm, and why they went where they went."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from loadgen.admin import Explanation
from loadgen.observer import LoadSample, Observations
from loadgen.outcomes import Outcome

WORST = 5
"""Of each arm."""


class Worst(NamedTuple):
    """A slow request.

    explanation   what the gateway was about to decide when the request was due, None where it
                  was not asked then
    load          the workers at the last look before the request was due
    """

    outcome: Outcome
    explanation: Explanation | None
    load: list[LoadSample]


def worst_requests(
    outcomes: Sequence[Outcome], seen: Mapping[str, Sequence[Observations]]
) -> dict[str, list[Worst]]:
    """By arm, slowest first token first; requests that have none come before all others."""
    found = {}
    for arm, repeats in seen.items():
        mine = [outcome for outcome in outcomes if outcome.arm == arm]
        mine.sort(key=lambda outcome: _slowness(outcome), reverse=True)
        found[arm] = [_explained(outcome, repeats[outcome.repeat]) for outcome in mine[:WORST]]
    return found


def _explained(outcome: Outcome, seen: Observations) -> Worst:
    before = [sample for sample in seen.samples if sample.at_s <= outcome.intended_s]
    last_s = before[-1].at_s if before else 0.0
    return Worst(
        outcome,
        seen.explanations.get(outcome.id),
        [sample for sample in before if sample.at_s == last_s],
    )


def _slowness(outcome: Outcome) -> float:
    return float("inf") if outcome.ttft_ms is None else outcome.ttft_ms
