"""Candidates written by hand, for tests of policies."""

import random

import numpy as np

from router.policies import Candidates, Decision, parse_policy


def candidates(
    prompt=1000,
    hit=None,
    pending=None,
    running=None,
    waiting=None,
    slots=None,
    free=None,
    capacity=100,
    **more,
) -> Candidates:
    """Workers with these columns; a column that is not given is 0 (free blocks: all)."""
    n = next(len(x) for x in (hit, pending, running, waiting, slots, free) if x is not None)

    def column(values):
        return np.array(values if values is not None else [0] * n, dtype=np.int64)

    for name in ("room_blocks", "worker_keys", "pending_pairs"):
        if name in more:
            more[name] = column(more[name])
    for name in ("s_per_token", "s_per_pair"):
        if name in more:
            more[name] = np.array(more[name], dtype=np.float64)
    return Candidates(
        slots=np.array(slots if slots is not None else range(n), dtype=np.int64),
        hit_tokens=column(hit),
        pending_tokens=column(pending),
        running=column(running),
        waiting=column(waiting),
        batch=column(running) + column(waiting),
        free_blocks=column(free if free is not None else [capacity] * n),
        capacity_blocks=column([capacity] * n),
        prompt_tokens=prompt,
        block_size=more.pop("block_size", 16),
        **more,
    )


def choose(policy: str, given: Candidates, seed: int = 0) -> Decision:
    """What a fresh policy chooses."""
    return parse_policy(policy).choose(given, random.Random(seed))
