"""Variants of `marginal`, each with one thing changed, so that a reader sees what it contributes.

`marginal` is `(pending + new) × behind + new × batch + first × stay / wait` in seconds, with
`behind = 1 + λ × new` and `first` what delays first tokens; see `router.policies.scores`.
Where that is not known yet, the variants decide as it does.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from router.coming import ComingBlocks
from router.fleet import Fleet
from router.policies import Candidates, Decision, Policy, least, scores
from router.policies.base import FloatArray, IntArray, NoParameters
from router.policies.scores import prefill_work

Score = Callable[[Candidates], FloatArray]


def marginal(candidates: Candidates) -> FloatArray:
    """As it is."""
    decision = scores.marginal(candidates, NoParameters(), None, random.Random(0))
    return np.asarray(decision.costs, dtype=np.float64)


def with_columns(candidates: Candidates, **columns: NDArray[Any]) -> FloatArray:
    """`marginal` with these columns in place of the real ones."""
    changed = structs.replace(candidates.columns, **columns)
    return marginal(structs.replace(candidates, columns=changed))


class Parts(NamedTuple):
    """pending, new   seconds, `[n]`
    behind         1 + those that come behind it, for each second, `[n]`
    weight         of what delays first tokens: 1 + stay / mean wait
    batch          `[n]`
    covered        whether those that hold most of the prompt suffice for those that share it
    """

    pending: FloatArray
    new: FloatArray
    behind: FloatArray
    weight: float
    batch: IntArray
    covered: bool

    def cost(self) -> FloatArray:
        """The formula."""
        first = self.pending * self.behind
        if self.covered:
            first = first + self.new * self.behind
        ends = (self.pending + self.new) * self.behind + self.new * self.batch
        return ends + first * (self.weight - 1)


def from_parts(change: Callable[[Parts], Parts]) -> Score:
    """Where `stay_s` is known."""

    def score(candidates: Candidates) -> FloatArray:
        work, stay_s = prefill_work(candidates), candidates.stay_s
        if not work.in_seconds or not stay_s:
            return marginal(candidates)
        behind = 1.0 + work.new * candidates.columns.batch.mean() / stay_s
        weight = 1.0 + stay_s / float((work.pending + work.new).mean())
        covered = scores.covered(candidates)
        parts = Parts(work.pending, work.new, behind, weight, candidates.columns.batch, covered)
        return change(parts).cost()

    return score


def none_behind(parts: Parts) -> Parts:
    """Those that come behind it not counted."""
    return parts._replace(behind=np.ones_like(parts.behind))


def unweighed(parts: Parts) -> Parts:
    """The time to the end of answers alone."""
    return parts._replace(weight=1.0)


def always_first(parts: Parts) -> Parts:
    """Its own prefill weighed as a first token, however many share its prefix."""
    return parts._replace(covered=True)


def never_first(parts: Parts) -> Parts:
    """Only the queue weighed."""
    return parts._replace(covered=False)


def five_times(parts: Parts) -> Parts:
    """First tokens weighed five times, whatever the fleet is doing."""
    return parts._replace(weight=5.0)


def before(candidates: Candidates) -> FloatArray:
    """`pending + new × (batch + 1)`: nothing that a stay tells; tokens with no speed measured."""
    work = prefill_work(candidates)
    return work.pending + work.new * (candidates.columns.batch + 1)


def no_pending(candidates: Candidates) -> FloatArray:
    """What is queued not counted."""
    zeros = np.zeros_like(candidates.columns.pending_tokens)
    return with_columns(candidates, pending_tokens=zeros, pending_pairs=zeros)


def linear(candidates: Candidates) -> FloatArray:
    """Seconds without their quadratic part: tokens at the measured speed."""
    none = np.zeros_like(candidates.columns.s_per_pair)
    return with_columns(candidates, s_per_pair=none)


def running_only(candidates: Candidates) -> FloatArray:
    """Those that wait not counted among the delayed."""
    return with_columns(candidates, batch=candidates.columns.running)


def no_hits(candidates: Candidates) -> FloatArray:
    """Hits not counted: the load's part alone."""
    zeros = np.zeros_like(candidates.hit_tokens)
    return marginal(structs.replace(candidates, hit_tokens=zeros, best_hit_tokens=0))


def with_memory(candidates: Candidates) -> FloatArray:
    """A prompt that finds too few free blocks waits for some to be freed: counted as if what is
    lacking had to be prefilled before it."""
    free = candidates.columns.room_blocks
    short = np.maximum(0.0, candidates.new_tokens - free * candidates.block_size)
    each: FloatArray = prefill_work(candidates).new / candidates.new_tokens
    waiting: FloatArray = short * each * (candidates.columns.batch + 1)
    return marginal(candidates) + waiting


def _variant(score: Score, tie: float = 0.0) -> Callable[[], Policy]:
    def choose(
        candidates: Candidates, parameters: NoParameters, state: None, rng: random.Random
    ) -> Decision:
        costs = np.asarray(score(candidates), dtype=np.float64)
        return Decision(least(costs, candidates, tie, rng), costs)

    return lambda: Policy(score.__name__, choose, NoParameters(), None)


BEFORE = "marginal, as it was"
ALWAYS = "marginal, own prefill always first"
NEVER = "marginal, own prefill never first"
WITHOUT_COMING = "marginal, hits on their way not counted"
VARIANTS: dict[str, Callable[[], Policy]] = {
    BEFORE: _variant(before, 0.01),
    "marginal, those behind not counted": _variant(from_parts(none_behind)),
    "marginal, ends of answers alone": _variant(from_parts(unweighed)),
    ALWAYS: _variant(from_parts(always_first)),
    NEVER: _variant(from_parts(never_first)),
    "marginal, weight 5": _variant(from_parts(five_times)),
    "marginal, pending left out": _variant(no_pending),
    "marginal, running only": _variant(running_only),
    "marginal, without the quadratic part": _variant(linear),
    "marginal, no hits": _variant(no_hits),
    WITHOUT_COMING: _variant(marginal),
    "marginal, memory": _variant(with_memory),
    "marginal, ties of 1 %": _variant(marginal, 0.01),
}
EVERYWHERE = (BEFORE, ALWAYS, NEVER)
"""In every cell that has two seeds; the first in all."""


def prepare(name: str, fleet: Fleet) -> None:
    """What the variant changes in the router beside the policy."""
    if name == WITHOUT_COMING:
        fleet.coming = ComingBlocks(life_s=0.0)
