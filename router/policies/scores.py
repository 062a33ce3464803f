"""LMetric's score and related ones: hit, pending prefill and batch in one number.

In tokens (`locality`, `additive`) or in seconds (`marginal`, `ttft`). Seconds come from each
worker's measured prefill speed with its quadratic part: prefilling the tokens `[hit, prompt)`
takes `b × new + e × pairs`. A pair is one query attending to one key, so
`pairs = (prompt² − hit²) / 2`.
"""

from __future__ import annotations

import random
from typing import Annotated, NamedTuple

import msgspec
import numpy as np

from router.policies.base import Candidates, CostArray, Decision, FloatArray, NoParameters, least
from router.policies.hotspot import HotspotState, covers, left_out

Tie = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]


class TieParameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """tie   costs that differ by no more than this share of the least are equal"""

    tie: Tie = 0.01


class LocalityParameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """tie    costs that differ by no more than this share of the least are equal
    guard  relieve the holders of a prefix that gets more traffic than their share
    """

    tie: Tie = 0.01
    guard: bool = False


def locality(
    candidates: Candidates,
    parameters: LocalityParameters,
    state: HotspotState,
    rng: random.Random,
) -> Decision:
    """LMetric's score, hits less pending prefill times the batch size: the project's default.

    Cost: `(pending + new) × (batch + 1)`, where `new = max(1, prompt − hit)`. Source: LMetric,
    arXiv 2603.15202; `guard` is its two-phase hotspot rule (`router.policies.hotspot`).
    """
    work = candidates.new_tokens
    work += candidates.columns.pending_tokens
    costs: CostArray = work * candidates.columns.batch
    costs += work
    if parameters.guard:
        out = left_out(
            candidates, state, lambda: least(costs, candidates, parameters.tie, random.Random(0))
        )
        if out is not None:
            costs = np.where(out, np.inf, costs)
            return Decision(least(costs, candidates, parameters.tie, rng), costs, "guard")
    return Decision(least(costs, candidates, parameters.tie, rng), costs)


def additive(
    candidates: Candidates, parameters: NoParameters, state: None, rng: random.Random
) -> Decision:
    """The score with the product first: the largest `hit − pending × batch`.

    Cost: `pending × batch − hit`. Unlike `locality`, it ignores the batch of a worker without
    pending prefill. Ties by load, then chance.
    """
    columns = candidates.columns
    costs = columns.pending_tokens * columns.batch - candidates.hit_tokens
    costs = costs.astype(np.float64)
    return Decision(least(costs, candidates, 0.0, rng), costs)


def ttft(
    candidates: Candidates, parameters: TieParameters, state: None, rng: random.Random
) -> Decision:
    """Least estimated time to the first token: `pending + new`, in seconds if measured.

    It ignores the delay that a request's prefill causes for requests that decode there. Source:
    the estimate of Mooncake's scheduler (arXiv 2407.00079) without transfers.
    """
    work = prefill_work(candidates)
    costs = work.pending + work.new
    return Decision(least(costs, candidates, parameters.tie, rng), costs)


def marginal(
    candidates: Candidates, parameters: NoParameters, state: None, rng: random.Random
) -> Decision:
    """The time that this placement adds to all requests, with a higher weight for first tokens.

    In seconds, with `λ` the arrivals per second at each worker:

        queued = pending × (1 + λ × new)        its own wait, and the delay of the λ × pending
                                                requests that arrive during that wait
        own    = new × (1 + λ × new + batch)    its prefill, which delays itself, requests that
                                                arrive meanwhile, and all requests there, as prefill
                                                goes before decoding
        first  = queued, plus new × (1 + λ × new) if the holders suffice
        cost   = queued + own + first × stay / wait

    `queued + own` is the increase of the sum of E2E over all requests. A new request does not delay
    prefill that is queued already, so `pending` is not multiplied by the batch as in `locality`.
    `first` is the increase of the sum of TTFT. Each is weighted by the inverse of its present mean,
    so that one per cent of E2E is worth one per cent of TTFT, as in the sum of log mean TTFT and
    log mean E2E. The means are those of the candidates: `wait = mean(pending + new)` and
    `stay = stay_s`; by Little's law `λ = mean(batch) / stay`. There is nothing to tune: a fleet
    with long queues everywhere optimises E2E, a fleet that is busy decoding optimises TTFT.

    Its own prefill counts in `first` only if the share of workers that hold most of the prompt is
    at least the share of requests in flight that share it (`covered`): then a conversation stays
    where its history is. A prefix with more requests than its holders can serve should spread: each
    worker that computes it becomes a holder, and later requests have a choice. Without this
    condition, agents crowd on the few workers that have their system prompt (docs/study). It is the
    condition of LMetric's hotspot rule, with requests in flight instead of arrivals.

    Before the first placement `stay_s` is unknown, and the cost is `pending + new × (batch + 1)`.
    Without a measured prefill speed there are no seconds; it decides like `locality`, in tokens.
    Sources: the marginal cost of an arrival in a queue (Naor, Econometrica 37, 1969); Little,
    Operations Research 9, 1961.
    """
    work = prefill_work(candidates)
    wait = work.pending + work.new
    batch, stay_s = candidates.columns.batch, candidates.stay_s
    if not work.in_seconds:
        costs = wait * batch
        costs += wait
    elif not stay_s:
        costs = work.new * batch
        costs += wait
    else:
        # sums, because numpy's mean costs as much as four of these lines
        per_s, mean_wait = batch.sum() / len(batch) / stay_s, wait.sum() / len(wait)
        behind = work.new * per_s
        behind += 1.0
        weight = 1.0 + stay_s / mean_wait
        if covered(candidates):
            costs = wait * behind
            costs *= weight
            costs += work.new * batch
        else:
            costs = work.pending * behind
            costs *= weight
            behind += batch
            costs += work.new * behind
    return Decision(least(costs, candidates, 0.0, rng), costs)


def covered(candidates: Candidates) -> bool:
    """Whether the workers that hold most of the prompt suffice for the requests that share it:
    their share of the workers is at least the share of these requests, including this one."""
    holders = int(np.count_nonzero(candidates.hit_tokens == candidates.best_hit_tokens))
    workers, sharing = len(candidates.hit_tokens), candidates.sharing + 1
    return covers(holders, workers, sharing, candidates.in_flight + 1)


class PrefillWork(NamedTuple):
    """Prefill work of each worker: `[n]` each, in seconds, or in tokens if nothing is measured."""

    pending: FloatArray
    new: FloatArray
    in_seconds: bool


def prefill_work(candidates: Candidates) -> PrefillWork:
    """Pending prefill, and that of this request.

    A worker that has not measured its speed yet counts as the median of those that have.
    """
    columns, new = candidates.columns, candidates.new_tokens
    speed, per_pair = columns.s_per_token, columns.s_per_pair
    if speed.item(speed.argmax()) <= 0:
        pending_tokens = columns.pending_tokens.astype(np.float64)
        return PrefillWork(pending_tokens, new.astype(np.float64), in_seconds=False)
    if speed.item(speed.argmin()) <= 0:
        measured = speed > 0
        speed = np.where(measured, speed, np.median(speed[measured]))
        per_pair = np.where(measured, per_pair, np.median(per_pair[measured]))
    pending: FloatArray = speed * columns.pending_tokens
    pending += per_pair * columns.pending_pairs
    # prompt² − hit², where hit is what is really not computed
    new_pairs = (2 * candidates.prompt_tokens - new) * new / 2
    seconds = speed * new
    seconds += per_pair * new_pairs
    return PrefillWork(pending, seconds, in_seconds=True)
