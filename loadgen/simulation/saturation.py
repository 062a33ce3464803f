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


def saturation_rate(
    options: FleetOptions, policy: str, asked: Sequence[Asked], seed: int = 0
) -> float:
    """Requests a second that the fleet completes while all of `asked` are there at once.

    They wait in the workers' queues, in their order. This is throughput without any bound on
    latency: what is offered above it makes queues grow without end.
    """
    everything = [request._replace(arrival_s=0.0) for request in asked]
    patient = msgspec.structs.replace(options, max_waiting=len(asked), queue=0)
    outcomes = SimulatedFleet(patient, parse_policy(policy), seed).replay(everything, policy)
    ends = np.sort([outcome.end_s for outcome in outcomes if outcome.end_s is not None])
    first, last = np.percentile(ends, ENDS_OF_RUN)
    share = (ENDS_OF_RUN[1] - ENDS_OF_RUN[0]) / 100
    return float(share * len(ends) / (last - first))
