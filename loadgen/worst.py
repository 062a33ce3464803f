"""The slowest requests of every arm, and why they went where they went."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from loadgen.admin import Explanation
from loadgen.observer import LoadSample, Observations
from loadgen.outcomes import Outcome
from loadgen.slowest import WORST, slowness


class Worst(NamedTuple):
    """A slow request.

    explanation   the decision that sent it where it went, None where it is not known
    unknown       why it is not
    load          the workers at the last look before the request was due
    """

    outcome: Outcome
    explanation: Explanation | None
    unknown: str
    load: list[LoadSample]


def worst_requests(
    outcomes: Sequence[Outcome], seen: Mapping[str, Sequence[Observations]]
) -> dict[str, list[Worst]]:
    """By arm, slowest first token first; requests that have none come before all others.

    Of a request that was slow in several repeats, the slowest is shown.
    """
    found = {}
    for arm, repeats in seen.items():
        mine = sorted((outcome for outcome in outcomes if outcome.arm == arm), key=slowness)
        slowest = list({outcome.id: outcome for outcome in mine}.values())
        slowest.sort(key=slowness, reverse=True)
        found[arm] = [_explained(outcome, repeats[outcome.repeat]) for outcome in slowest[:WORST]]
    return found


def _explained(outcome: Outcome, seen: Observations) -> Worst:
    before = [sample for sample in seen.samples if sample.at_s <= outcome.intended_s]
    last_s = before[-1].at_s if before else 0.0
    return Worst(
        outcome,
        seen.explanations.get(outcome.id),
        seen.unknown.get(outcome.id, seen.otherwise),
        [sample for sample in before if sample.at_s == last_s],
    )
