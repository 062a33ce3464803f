"""Prefill speed of a worker before its first request, measured by a few prefills in its empty pool.

Routing by time needs a speed from the first request on. Each shape of step runs twice and the
second run counts, because the first one compiles, allocates and warms up.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from cluster.protocol import Sampling, prefill_pairs
from worker.batch import BatchItem, Runner
from worker.prefill_speed import Speed

log = logging.getLogger(__name__)

LEAST_TOKENS, MOST_TOKENS = 64, 2048
"""Tokens of a timed prefill. They grow until it takes `ENOUGH_S`: a short prefill measures the cost
of a step, not of a token."""

GROWTH = 4
ENOUGH_S = 0.05

FAR = 16
"""Context of the second prefill, in multiples of its tokens, to measure the quadratic part."""


def first_speed(
    runner: Runner, block_size: int, room_tokens: int, chunk_tokens: int, clock: Callable[[], float]
) -> Speed:
    """Time a few prefills of one sequence. Overwrites blocks of the pool.

    room_tokens    maximum of tokens that fit in the pool and in a sequence
    chunk_tokens   maximum of prefill tokens in one step
    clock         in seconds
    """
    table = list(range(1, -(-room_tokens // block_size) + 1))

    def seconds(tokens: int, start: int) -> float:
        sampling = Sampling(max_tokens=1, temperature=0.0)
        item = BatchItem("", [0] * tokens, start, table, True, sampling, 0)
        runner.execute([item])
        began_s = clock()
        runner.execute([item])
        return clock() - began_s

    most = min(MOST_TOKENS, chunk_tokens, room_tokens)
    tokens = min(LEAST_TOKENS, most)
    near_s = seconds(tokens, 0)
    while near_s < ENOUGH_S and tokens < most:
        tokens = min(GROWTH * tokens, most)
        near_s = seconds(tokens, 0)
    start = min(FAR * tokens, room_tokens - tokens)
    far_s = seconds(tokens, start) if start >= tokens else near_s
    log.info(
        "prefill of %d tokens takes %.3f s, and %.3f s after %d tokens of context",
        tokens,
        near_s,
        far_s,
        start,
    )
    return _speed_of(tokens, near_s, start, far_s)


def _speed_of(tokens: int, near_s: float, start: int, far_s: float) -> Speed:
    """Speed from the seconds of a prefill at position 0 and of one at position `start`."""
    near_pairs = prefill_pairs(0, tokens)
    more_pairs = prefill_pairs(start, start + tokens) - near_pairs
    s_per_pair = max(0.0, (far_s - near_s) / more_pairs) if more_pairs > 0 else 0.0
    linear_s = near_s - s_per_pair * near_pairs
    if linear_s <= 0:  # the clock is too coarse, or the run was disturbed
        return Speed.rounded(near_s / tokens, 0.0)
    return Speed.rounded(linear_s / tokens, s_per_pair)
