"""The workers of one model: which may serve now, and what they must have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from router.columns import LoadTable, run_of
from router.member import Member, ModelGroup, context_tokens, difference
from router.traffic import Traffic


class Groups:
    """Groups by model, and for models without workers the time when the last one left.

    clock   seconds, monotonic
    """

    def __init__(self, table: LoadTable, clock: Callable[[], float]) -> None:
        self.by_model: dict[str, ModelGroup] = {}
        self._left_at: dict[str, float] = {}
        self._table = table
        self._clock = clock

    def put(self, model: str, members: Sequence[Member]) -> None:
        """Set all workers of `model`."""
        former = self.by_model.pop(model, None)
        if not members:
            self._left_at[model] = self._clock()
            return
        self._left_at.pop(model, None)
        self.by_model[model] = group_of(members, former, self._table)

    def absent_s(self, model: str) -> float | None:
        """Seconds since the last worker of `model` left; None if it has some or never had any."""
        left_at = self._left_at.get(model)
        return None if left_at is None else self._clock() - left_at


def group_of(members: Sequence[Member], former: ModelGroup | None, table: LoadTable) -> ModelGroup:
    """The group of all workers of one model, whatever their state; sets their `refused`.

    The reference of the `former` group stays as long as a ready worker matches it, so that a
    rolling update does not refuse the old workers while they still serve.
    """
    ready = sorted(
        (m for m in members if m.state == "ready"), key=lambda member: member.ready_serial
    )
    before = None if former is None else former.reference
    like_before = [m for m in ready if before is not None and not difference(m.card, before)]
    reference = (like_before or ready)[0].card if ready else None
    for member in members:
        member.refused = difference(member.card, reference) if reference else ""
    serving = _serving(members)
    for member in members:
        member.serves = member in serving
    usable = sorted(member.slot for member in serving)
    slots = np.array(usable, dtype=np.int64)
    run = run_of(slots)
    return ModelGroup(
        reference,
        min((context_tokens(m.card) for m in ready if not m.refused), default=0),
        slots,
        sum(1 << slot for slot in usable),
        run,
        None if run is None else table.columns(slots, run),
        Traffic() if former is None else former.traffic,
    )


def _serving(members: Sequence[Member]) -> list[Member]:
    """The usable members that are not avoided; the least bad ones if all are."""
    usable = [member for member in members if member.usable]
    serving = [member for member in usable if not member.avoided]
    if serving or not usable:
        return serving
    least = min(member.failure_rate for member in usable)
    return [member for member in usable if member.failure_rate == least]
