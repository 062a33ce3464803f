"""Candidates written by hand, for tests of policies."""

import random

import numpy as np

from router.policies import Candidates, Columns, Decision, parse_policy


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
    """Workers with these columns; one that is not given is 0 (free blocks: all; room: what is free;
    keys: the slots)."""
    n = next(len(x) for x in (hit, pending, running, waiting, slots, free) if x is not None)

    def column(values):
        return np.array(values if values is not None else [0] * n, dtype=np.int64)

    slots = column(slots if slots is not None else range(n))
    hits, free = column(hit), column(free if free is not None else [capacity] * n)
    s_per_token, s_per_pair, start_interval_s, wait_s = (
        np.array(more.pop(name, [0] * n), dtype=np.float64)
        for name in ("s_per_token", "s_per_pair", "start_interval_s", "wait_s")
    )
    columns = Columns(
        slots=slots,
        pending_tokens=column(pending),
        waiting=column(waiting),
        batch=column(running) + column(waiting),
        pending_pairs=column(more.pop("pending_pairs", None)),
        room_blocks=column(more.pop("room_blocks", free)),
        running=column(running),
        free_blocks=free,
        capacity_blocks=column([capacity] * n),
        worker_keys=column(more.pop("worker_keys", slots)),
        s_per_token=s_per_token,
        s_per_pair=s_per_pair,
        start_interval_s=start_interval_s,
        wait_s=wait_s,
    )
    return Candidates(
        prompt_tokens=prompt,
        block_size=more.pop("block_size", 16),
        chain=more.pop("chain", ()),
        hit_tokens=hits,
        best_hit_tokens=max(hits.tolist(), default=0),
        columns=columns,
        **more,
    )


def choose(policy: str, given: Candidates, seed: int = 0) -> Decision:
    """What a fresh policy chooses."""
    return parse_policy(policy).choose(given, random.Random(seed))
