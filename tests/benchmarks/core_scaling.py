"""`core_scaling`: what a step costs with 16 times the pool, the history or both, over without.

The plain load has a pool of 64k blocks that past requests have filled once. Each other one differs
in the pool's size, in how many blocks were ever computed, or in both; the value is the worst ratio.
All are measured in turns, so that a change of the machine meets all.
"""

from __future__ import annotations

from typing import NamedTuple

from tests.benchmarks.core_load import SteadyLoad

BAR = 1.25
"""Nothing in the core grows with the pool; a larger table misses the processor's caches more."""
SMALL = 1 << 16
LARGE = 1 << 20
ROUNDS = 12
STEPS = 200


class Variant(NamedTuple):
    """A pool of so many blocks, after so many have been computed."""

    name: str
    pool_blocks: int
    history_blocks: int


VARIANTS = (
    Variant("plain", SMALL, SMALL),
    Variant("pool", LARGE, SMALL),
    Variant("history", SMALL, LARGE),
    Variant("pool and history", LARGE, LARGE),
)


def run() -> int:
    """Print all costs and the worst ratio; 0 where it is within the bar."""
    loads = []
    for variant in VARIANTS:
        load = SteadyLoad(variant.pool_blocks)
        load.fill(variant.history_blocks)
        load.start()
        load.measure(100)
        loads.append(load)
        print(
            f"{variant.name}: a pool of {variant.pool_blocks} blocks, "
            f"{load.core.load().cached_blocks} of them cached, after {load.served} requests and "
            f"{load.core.stats().evictions} evictions",
            flush=True,
        )
    costs: list[list[float]] = [[] for _ in loads]
    for _ in range(ROUNDS):
        for load, means in zip(loads, costs, strict=True):
            means.append(load.measure(STEPS).mean_ms)
    plain, *others = (min(means) for means in costs)
    print(f"mean of a step in the least disturbed round: plain {plain:.3f} ms")
    for variant, cost in zip(VARIANTS[1:], others, strict=True):
        print(f"{variant.name} 16 times: {cost:.3f} ms, {cost / plain:.2f} times")
    worst = max(others) / plain
    print(f"core_scaling: {worst:.2f} (bar {BAR:g})")
    return 0 if worst <= BAR else 1
