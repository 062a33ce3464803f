"""LMetric's score and its relatives: hit, pending prefill and batch in one number.

In tokens (`locality`, `additive`) or in seconds (`marginal`, `ttft`). Seconds come from each
worker's measured prefill speed with its quadratic part: to prefill the tokens `[hit, prompt)`
takes `b × new + e × pairs`, where a pair is one query looking at one key, so that
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
    guard  relieve the holders of a prefix that draws more traffic than their share
    """

    tie: Tie = 0.01
    guard: bool = False


def locality(
    candidates: Candidates,
    parameters: LocalityParameters,
    state: HotspotState,
    rng: random.Random,
) -> Decision:
    """Expected hit minus pending prefill tokens, times batch size: the project's default.

    With the sign turned, so that the least wins: `(pending + new) × (batch + 1)`, where
    `new = max(1, prompt − hit)`. Source: LMetric, arXiv 2603.15202; `guard` is its two-phase
    hotspot rule (`router.policies.hotspot`).
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
    """The score read with the product taken first: `hit − pending × batch`, the greatest.

    Cost: `pending × batch − hit`. Unlike `locality` it sees no batch on a worker without
    pending prefill. Ties by load, then chance.
    """
    columns = candidates.columns
    costs = columns.pending_tokens * columns.batch - candidates.hit_tokens
    costs = costs.astype(np.float64)
    return Decision(least(costs, candidates, 0.0, rng), costs)


def ttft(
    candidates: Candidates, parameters: TieParameters, state: None, rng: random.Random
) -> Decision:
    """Least estimated time to the first token: `pending + new`, in seconds where measured.

    Each looks after itself: what a request's prefill does to those that decode there is not
    counted. Source: the estimate of Mooncake's scheduler (arXiv 2407.00079) without transfers.
    """
    work = prefill_work(candidates)
    costs = work.pending + work.new
    return Decision(least(costs, candidates, parameters.tie, rng), costs)


def marginal(
    candidates: Candidates, parameters: NoParameters, state: None, rng: random.Random
) -> Decision:
    """What this placement adds to everybody's time, waiting for first tokens counted for more.

    In seconds, with `λ` the arrivals a second that each worker gets:

        queued = pending × (1 + λ × new)        its own wait, and that of the λ × pending that come
                                                behind it before this has passed
        own    = new × (1 + λ × new + batch)    its prefill, for which those that come meanwhile
                                                wait, and all that are there: prefill goes before
                                                decoding, and who waits before it decodes then
        first  = queued, and where the holders suffice new × (1 + λ × new) as well
        cost   = queued + own + first × stay / wait

    `queued + own` is what the time to the end of all answers grows by. What is queued already is
    not delayed by a newcomer, so `pending` is not multiplied by the batch as in `locality`.
    `first` is what the time to all first tokens grows by. The two are weighed by their present
    means, so that a per cent of the one is worth a per cent of the other, as in the sum of log mean
    TTFT and log mean E2E. The means are those that the candidates show: a
    `wait = mean(pending + new)` and `stay = stay_s`; by Little's law `λ = mean(batch) / stay`.
    Nothing to tune: a fleet with backlogs everywhere waits long, and cares for the answers; one
    that is busy decoding cares for first tokens.

    Its own prefill counts as a first token only where those that hold most of the prompt are as
    many, for their share of the fleet, as the requests in flight that share it (`covered`): then a
    conversation stays where its history is. A prefix that more ask for than its holders can bear
    shall spread: whoever computes it anew holds it too, and the next ones have a choice. Without
    that, agents crowd on the few workers that have their system prompt (docs/study). The condition
    is the one of LMetric's hotspot rule, with requests in flight for the arrivals.

    While nothing has been placed yet `stay_s` is unknown: `pending + new × (batch + 1)`. With no
    prefill speed measured there are no seconds, and it decides as `locality` does, in tokens.
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
        # sums, as numpy's mean costs as much as four of these lines
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
    """Whether those that hold most of the prompt are enough for those that share it: their share of
    the workers is at least the share that these, this request included, have of all requests."""
    holders = int(np.count_nonzero(candidates.hit_tokens == candidates.best_hit_tokens))
    workers, sharing = len(candidates.hit_tokens), candidates.sharing + 1
    return covers(holders, workers, sharing, candidates.in_flight + 1)


class PrefillWork(NamedTuple):
    """Prefill a worker has to do: `[n]` each, in seconds, or in tokens with nothing measured."""

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
    # prompt² − hit², of the hit what is really not computed
    new_pairs = (2 * candidates.prompt_tokens - new) * new / 2
    seconds = speed * new
    seconds += per_pair * new_pairs
    return PrefillWork(pending, seconds, in_seconds=True)
