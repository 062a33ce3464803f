"""Variants of `marginal`, each with one thing changed, so that a reader sees what it contributes.

`marginal` is `first × (1 + stay / mean(wait)) + new × batch` in seconds, with `wait = pending +
new` and `first = wait × (1 + λ × new)`; see `router.policies.scores`. Where that is not known yet,
the variants decide as it does.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np

from router.coming import ComingBlocks
from router.fleet import Fleet
from router.policies import Candidates, Decision, Policy, least, scores
from router.policies.base import FloatArray, NoParameters
from router.policies.scores import prefill_work

Score = Callable[[Candidates], FloatArray]


def marginal(candidates: Candidates) -> FloatArray:
    """As it is."""
    decision = scores.marginal(candidates, NoParameters(), None, random.Random(0))
    return np.asarray(decision.costs, dtype=np.float64)


def from_parts(change: Callable[[Candidates, FloatArray, FloatArray], FloatArray]) -> Score:
    """Of a request's own wait and what it computes itself, `[n]` seconds each, in which `stay_s` is
    known."""

    def score(candidates: Candidates) -> FloatArray:
        work = prefill_work(candidates)
        if not work.in_seconds or not candidates.stay_s:
            return marginal(candidates)
        return change(candidates, work.pending + work.new, work.new)

    return score


def behind(candidates: Candidates, wait: FloatArray, new: FloatArray) -> FloatArray:
    """Its own wait and that of those that come behind it: `first`."""
    first: FloatArray = wait * (1.0 + new * candidates.batch.mean() / candidates.stay_s)
    return first


def none_behind(candidates: Candidates, wait: FloatArray, new: FloatArray) -> FloatArray:
    """Those that come behind it not counted."""
    weight = 1.0 + candidates.stay_s / wait.mean()
    return wait * weight + new * candidates.batch


def ends_alone(candidates: Candidates, wait: FloatArray, new: FloatArray) -> FloatArray:
    """The time to the end of answers alone."""
    return behind(candidates, wait, new) + new * candidates.batch


def first_alone(candidates: Candidates, wait: FloatArray, new: FloatArray) -> FloatArray:
    """The time to the first token alone."""
    return behind(candidates, wait, new)


def fixed_weight(candidates: Candidates, wait: FloatArray, new: FloatArray) -> FloatArray:
    """First tokens weigh five times as much everywhere, whatever the fleet is doing."""
    return behind(candidates, wait, new) * 5.0 + new * candidates.batch


def before(candidates: Candidates) -> FloatArray:
    """`pending + new × (batch + 1)`: nothing that a stay tells; tokens with no speed measured."""
    work = prefill_work(candidates)
    return work.pending + work.new * (candidates.batch + 1)


def no_pending(candidates: Candidates) -> FloatArray:
    """What is queued not counted."""
    zeros = np.zeros_like(candidates.pending_tokens)
    return marginal(candidates._replace(pending_tokens=zeros, pending_pairs=zeros))


def linear(candidates: Candidates) -> FloatArray:
    """Seconds without their quadratic part: tokens at the measured speed."""
    return marginal(candidates._replace(s_per_pair=None, pending_pairs=None))


def running_only(candidates: Candidates) -> FloatArray:
    """Those that wait not counted among the delayed."""
    return marginal(candidates._replace(batch=candidates.running))


def no_hits(candidates: Candidates) -> FloatArray:
    """Hits not counted: the load's part alone."""
    return marginal(candidates._replace(hit_tokens=np.zeros_like(candidates.hit_tokens)))


def with_memory(candidates: Candidates) -> FloatArray:
    """A prompt that finds too few free blocks waits for some to be freed: counted as if what is
    lacking had to be prefilled before it."""
    free = candidates.free_blocks.astype(np.float64)
    if candidates.booked_blocks is not None:
        free = free - candidates.booked_blocks
    short = np.maximum(0.0, candidates.new_tokens - free * candidates.block_size)
    each: FloatArray = prefill_work(candidates).new / candidates.new_tokens
    return marginal(candidates) + short * each * (candidates.batch + 1)


def _variant(score: Score, tie: float = 0.0) -> Callable[[], Policy]:
    def choose(
        candidates: Candidates, parameters: NoParameters, state: None, rng: random.Random
    ) -> Decision:
        costs = np.asarray(score(candidates), dtype=np.float64)
        return Decision(least(costs, candidates, tie, rng), costs)

    return lambda: Policy(score.__name__, choose, NoParameters(), None)


BEFORE = "marginal, unweighed"
WITHOUT_COMING = "marginal, hits on their way not counted"
VARIANTS: dict[str, Callable[[], Policy]] = {
    BEFORE: _variant(before, 0.01),
    "marginal, those behind not counted": _variant(from_parts(none_behind)),
    "marginal, ends of answers alone": _variant(from_parts(ends_alone)),
    "marginal, first tokens alone": _variant(from_parts(first_alone)),
    "marginal, first tokens times 5": _variant(from_parts(fixed_weight)),
    "marginal, pending left out": _variant(no_pending),
    "marginal, running only": _variant(running_only),
    "marginal, without the quadratic part": _variant(linear),
    "marginal, no hits": _variant(no_hits),
    WITHOUT_COMING: _variant(marginal),
    "marginal, memory": _variant(with_memory),
    "marginal, ties of 1 %": _variant(marginal, 0.01),
}


def prepare(name: str, fleet: Fleet) -> None:
    """What the variant changes in the router beside the policy."""
    if name == WITHOUT_COMING:
        fleet.coming = ComingBlocks(life_s=0.0)
