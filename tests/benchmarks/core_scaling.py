"""`core_scaling`: what a step costs in a pool of 1M full blocks over what it costs in one of 64k.

The large pool is full of cached blocks of past requests, so the history is 16 times longer as well.
Both pools are measured in turns, so that a change of the machine meets both.
"""

from __future__ import annotations

from tests.benchmarks.core_load import SteadyLoad

BAR = 1.25
"""Nothing in the core grows with the pool; a larger table misses the processor's caches more."""
POOLS = (1 << 16, 1 << 20)
ROUNDS = 12
STEPS = 200


def run() -> int:
    """Print both costs and their ratio; 0 where it is within the bar."""
    loads = []
    for capacity in POOLS:
        load = SteadyLoad(capacity)
        load.fill()
        load.start()
        load.measure(100)
        loads.append(load)
        print(
            f"a pool of {capacity} blocks, {load.core.load().cached_blocks} of them cached, after "
            f"{load.served} requests and {load.core.stats().evictions} evictions"
        )
    costs: list[list[float]] = [[] for _ in loads]
    for _ in range(ROUNDS):
        for load, means in zip(loads, costs, strict=True):
            means.append(load.measure(STEPS).mean_ms)
    small, large = (min(means) for means in costs)
    print(f"mean of a step in the least disturbed round: {small:.3f} ms and {large:.3f} ms")
    print(f"core_scaling: {large / small:.2f} (bar {BAR:g})")
    return 0 if large / small <= BAR else 1
