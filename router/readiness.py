"""Whether a gateway can serve requests by prefix, and in words why not."""

from __future__ import annotations

import msgspec

from router.fleet import Fleet
from router.metrics import BusStatus


class IndexView(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the prefix index can be trusted, with the reason in words where not."""

    stale: bool
    reason: str


class ReadyView(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of `/ready`. `reasons` is empty where the gateway is ready."""

    ready: bool
    reasons: list[str]
    models: list[str]
    workers_ready: int
    index: IndexView
    refused: dict[str, str]


def readiness(pool: str, fleet: Fleet, status: BusStatus, following: bool) -> ReadyView:
    """Judge by the fleet and by how following the bus goes; `following`: it has not ended."""
    members = fleet.members()
    refused = {**status.refused, **fleet.refused()}
    reasons = []
    usable = sum(member.usable for member in members)
    if not members:
        reasons.append(f"no worker has announced itself in the pool {pool!r}")
    elif not usable:
        states = ", ".join(
            f"{m.card.worker} is "
            + ("refused" if m.refused else "not reachable" if m.suspect_until else m.state)
            for m in members
        )
        reasons.append(f"none of the {len(members)} workers can serve: {states}")
    if not usable:
        reasons += [f"worker {name} is refused: {why}" for name, why in refused.items()]
    stale, why = status.stale, status.reason
    if not following:
        stale, why = True, "the bus follower has ended; the log says why"
    if stale:
        reasons.append(f"the index is stale: {why}")
    return ReadyView(
        ready=not reasons,
        reasons=reasons,
        models=list(fleet.models()),
        workers_ready=usable,
        index=IndexView(stale=stale, reason=why or fleet.index.problem),
        refused=refused,
    )
