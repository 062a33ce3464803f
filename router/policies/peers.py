"""The scores of other routers, for comparison on the same arrays.

Each applies the published rule to this router's exact hits and loads, so comparisons are of rules
alone. A router's "running" requests are those it has in flight, so they are `batch` here.
"""

from __future__ import annotations

import math
import random
from typing import Annotated

import msgspec
import numpy as np

from router.policies.base import Candidates, Decision, FloatArray, LeftOut, any_least, least

Share = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]
NotNegative = Annotated[float, msgspec.Meta(ge=0.0)]


class SglangParameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """cache_threshold        a best match of more than this share of the prompt is followed
    balance_abs_threshold  the largest batch may exceed the smallest by this many requests, and
    balance_rel_threshold  by this factor; beyond both, load alone decides
    """

    cache_threshold: Share = 0.3
    balance_abs_threshold: NotNegative = 64.0
    balance_rel_threshold: NotNegative = 1.5


def sglang(
    candidates: Candidates, parameters: SglangParameters, state: None, rng: random.Random
) -> Decision:
    """Least load if the fleet is imbalanced, else the best match, else least load.

    Imbalanced: `max − min > 64` and `max > 1.5 × min`. Cost: the batch if load decides, the prompt
    tokens left to compute if the match does. Source: SGLang's `cache_aware` policy with the
    defaults of its command line.
    """
    batch = candidates.columns.batch
    most, fewest = int(batch.max()), int(batch.min())
    unbalanced = (
        most - fewest > parameters.balance_abs_threshold
        and most > parameters.balance_rel_threshold * fewest
    )
    best = candidates.best_hit_tokens
    follows = best > parameters.cache_threshold * candidates.prompt_tokens
    if follows and not unbalanced:
        costs = (candidates.prompt_tokens - candidates.hit_tokens).astype(np.float64)
    else:
        costs = batch.astype(np.float64)
    return Decision(least(costs, candidates, 0.0, rng), costs)


class DynamoParameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """overlap_weight  weight of prefill relative to decode blocks
    credit          share of a hit that counts (1 for blocks on the device)
    temperature     of a softmax over the normalised costs; 0 takes the least
    """

    overlap_weight: NotNegative = 1.0
    credit: NotNegative = 1.0
    temperature: NotNegative = 0.0


def dynamo(
    candidates: Candidates, parameters: DynamoParameters, state: None, rng: random.Random
) -> Decision:
    """Cost in blocks: `w × max(0, pending + prompt − credit × hit) / block + decode blocks`.

    Decode blocks are those that sequences reference. With a temperature, drawn from the softmax
    of `−(cost − min) / (max − min) / temperature`; else the least, ties by chance. Source:
    NVIDIA Dynamo's KV router (`DefaultWorkerSelector`).
    """
    columns = candidates.columns
    prefill = columns.pending_tokens + candidates.prompt_tokens
    prefill_blocks = (
        np.maximum(0.0, prefill - parameters.credit * candidates.hit_tokens) / candidates.block_size
    )
    decode_blocks = columns.capacity_blocks - columns.free_blocks
    costs: FloatArray = parameters.overlap_weight * prefill_blocks + decode_blocks
    if parameters.temperature:
        spread = float(costs.max() - costs.min())
        scaled = (costs - costs.min()) / (spread or 1.0) / parameters.temperature
        return Decision(_draw(np.exp(-scaled), rng), costs)
    return Decision(any_least(costs, rng), costs)


def _draw(weights: FloatArray, rng: random.Random) -> int:
    """A random entry, with probabilities proportional to `weights`."""
    sums = np.cumsum(weights)
    index = int(np.searchsorted(sums, rng.random() * sums[-1], side="right"))
    return min(index, len(weights) - 1)


class LlmdParameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Weights of the three scores, each of which is 0 to 1."""

    prefix_weight: NotNegative = 3.0
    queue_weight: NotNegative = 2.0
    kv_weight: NotNegative = 2.0


def llmd(
    candidates: Candidates, parameters: LlmdParameters, state: None, rng: random.Random
) -> Decision:
    """Weighted sum `3 × prefix + 2 × queue + 2 × kv`; the largest wins, ties by chance.

    prefix: matched share of the prompt's full blocks; queue: `(max − waiting) / (max − min)`, 1
    where all are equal; kv: 1 − share of the KV blocks in use. Cost: the sum of the weights less
    the score. Source: llm-d's inference scheduler, defaults of its chart.
    """
    columns, size = candidates.columns, candidates.block_size
    blocks = max(1, candidates.prompt_tokens // size)
    prefix = np.minimum(1.0, candidates.hit_tokens // size / blocks)
    waiting = columns.waiting
    spread = int(waiting.max() - waiting.min())
    queue = (waiting.max() - waiting) / spread if spread else np.ones(len(waiting))
    kv = columns.free_blocks / np.maximum(1, columns.capacity_blocks)
    costs: FloatArray = (
        parameters.prefix_weight * (1.0 - prefix)
        + parameters.queue_weight * (1.0 - queue)
        + parameters.kv_weight * (1.0 - kv)
    )
    return Decision(any_least(costs, rng), costs)


class AibrixParameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """imbalance  load alone decides if the largest batch exceeds the smallest by more requests
    sigmas     a match is followed to workers within this many deviations above the mean
    """

    imbalance: NotNegative = 8.0
    sigmas: NotNegative = 1.0


def aibrix(
    candidates: Candidates, parameters: AibrixParameters, state: None, rng: random.Random
) -> Decision:
    """The least loaded worker if `max − min running > 8`, else the best match that is not busy.

    Not busy: running at most the mean plus one (population) standard deviation. Cost: the batch
    if load decides, else the prompt tokens left to compute, infinite for busy workers. Source:
    AIBrix's `prefix-cache` gateway plugin.
    """
    running = candidates.columns.batch
    busy: LeftOut | None = None
    if int(running.max() - running.min()) > parameters.imbalance:
        costs: FloatArray = running.astype(np.float64)
    else:
        # slightly above, so that rounding never excludes the mean itself
        limit = math.nextafter(float(running.mean() + parameters.sigmas * running.std()), math.inf)
        left = candidates.prompt_tokens - candidates.hit_tokens
        costs = np.where(running <= limit, left, np.inf)
        busy = "busy"
    return Decision(least(costs, candidates, 0.0, rng), costs, busy)
