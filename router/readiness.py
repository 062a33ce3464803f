"""Whether a gateway can serve requests, and by prefix, with the reasons in words if not.

A gateway that cannot read Redis is not ready, as another gateway may be. Problems that all gateways
share, while requests are still answered, leave it ready and are named in `degraded`: workers that
cannot serve, workers that do not report or do not publish what they cache, a Redis that accepts no
writes.
"""

from __future__ import annotations

import msgspec

from cluster.bus_status import BusStatus
from router.fleet import Fleet
from router.member import Member

NAMED = 3
"""Most workers named in one reason; the others are counted."""


class IndexView(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the prefix index may be out of date, with the reason in words."""

    stale: bool
    reason: str


class ReadyView(msgspec.Struct, frozen=True, kw_only=True):
    """Response of `/ready`.

    reasons    why the gateway is not ready; empty if it is
    degraded   problems although requests are answered
    """

    ready: bool
    reasons: list[str]
    degraded: list[str]
    models: list[str]
    workers_ready: int
    index: IndexView
    refused: dict[str, str]


def disagreeing(fleet: Fleet, status: BusStatus) -> dict[str, str]:
    """Worker -> why its reports disagree with the index although its whole set was read."""
    members = {member.card.worker: member for member in fleet.members()}
    return {
        worker: _disagreement(fleet, members[worker], reads)
        for worker, reads in status.disagreeing.items()
        if worker in members
    }


def _disagreement(fleet: Fleet, member: Member, reads: int) -> str:
    cached = member.load.cached_blocks
    known = fleet.index.count(member.slot) + fleet.index.dropped(member.slot)
    what = f"it reports {cached} cached blocks, but has published {known}"
    if cached == known:
        what = "its reports state other numbers of blocks in cold tiers than it has published"
    return (
        f"{what}, although its whole set was read {reads} times: predicted hits there may be wrong"
    )


def index_view(fleet: Fleet, status: BusStatus) -> IndexView:
    """The state of the index, from the follower's status and the workers' reports."""
    if status.stale:
        return IndexView(stale=True, reason=status.reason)
    apart = [f"{worker}: {why}" for worker, why in disagreeing(fleet, status).items()]
    if not apart:
        return IndexView(stale=False, reason=fleet.index.problem)
    more = [f"and {len(apart) - NAMED} more workers"] if len(apart) > NAMED else []
    return IndexView(stale=True, reason="; ".join(apart[:NAMED] + more))


def readiness(pool: str, fleet: Fleet, status: BusStatus, *, stopping: bool = False) -> ReadyView:
    """The response of `/ready`, from the fleet and the follower's status."""
    members = fleet.members()
    refused = {**status.refused, **fleet.refused()}
    reasons = ["this gateway is shutting down"] if stopping else []
    usable = sum(member.serves for member in members)
    if not members:
        reasons.append(f"no worker has announced itself in the pool {pool!r}")
    elif not usable:
        reasons.append(f"none of the {len(members)} workers can serve: {_states(members)}")
    if not usable:
        reasons += [f"worker {name} is refused: {why}" for name, why in refused.items()]
    index = index_view(fleet, status)
    if not status.connected:
        reasons.append(f"the index is stale: {index.reason}")
    return ReadyView(
        ready=not reasons,
        reasons=reasons,
        degraded=_degraded(members, usable, index, status),
        models=list(fleet.models()),
        workers_ready=usable,
        index=index,
        refused=refused,
    )


def _degraded(members: list[Member], usable: int, index: IndexView, status: BusStatus) -> list[str]:
    told = []
    unusable = [member for member in members if not member.serves]
    if unusable and usable:
        told.append(
            f"reduced capacity: {usable} of {len(members)} workers serve; {_states(unusable)}"
        )
    failing = [m for m in members if m.serves and m.avoided]
    if failing:
        told.append(
            "workers serve although their requests fail, because all others fail as well: "
            + ", ".join(f"{m.card.worker}: {m.avoided}" for m in failing[:NAMED])
        )
    if index.stale:
        told.append(f"the index is stale: {index.reason}")
    kept = sorted(status.kept)
    if kept:
        ages = [f"{w} {status.report_ages_s.get(w, 0.0):.1f} s ago" for w in kept[:NAMED]]
        more = [f"and {len(kept) - NAMED} more"] if len(kept) > NAMED else []
        told.append(
            "workers answer directly, but their reports do not arrive; last reports: "
            + ", ".join(ages + more)
        )
    if status.warning:
        told.append(status.warning)
    return told


def _states(members: list[Member]) -> str:
    more = [f"and {len(members) - NAMED} more"] if len(members) > NAMED else []
    return ", ".join([f"{m.card.worker} is {_state(m)}" for m in members[:NAMED]] + more)


def _state(member: Member) -> str:
    if member.refused:
        return "refused"
    if member.suspect_until and member.state == "ready":
        return f"not reachable ({member.suspect_why})"
    if member.left_out:
        return f"avoided ({member.avoided})"
    return member.state
