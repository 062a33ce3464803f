"""Fit a profile of the emulated accelerator to the steps of a real engine.

Batches of random shape run on the engine's own runner and are timed: prefills of many lengths after
contexts of many lengths, decodes of many batch sizes, and mixed batches. The five coefficients of
`CostModel` are fitted to two thirds of the steps. The other third measures the error of the fit.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from cluster.protocol import Sampling
from worker.batch import BatchItem, Runner
from worker.emulated_profiles import CostModel, Profile
from worker.prefill_speed import FloatArray, fit_step_time

LEAST_STEPS = 30
"""Fewer steps cannot determine five coefficients."""

LONGEST_S = 600.0
"""Time limit in seconds if the requested time yields too few steps."""

RELUCTANCE = np.array([3e-4, 1e-9, 3e-4, 3e-4, 3e-4])
"""Reluctance of steps, prefill tokens, pairs, decodes, context tokens: see
`worker.prefill_speed`."""

WARM_UP_STEPS = 3
MOST_PREFILLS = 2
TOKEN = 7
"""The token ids do not matter, only their number."""

Shape = list[tuple[int, int]]
"""A batch: (start, count) of each sequence. A count of 1 is a decode."""


class Limits(NamedTuple):
    """Limits of the engine: tokens per sequence, step and pool, sequences per step."""

    context_tokens: int
    token_budget: int
    pool_tokens: int
    batch: int
    block_size: int


class Step(NamedTuple):
    """A batch and its duration."""

    shape: Shape
    seconds: float


class Fit(NamedTuple):
    """Result of a calibration.

    error, error_p90   |predicted − measured| / measured over the steps held out: median and 90th
                       percentile
    """

    cost: CostModel
    steps: int
    error: float
    error_p90: float


class CalibrationError(RuntimeError):
    """No profile can be fitted. The message says what to change."""


def measure(
    runner: Runner,
    limits: Limits,
    seconds: float,
    seed: int = 0,
    clock: Callable[[], float] = time.perf_counter,
    on_longer: Callable[[int], None] = lambda steps: None,
) -> list[Step]:
    """Time steps of random shape for this many seconds, and longer until there are `LEAST_STEPS`.

    `on_longer` is called with the number of steps if they are too few after that time. Raises
    CalibrationError if they still are after `LONGEST_S`.
    """
    rng = random.Random(seed)
    for _ in range(WARM_UP_STEPS):
        runner.execute(_batch([(0, min(limits.token_budget, limits.context_tokens))], limits))
    steps: list[Step] = []
    begin = clock()
    end, last = begin + seconds, begin + max(seconds, LONGEST_S)
    told = False
    while (now := clock()) < end or (len(steps) < LEAST_STEPS and now < last):
        if now >= end and not told:
            on_longer(len(steps))
            told = True
        shape = draw(rng, limits)
        batch = _batch(shape, limits)
        began = clock()
        runner.execute(batch)
        steps.append(Step(shape, clock() - began))
    if len(steps) < LEAST_STEPS:
        raise CalibrationError(
            f"{len(steps)} steps were measured in {max(seconds, LONGEST_S):g} s, but "
            f"{LEAST_STEPS} are needed; use a smaller --token-budget"
        )
    return steps


def draw(rng: random.Random, limits: Limits) -> Shape:
    """A third each: prefills, decodes, both. Lengths are log-uniform."""
    kind = rng.randrange(3)
    shape: Shape = []
    pool = limits.pool_tokens
    budget = limits.token_budget
    for _ in range(rng.randint(1, MOST_PREFILLS) if kind != 1 else 0):
        count = _log_uniform(rng, 2, min(budget, pool, limits.context_tokens))
        start = _log_uniform(rng, 1, max(1, min(pool, limits.context_tokens) - count)) - 1
        if count < 2 or start + count > pool:
            break
        shape.append((start, count))
        budget -= count
        pool -= _whole_blocks(start + count, limits)
        if min(budget, pool) < 2:
            break
    if kind != 0 and budget > 0:
        decodes = _log_uniform(rng, 1, min(limits.batch - len(shape), budget))
        context = _log_uniform(rng, 1, max(1, min(limits.context_tokens, pool // decodes)))
        if _whole_blocks(context, limits) * decodes <= pool:
            shape += [(context - 1, 1)] * decodes
    return shape or [(0, 1)]


def fit(steps: Sequence[Step]) -> Fit:
    """Fit a cost model to two thirds of the steps, and measure its error on the others."""
    held_out = np.arange(len(steps)) % 3 == 2
    features = np.array([_features(step.shape) for step in steps])
    seconds = np.array([step.seconds for step in steps])
    found = fit_step_time(features[~held_out], seconds[~held_out], RELUCTANCE)
    predicted = features[held_out] @ found
    errors: FloatArray = np.abs(predicted - seconds[held_out]) / seconds[held_out]
    step_s, token_s, pair_s, decode_s, context_s = found.tolist()
    cost = CostModel(
        step_s=step_s,
        prefill_token_s=token_s,
        prefill_pair_s=pair_s,
        decode_s=decode_s,
        context_token_s=context_s,
    )
    return Fit(cost, len(steps), float(np.median(errors)), float(np.percentile(errors, 90)))


def profile_from(found: Fit, limits: Limits) -> Profile:
    """The profile of the engine that was measured."""
    return Profile(
        cost=found.cost, kv_tokens=limits.pool_tokens, context_tokens=limits.context_tokens
    )


def _features(shape: Shape) -> list[float]:
    """Steps, prefill tokens, pairs, decodes, context tokens: as `CostModel.seconds` counts."""
    tokens = pairs = decodes = context = 0.0
    for start, count in shape:
        if count == 1:
            decodes += 1
            context += start + 1
        else:
            tokens += count
            pairs += count * start + count * (count + 1) / 2
    return [1.0, tokens, pairs, decodes, context]


def _batch(shape: Shape, limits: Limits) -> list[BatchItem]:
    """Sequences side by side in the pool. Each samples, so that the step waits for the device."""
    batch, block = [], 1
    for number, (start, count) in enumerate(shape):
        blocks = _whole_blocks(start + count, limits) // limits.block_size
        batch.append(
            BatchItem(
                request_id=f"c{number}",
                token_ids=[TOKEN] * count,
                start=start,
                block_table=list(range(block, block + blocks)),
                sample=True,
                sampling=Sampling(max_tokens=1, temperature=0.0, seed=0),
                output_index=0,
            )
        )
        block += blocks
    return batch


def _whole_blocks(tokens: int, limits: Limits) -> int:
    return -(-tokens // limits.block_size) * limits.block_size


def _log_uniform(rng: random.Random, least: int, most: int) -> int:
    if most <= least:
        return most
    return round(float(np.exp(rng.uniform(np.log(least), np.log(most)))))
