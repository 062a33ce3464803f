"""How much a simulated fleet can serve."""

import msgspec
import pytest

from loadgen.simulation.fleet import FleetOptions
from loadgen.simulation.prompts import asked_of
from loadgen.simulation.saturation import saturation_rate, sustained_rate
from tests.loadgen.simulating import BLOCK, request
from worker.emulated_profiles import CostModel, Profile

FLEET = FleetOptions(
    workers=2,
    profile=Profile(cost=CostModel(step_s=1.0), kv_tokens=4000, context_tokens=4000),
    profile_name="by hand",
    block_size=BLOCK,
    max_batch_size=1,
)


def spread(count, gap_s):
    """Prompts that share nothing; on a worker of `FLEET` each takes two seconds."""
    requests = [request(gap_s * n, [2 * n, 2 * n + 1], output_tokens=2) for n in range(count)]
    return asked_of(requests, BLOCK)


def test_a_fleet_completes_what_its_steps_allow():
    assert saturation_rate(FLEET, "round_robin", spread(200, 0.1)) == pytest.approx(1.0, rel=0.05)
    more = msgspec.structs.replace(FLEET, workers=4)
    assert saturation_rate(more, "round_robin", spread(200, 0.1)) == pytest.approx(2.0, rel=0.05)


def test_the_rate_does_not_depend_on_the_times_that_were_recorded():
    rates = {saturation_rate(FLEET, "round_robin", spread(100, gap_s)) for gap_s in (0.0, 0.1, 9.0)}
    assert len(rates) == 1


def test_a_fleet_keeps_up_with_even_arrivals_nearly_to_its_throughput():
    rate = sustained_rate(FLEET, "round_robin", spread(200, 0.1))
    assert 0.9 <= rate <= 1.06
