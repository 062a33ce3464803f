"""Variants of `marginal`, each with one thing changed, so that a reader sees what it contributes.

`marginal` is `pending + new × (batch + 1)` in seconds; see `router.policies.scores`.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np

from router.policies import Candidates, Decision, Policy, least
from router.policies.base import FloatArray, NoParameters
from router.policies.scores import PrefillWork, prefill_work

TIE = 0.01
Score = Callable[[Candidates], FloatArray]


def in_tokens(candidates: Candidates) -> FloatArray:
    """Tokens instead of seconds."""
    return candidates.pending_tokens + candidates.new_tokens * (candidates.batch + 1.0)


def no_pending(candidates: Candidates) -> FloatArray:
    """Its own wait left out."""
    return prefill_work(candidates).new * (candidates.batch + 1)


def pending_for_all(candidates: Candidates) -> FloatArray:
    """What is queued counted for everybody: `locality`, in seconds."""
    work = prefill_work(candidates)
    return (work.pending + work.new) * (candidates.batch + 1)


def running_only(candidates: Candidates) -> FloatArray:
    """Only those that run are delayed: who waits is served before a newcomer."""
    work = prefill_work(candidates)
    return work.pending + work.new * (candidates.running + 1)


def no_hits(candidates: Candidates) -> FloatArray:
    """Hits not counted: the load's part alone."""
    blind = candidates._replace(hit_tokens=np.zeros_like(candidates.hit_tokens))
    return marginal(blind)


def marginal(candidates: Candidates) -> FloatArray:
    """As it is."""
    work = prefill_work(candidates)
    return work.pending + work.new * (candidates.batch + 1)


def with_memory(candidates: Candidates) -> FloatArray:
    """A prompt that finds too few free blocks waits for some to be freed: counted as if what is
    lacking had to be prefilled before it."""
    return marginal(candidates) + lacking(candidates, prefill_work(candidates))


def lacking(candidates: Candidates, work: PrefillWork) -> FloatArray:
    """Seconds of prefill of as many tokens as free blocks are lacking."""
    free = candidates.free_blocks.astype(np.float64)
    if candidates.booked_blocks is not None:
        free = free - candidates.booked_blocks
    short = np.maximum(0.0, candidates.new_tokens - free * candidates.block_size)
    each: FloatArray = work.new / candidates.new_tokens
    return short * each * (candidates.batch + 1)


def _variant(score: Score, tie: float = TIE) -> Callable[[], Policy]:
    def choose(
        candidates: Candidates, parameters: NoParameters, state: None, rng: random.Random
    ) -> Decision:
        costs = np.asarray(score(candidates), dtype=np.float64)
        return Decision(least(costs, candidates, tie, rng), costs)

    return lambda: Policy(score.__name__, choose, NoParameters(), None)


VARIANTS: dict[str, Callable[[], Policy]] = {
    "marginal, in tokens": _variant(in_tokens),
    "marginal, pending left out": _variant(no_pending),
    "marginal, pending for all": _variant(pending_for_all),
    "marginal, running only": _variant(running_only),
    "marginal, no hits": _variant(no_hits),
    "marginal, memory": _variant(with_memory),
    "marginal, no ties": _variant(marginal, 0.0),
}
