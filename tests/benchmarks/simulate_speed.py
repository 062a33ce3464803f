"""`simulate_speed`: CPU seconds to simulate one policy on the Mooncake conversation trace.

12,031 requests on 16 workers, everything included: reading, hashing, simulating, measuring. Beside
it, how the cost grows with the workers for the same requests.
"""

from __future__ import annotations

import time
from pathlib import Path

from loadgen.plan import Load, TraceSource
from loadgen.simulation.fleet import FleetOptions
from loadgen.simulation.run import SimulateOptions, simulate
from loadgen.traces import TraceOptions
from tests.trace_files import find_trace
from worker.emulated_profiles import profile_of

BAR_S = 60.0
TRACE = "mooncake_conversation.jsonl"
PROFILE = "h20-qwen3-30b-a3b"
POLICIES = ("round_robin", "locality", "marginal")
FEW_REQUESTS = 1000
FLEETS = (16, 64, 256, 1000)


def run() -> int:
    """Print the seconds; 0 where the slowest policy is within the bar."""
    trace = find_trace(TRACE)
    if trace is None:
        print(f"the trace {TRACE} is not here: set STEMROUTE_TRACES to its folder")
        return 2
    costs = {policy: _seconds(trace, policy, 16) for policy in POLICIES}
    for policy, seconds in costs.items():
        print(f"{policy}: {seconds:.1f} s of CPU for the whole trace on 16 workers")
    few = {workers: _seconds(trace, "locality", workers, FEW_REQUESTS) for workers in FLEETS}
    told = ", ".join(f"{workers} workers {seconds:.1f} s" for workers, seconds in few.items())
    print(f"locality, the first {FEW_REQUESTS} requests: {told}")
    slowest = max(costs.values())
    print(f"simulate_speed: {slowest:.1f} s (bar {BAR_S:g} s)")
    return 0 if slowest <= BAR_S else 1


def _seconds(trace: Path, policy: str, workers: int, requests: int | None = None) -> float:
    options = SimulateOptions(
        load=Load(
            trace=TraceSource(
                files=(str(trace),),
                format="mooncake",
                options=TraceOptions(num_prompts=requests),
            )
        ),
        policies=(policy,),
        fleet=FleetOptions(
            workers=workers, profile=profile_of(PROFILE), profile_name=PROFILE, block_size=0
        ),
    )
    began = time.process_time()
    summary = simulate(options)
    assert summary.valid, summary.reasons
    return time.process_time() - began
