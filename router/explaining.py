"""Why a request goes to a worker: the table behind a decision, and its reason in one word."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Collection, Sequence
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from cluster.protocol import WorkerState
from router.fleet import Fleet
from router.member import Member
from router.policies import LEFT_OUT, Candidates, Decision, Policy, only_with_room

Reason = Literal["only", "cold", "hit", "load", "guard"]

REASONS: dict[Reason, str] = {
    "only": "no other worker may serve it",
    "cold": "no worker holds any of its prefix, so load decides",
    "hit": "no worker holds more of its prefix",
    "load": "another worker holds more of its prefix, but costs more or is excluded",
    "guard": "its prefix exceeds its holders' share of requests: the hotspot guard excluded them",
}


class ExplainedWorker(msgspec.Struct, frozen=True, kw_only=True):
    """One worker as the decision on one request saw it. Tokens are prompt tokens.

    hit_tokens     predicted hit: published blocks, coming blocks, and the worth of blocks in cold
                   tiers
    cold_tokens    tokens that it holds only in cold tiers, beyond those on its device
    coming_tokens  tokens of coming blocks in `hit_tokens`: requests in flight will store them
    new_tokens     tokens that it would compute
    pending_tokens, batch   its load: tokens to compute for others; requests running and waiting
    wait_s         expected seconds until a new request would start
    cost           of the policy, the least wins; None if the worker is left out
    left_out       why it is not a candidate, or why the policy left it out; "" if it has a cost
    """

    worker: str
    state: WorkerState
    hit_tokens: int
    cold_tokens: int
    coming_tokens: int
    new_tokens: int
    pending_tokens: int
    batch: int
    free_blocks: int
    wait_s: float
    cost: float | None
    chosen: bool
    left_out: str


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """Response of `POST /admin/explain`, which sends, books and stores nothing, and of
    `GET /admin/decisions/{request id}`, for a decision that was made.

    blocks          full blocks of the prompt
    chosen          the chosen worker, "" if none may serve; near-ties fall to chance, so the
                    next decision may choose another
    reason          one of REASONS, or ""; `because` says it in words
    second          next best by cost, "" if there is none
    margin          cost of `second` minus cost of `chosen`; below 0 where the policy looks at
                    more than cost; `margin_share` is that over the cost of `chosen`
    workers         candidates by cost, then workers that are left out, by name
    others          number of workers omitted from a large table
    """

    model: str
    kind: str
    policy: str
    prompt_tokens: int
    blocks: int
    block_size: int
    chosen: str
    reason: str
    because: str
    second: str
    margin: float | None
    margin_share: float | None
    workers: list[ExplainedWorker]
    others: int = 0


def reason_of(candidates: Candidates, decision: Decision) -> Reason:
    """Which of REASONS applies to a decision on `candidates`."""
    hits = candidates.hit_tokens
    if len(hits) == 1:
        return "only"
    if decision.left_out == "guard":
        return "guard"
    best = candidates.best_hit_tokens
    if best == 0:
        return "cold"
    return "hit" if hits.item(decision.chosen) == best else "load"


def explain(
    fleet: Fleet,
    policy: Policy,
    rng: random.Random,
    *,
    model: str,
    kind: str,
    chain: Sequence[bytes],
    prompt_tokens: int,
    holds_back: bool,
) -> Explanation:
    """Decide as for a request with these block hashes, and show what the decision was based on.

    `holds_back`: whether requests wait at the gateway until a worker has room.
    """
    everybody = fleet.candidates(model, chain, prompt_tokens)
    candidates = everybody and only_with_room(everybody, holds_back=holds_back)
    decision = None
    if candidates is not None:
        # a copy: policies such as round_robin change their state
        trial = policy._replace(state=copy.deepcopy(policy.state))
        decision = trial.choose(candidates, rng)
    return explanation_of(
        fleet,
        fleet.members(),
        candidates,
        decision,
        policy=policy.name,
        model=model,
        kind=kind,
        chain=chain,
        prompt_tokens=prompt_tokens,
    )


def explanation_of(
    fleet: Fleet,
    members: Sequence[Member],
    candidates: Candidates | None,
    decision: Decision | None,
    *,
    policy: str,
    model: str,
    kind: str,
    chain: Sequence[bytes],
    prompt_tokens: int,
    tried: Collection[str] = (),
    others: int = 0,
) -> Explanation:
    """The table of a decision that is not booked yet.

    members     workers to show: the candidates and others
    candidates  what the policy saw and decided; None if no worker may serve
    tried       workers whose attempts failed
    """
    costs: dict[int, float] = {}
    hits: dict[int, int] = {}
    chosen = -1
    by_policy = "the policy left it out"
    reason: Reason | Literal[""] = ""
    if candidates is not None and decision is not None:
        slots = candidates.columns.slots.tolist()
        costs = dict(zip(slots, decision.costs.astype(np.float64).tolist(), strict=True))
        hits = dict(zip(slots, candidates.hit_tokens.tolist(), strict=True))
        chosen = slots[decision.chosen]
        reason = reason_of(candidates, decision)
        if decision.left_out:
            by_policy = LEFT_OUT[decision.left_out]
    block_size = _block_size(members, model)
    published, device, cold = _held(fleet, members, chain, prompt_tokens, block_size)
    rows = []
    for member in members:
        hit, load = int(published[member.slot]), fleet.load_of(member)
        expected = hits.get(member.slot, hit)
        cost, left_out = costs.get(member.slot), ""
        if cost is None:
            left_out = _why_left_out(
                member, model, prompt_tokens - expected, tried, fleet.wait_of(member)
            )
        elif not math.isfinite(cost):
            cost, left_out = None, by_policy
        rows.append(
            ExplainedWorker(
                worker=member.card.worker,
                state=member.state,
                hit_tokens=expected,
                cold_tokens=int(cold[member.slot]),
                coming_tokens=int(device[member.slot]) - hit if member.slot in hits else 0,
                new_tokens=max(1, prompt_tokens - expected),
                pending_tokens=load.pending_prefill_tokens,
                batch=load.batch,
                free_blocks=load.free_blocks,
                wait_s=fleet.wait_of(member),
                cost=cost,
                chosen=member.slot == chosen,
                left_out=left_out,
            )
        )
    rows.sort(key=_order)
    ranked = [row for row in rows if row.cost is not None]
    first = next((row for row in rows if row.chosen), None)
    second = next((row for row in ranked if not row.chosen), None)
    margin = share = None
    if first and second and first.cost is not None and second.cost is not None:
        margin = second.cost - first.cost
        share = margin / abs(first.cost) if first.cost else None
    return Explanation(
        model=model,
        kind=kind,
        policy=policy,
        prompt_tokens=prompt_tokens,
        blocks=len(chain),
        block_size=block_size,
        chosen=first.worker if first else "",
        reason=reason,
        because=REASONS[reason] if reason else "no worker may serve it",
        second=second.worker if second else "",
        margin=margin,
        margin_share=share,
        workers=rows,
        others=others,
    )


def _order(row: ExplainedWorker) -> tuple[bool, bool, float, str]:
    cost = math.inf if row.cost is None else row.cost
    return (bool(row.left_out), not row.chosen, cost, row.worker)


def _block_size(members: Sequence[Member], model: str) -> int:
    usable = [m.card for m in members if m.card.model == model and m.serves]
    return usable[0].namespace.block_size if usable else 0


def _held(
    fleet: Fleet,
    members: Sequence[Member],
    chain: Sequence[bytes],
    prompt_tokens: int,
    block_size: int,
) -> NDArray[np.int64]:
    """`[3, slots]`, prompt tokens: in announced blocks; in announced and coming blocks of its
    device; in blocks beyond these that it holds only in cold tiers."""
    if not block_size:
        return np.zeros((3, 1 + max((member.slot for member in members), default=0)), np.int64)
    limit = min(len(chain), (prompt_tokens - 1) // block_size)
    mask = sum(1 << member.slot for member in members)
    device = fleet.device_depths(chain, mask, limit)
    published = fleet.index.depths(chain, mask, len(device), limit)
    cold = fleet.cold.ends(device, chain, mask, limit)[1] - device if fleet.cold else 0 * device
    return np.stack([published, device, cold]) * block_size


def _why_left_out(
    member: Member, model: str, new_tokens: int, tried: Collection[str], wait_s: float
) -> str:
    """Why a worker is not a candidate, in words."""
    card = member.card
    if card.worker in tried:
        return "it failed this request before"
    if card.model != model:
        return f"it serves {card.model}"
    if member.refused:
        return member.refused
    if member.state != "ready":
        return f"it is {member.state}"
    if member.suspect_until:
        return f"{member.suspect_why}; it is excluded until its next sign of life"
    if member.left_out:
        return member.left_out
    needed, free = -(-new_tokens // card.namespace.block_size), member.load.free_blocks
    if wait_s and free >= needed:
        return f"its expected wait of {wait_s:.1f} s is too long"
    return f"it has no room: {free} blocks are free, the prompt needs {needed}"
