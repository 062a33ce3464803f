"""How many requests a second a fleet can serve at most."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from loadgen.outcomes import Outcome
from loadgen.simulation.fleet import FleetOptions, SimulatedFleet
from loadgen.simulation.prompts import Asked
from router.policies import parse_policy

ENDS_OF_RUN = (10, 90)
"""Per cent of the requests between which a rate is taken: the fleet fills before and runs empty
after."""

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
    outcomes = _replay(options, policy, _at_rate(asked, float("inf")), seed)
    return _rate([outcome.end_s for outcome in outcomes])


def sustained_rate(
    options: FleetOptions, policy: str, asked: Sequence[Asked], seed: int = 0
) -> float:
    """The highest rate, in requests a second, at which first tokens keep up with arrivals.

    `asked` come at that rate with the gaps between them in proportion to their own.
    """
    low, high = 0.0, saturation_rate(options, policy, asked, seed)
    for _ in range(HALVINGS):
        rate = (low + high) / 2
        outcomes = _replay(options, policy, _at_rate(asked, rate), seed)
        if _rate([outcome.first_token_s for outcome in outcomes]) >= KEEPS_UP * rate:
            low = rate
        else:
            high = rate
    return low


def _at_rate(asked: Sequence[Asked], rate: float) -> list[Asked]:
    """Where all come at once, nothing tells how to spread them: they stay."""
    span_s = asked[-1].arrival_s
    stretch = len(asked) / span_s / rate if span_s else 0.0
    return [one._replace(arrival_s=one.arrival_s * stretch) for one in asked]


def _replay(options: FleetOptions, policy: str, asked: Sequence[Asked], seed: int) -> list[Outcome]:
    patient = msgspec.structs.replace(options, max_waiting=len(asked), queue=0)
    return SimulatedFleet(patient, parse_policy(policy), seed).replay(asked, policy)


def _rate(times_s: Iterable[float | None]) -> float:
    """Events a second between the per cents of `ENDS_OF_RUN`."""
    times = np.sort([time for time in times_s if time is not None])
    first, last = np.percentile(times, ENDS_OF_RUN)
    return float((ENDS_OF_RUN[1] - ENDS_OF_RUN[0]) / 100 * len(times) / (last - first))
