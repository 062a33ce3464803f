"""Policies that use the prefix first: where it is cached, or where its hash sends it."""

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
    """The longest predicted hit, whatever the load. Cost: prompt tokens left to compute.

    With a prefix common to all requests, every request goes to its first holder. Ties by load, then
    chance.
    """
    costs = candidates.new_tokens.astype(np.float64)
    return Decision(least(costs, candidates, 0.0, rng), costs)


class ConsistentHashParameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """bound          a worker may have this many times its even share of the requests
    prefix_tokens  tokens at the prompt's beginning that are hashed, in whole blocks
    """

    bound: Annotated[float, msgspec.Meta(ge=1.0)] = 1.25
    prefix_tokens: Annotated[int, msgspec.Meta(ge=1)] = 32


def consistent_hash(
    candidates: Candidates,
    parameters: ConsistentHashParameters,
    state: None,
    rng: random.Random,
) -> Decision:
    """The hash of the prompt's beginning decides, within a bounded share per worker.

    Each pair of prefix and worker has a pseudo-random rank (rendezvous hashing: as with a ring,
    only a lost worker's prefixes move, but without a ring to maintain). The worker of lowest rank
    whose batch would stay within `bound × (requests + 1) / n` is chosen. Cost: the rank, plus n if
    over the bound. A prompt without a full block goes to the worker with the fewest requests.

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
    """SplitMix64's finaliser (Steele, Lea, Flood, OOPSLA 2014): each input bit changes half of
    the output bits. uint64 arithmetic wraps around."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
