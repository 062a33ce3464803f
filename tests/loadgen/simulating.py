"""What the tests of the simulator share."""

from loadgen.simulation.fleet import FleetOptions, Latency, SimulatedFleet
from loadgen.simulation.prompts import asked_of
from loadgen.simulation.reporting import Pace
from loadgen.traces import TraceRequest
from router.policies import parse_policy
from worker.emulated_profiles import CostModel, Profile

BLOCK = 4
COST = CostModel(
    step_s=1.0, prefill_token_s=0.1, prefill_pair_s=0.01, decode_s=0.25, context_token_s=0.001
)
DECODE_ONLY = CostModel(step_s=1.0)


def request(arrival_s, ids, prompt_tokens=None, output_tokens=1, kind=""):
    """A prompt of the blocks `ids` of four tokens; whole blocks unless its length is told."""
    return TraceRequest(
        arrival_s=arrival_s,
        session="s",
        turn=0,
        prompt_tokens=prompt_tokens or BLOCK * len(ids),
        output_tokens=output_tokens,
        hash_ids=tuple(ids),
        block_tokens=BLOCK,
        kind=kind,
    )


def fleet_of(policy="locality", cost=COST, seed=0, kv_tokens=4000, gap_s=0.0, **fields):
    options = {
        "workers": 1,
        "profile": Profile(cost=cost, kv_tokens=kv_tokens, context_tokens=100_000),
        "profile_name": "by hand",
        "block_size": BLOCK,
        "pace": Pace(
            gap_s=gap_s, load_s=fields.pop("load_s", 0.0), index_s=fields.pop("index_s", 0.0)
        ),
        "latency": fields.pop("latency", Latency()),
    }
    return SimulatedFleet(FleetOptions(**(options | fields)), parse_policy(policy), seed)


def replay(requests, **fields):
    fleet = fleet_of(**fields)
    outcomes = fleet.replay(asked_of(requests, fields.get("block_size", BLOCK)), "arm")
    fleet.check()
    return outcomes
