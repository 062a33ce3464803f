"""The workers of one model: which of them may serve now, and what they must have in common."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cluster.protocol import WorkerCard
from router.columns import LoadTable, run_of
from router.member import Member, ModelGroup, context_tokens, difference


def group_of(members: Sequence[Member], former: WorkerCard | None, table: LoadTable) -> ModelGroup:
    """The group of all workers of one model, whatever their state; sets their `refused`.

    The measure stays `former` as long as a ready worker matches it, so that a rolling update
    does not turn the old workers away while they still serve.
    """
    ready = sorted(
        (m for m in members if m.state == "ready"), key=lambda member: member.ready_serial
    )
    like_former = [m for m in ready if former is not None and not difference(m.card, former)]
    reference = (like_former or ready)[0].card if ready else None
    for member in members:
        member.refused = difference(member.card, reference) if reference else ""
    usable = sorted(member.slot for member in members if member.usable)
    slots = np.array(usable, dtype=np.int64)
    run = run_of(slots)
    return ModelGroup(
        reference,
        min((context_tokens(m.card) for m in ready if not m.refused), default=0),
        slots,
        sum(1 << slot for slot in usable),
        run,
        None if run is None else table.columns(run),
    )
