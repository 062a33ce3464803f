"""How many requests a second a fleet can serve at most."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from loadgen.simulation.fleet import FleetOptions, SimulatedFleet
from loadgen.simulation.prompts import Asked
from router.policies import parse_policy

ENDS_OF_RUN = (10, 90)
"""Per cent of the completions between which the rate is taken: the fleet fills before and runs
empty after."""

KEEPS_UP = 0.95
"""Share of the offered rate at which a fleet still counts as keeping up."""
HALVINGS = 5


def saturation_rate(
    options: FleetOptions, policy: str, asked: Sequence[Asked], seed: int = 0
) -> float:
    """Requests a second that the fleet completes while all of `asked` are there at once.

    They wait in the workers' queues, in their order. This is throughput without any bound on
    latency, and with whatever is cached once for many: what is offered above it makes queues grow
    without end.
    """
    return _completed_rate(options, policy, _at_rate(asked, float("inf")), seed)


def sustained_rate(
    options: FleetOptions, policy: str, asked: Sequence[Asked], seed: int = 0
) -> float:
    """The highest rate, in requests a second, at which completions keep up with arrivals.

    `asked` come at that rate with the gaps between them in proportion to their own.
    """
    low, high = 0.0, saturation_rate(options, policy, asked, seed)
    for _ in range(HALVINGS):
        rate = (low + high) / 2
        if _completed_rate(options, policy, _at_rate(asked, rate), seed) >= KEEPS_UP * rate:
            low = rate
        else:
            high = rate
    return low


def _at_rate(asked: Sequence[Asked], rate: float) -> list[Asked]:
    """Where all come at once, nothing tells how to spread them: they stay."""
    span_s = asked[-1].arrival_s
    stretch = len(asked) / span_s / rate if span_s else 0.0
    return [one._replace(arrival_s=one.arrival_s * stretch) for one in asked]


def _completed_rate(options: FleetOptions, policy: str, asked: Sequence[Asked], seed: int) -> float:
    patient = msgspec.structs.replace(options, max_waiting=len(asked), queue=0)
    outcomes = SimulatedFleet(patient, parse_policy(policy), seed).replay(asked, policy)
    ends = np.sort([outcome.end_s for outcome in outcomes if outcome.end_s is not None])
    first, last = np.percentile(ends, ENDS_OF_RUN)
    share = (ENDS_OF_RUN[1] - ENDS_OF_RUN[0]) / 100
    return float(share * len(ends) / (last - first))
