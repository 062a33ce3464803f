"""Policies that look at the prefix first: where it is cached, or where its hash sends it."""

from __future__ import annotations

import random
from typing import Annotated

import msgspec
import numpy as np
from numpy.typing import NDArray

from router.policies.base import Candidates, Decision, FloatArray, NoParameters, least


def prefix_only(
    candidates: Candidates, parameters: NoParameters, state: None, rng: random.Random
) -> Decision:
    """The longest expected hit, whatever the load. Cost: prompt tokens left to compute.

    The policy that needs no load at all, and the reason why others do: with a prefix common to
    all requests everything goes to its first holder. Ties by load, then chance.
    """
    costs = candidates.new_tokens.astype(np.float64)
    return Decision(least(costs, candidates, 0.0, rng), costs)


class ConsistentHashParameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """bound          a worker may have so many times its even share of the requests
    prefix_tokens  tokens of the prompt's beginning that decide, in whole blocks
    """

    bound: Annotated[float, msgspec.Meta(ge=1.0)] = 1.25
    prefix_tokens: Annotated[int, msgspec.Meta(ge=1)] = 32


def consistent_hash(
    candidates: Candidates,
    parameters: ConsistentHashParameters,
    state: None,
    rng: random.Random,
) -> Decision:
    """The prompt's beginning decides, unless its worker has more than its bounded share.

    Each pair of prefix and worker has a pseudo-random rank (rendezvous hashing: as on a ring,
    only a lost worker's prefixes move, and no ring is to be kept). The first in rank whose batch
    would stay within `bound × (requests + 1) / n` is taken. Cost: the place in the ranking,
    n more where over the bound. A prompt without a full block goes to the least requests.

    Source of the bound: Mirrokni, Thorup, Zadimoghaddam, "Consistent Hashing with Bounded
    Loads", SODA 2018; 1.25 over the first 100 characters (some 32 tokens) is KubeAI's default.
    """
    columns, n = candidates.columns, len(candidates.hit_tokens)
    blocks = min(len(candidates.chain), -(-parameters.prefix_tokens // candidates.block_size))
    if not blocks:
        costs: FloatArray = columns.batch.astype(np.float64)
        return Decision(least(costs, candidates, 0.0, rng), costs)
    prefix = int.from_bytes(candidates.chain[blocks - 1][:8], "little")
    ranking = np.argsort(
        _mix(columns.worker_keys.astype(np.uint64) ^ np.uint64(prefix)), kind="stable"
    )
    places = np.empty(n)
    places[ranking] = np.arange(n)
    allowed = np.ceil(parameters.bound * (int(columns.batch.sum()) + 1) / n)
    costs = places + n * (columns.batch + 1 > allowed)
    return Decision(int(costs.argmin()), costs)


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's finaliser (Steele, Lea, Flood, OOPSLA 2014): every bit in changes half of
    those out. uint64 arithmetic wraps around."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
