"""Policies that use load alone, as in a cluster without prefix routing."""

from __future__ import annotations

import random

import msgspec
import numpy as np

from router.policies.base import (
    Candidates,
    Decision,
    FloatArray,
    NoParameters,
    least,
)


class RoundRobinState(msgspec.Struct):
    """last   slot that served the latest request"""

    last: int = -1


def round_robin(
    candidates: Candidates, parameters: NoParameters, state: RoundRobinState, rng: random.Random
) -> Decision:
    """Every worker in turn. Cost: its distance in the turn; 0 is next.

    The turn follows slot numbers, so it stays fair when workers join, leave or are left out.
    """
    slots = candidates.columns.slots
    ahead = slots - state.last
    after = np.where(ahead > 0, ahead - 1, ahead + max(state.last, int(slots.max())))
    costs: FloatArray = after.astype(np.float64)
    index = int(costs.argmin())
    state.last = int(slots[index])
    return Decision(index, costs)


def random_choice(
    candidates: Candidates, parameters: NoParameters, state: None, rng: random.Random
) -> Decision:
    """A worker at random, uniformly. Cost: 0 for all."""
    n = len(candidates.hit_tokens)
    return Decision(rng.randrange(n), np.zeros(n))


def least_requests(
    candidates: Candidates, parameters: NoParameters, state: None, rng: random.Random
) -> Decision:
    """The worker with the fewest requests. Cost: its batch; ties by pending tokens, chance."""
    costs = candidates.columns.batch.astype(np.float64)
    return Decision(least(costs, candidates, 0.0, rng), costs)


def power_of_two(
    candidates: Candidates, parameters: NoParameters, state: None, rng: random.Random
) -> Decision:
    """Of two workers drawn at random, the one with fewer requests. Cost: its batch.

    Workers that were not drawn cost infinity. Source: Mitzenmacher, "The Power of Two Choices in
    Randomized Load Balancing", IEEE TPDS 12(10), 2001.
    """
    n = len(candidates.hit_tokens)
    costs = np.full(n, np.inf)
    drawn = rng.sample(range(n), min(2, n))
    costs[drawn] = candidates.columns.batch[drawn]
    return Decision(least(costs, candidates, 0.0, rng), costs, "undrawn")


def least_tokens(
    candidates: Candidates, parameters: NoParameters, state: None, rng: random.Random
) -> Decision:
    """The worker with the fewest prompt tokens still to compute. Cost: those tokens."""
    costs = candidates.columns.pending_tokens.astype(np.float64)
    return Decision(least(costs, candidates, 0.0, rng), costs)


def vllm(
    candidates: Candidates, parameters: NoParameters, state: None, rng: random.Random
) -> Decision:
    """Cost: `4 × waiting + running`. Source: vLLM's internal data-parallel balancer
    (`DPLBAsyncMPClient` in `vllm/v1/engine/core_client.py`); ties by chance after load.
    """
    costs = (4 * candidates.columns.waiting + candidates.columns.running).astype(np.float64)
    return Decision(least(costs, candidates, 0.0, rng), costs)
