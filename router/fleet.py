"""The router's live view of all workers: their blocks, their load, and which may serve.

Load cannot drift: `load(w) = last report of w + this router's requests to w that no report has
named as received yet`. No counter is incremented in one place and decremented in another: a
worker's row is computed from its last report and its unnamed requests whenever either changes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from cluster.blocks import split_hashes
from cluster.protocol import ColdReport, Load, Report, WorkerCard, WorkerState, prefill_pairs
from router.bitmask import Spread
from router.cold_index import ColdIndex
from router.columns import ROWS, LoadTable
from router.coming import ComingBlocks
from router.groups import Groups
from router.member import (
    Booking,
    Member,
    ModelGroup,
    booked_of,
    idle_load,
    member_of,
    row_of,
    wait_s,
)
from router.policies import Candidates, Columns
from router.prefix_index import MAX_PAIRS, PrefixIndex
from router.signals import Signal
from router.trust import SUSPECT_S, Trust

CLAIM_LIFE_S = 60.0
"""Longest life of a claim on coming blocks; its request mostly ends earlier."""


class FleetCheckError(AssertionError):
    """The fleet contradicts itself; the message says where."""


class Fleet:
    """All workers of a pool. A `cluster.following.FleetSink`. Not thread-safe.

    clock      seconds, monotonic
    changed    sent after a worker appeared, began an epoch, changed its state or left
    room       sent after an event that may make room: a report, a request's end, a new worker
    trust      which ready workers get no requests for now
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        claim_life_s: float = CLAIM_LIFE_S,
        suspect_s: float = SUSPECT_S,
        max_pairs: int = MAX_PAIRS,
    ) -> None:
        self.index = PrefixIndex(max_pairs)
        self.cold = ColdIndex(max_pairs)
        self.coming = ComingBlocks(claim_life_s)
        self.clock = clock
        self.requests_total = 0
        self.changed = Signal()
        self.room = Signal()
        self.last_report_at: float | None = None
        self._members: dict[str, Member] = {}
        self._by_slot: list[Member | None] = []
        self._table = LoadTable()
        self._spread = Spread()
        self.groups = Groups(self._table, clock)
        self.trust = Trust(self._members, self._regroup, self.changed, self.room, clock, suspect_s)
        self._bookings: dict[int, Booking] = {}
        self._serial = 0

    # FleetSink: called by the bus follower

    def on_card(self, card: WorkerCard) -> None:
        """A new worker, a new epoch, or a changed card. Cards of past epochs are ignored."""
        member = self._members.get(card.worker)
        before = "" if member is None else member.card.model
        if member is None:
            member = member_of(card, self._free_slot())
            self._members[card.worker] = member
            self._by_slot[member.slot] = member
        elif card.epoch < member.card.epoch:
            return
        elif card.epoch > member.card.epoch:
            self._begin_epoch(member, card)
        member.card = card
        member.heard_at = self.clock()
        self._set_state(member, card.state)
        self._refresh(member)
        if before not in ("", card.model):
            self._regroup(before)
        self._regroup(card.model)
        self.changed.send()
        self.room.send()

    def on_snapshot(self, worker: str, epoch: int, hashes: list[bytes]) -> None:
        """Replace all blocks of a worker's epoch."""
        member = self._members.get(worker)
        if member is not None and member.card.epoch == epoch:
            self.index.replace(member.slot, hashes)
            self.cold.drop(member.slot)

    def on_cold_snapshot(
        self, worker: str, epoch: int, cpu: Sequence[bytes], disk: Sequence[bytes]
    ) -> None:
        """Replace all blocks in the cold tiers of a worker's epoch."""
        member = self._members.get(worker)
        if member is not None and member.card.epoch == epoch:
            self.cold.replace(member.slot, cpu, disk)

    def on_report(self, report: Report) -> bool:
        """Apply a report. Those of unknown workers and of other epochs are ignored.

        Returns False if the index then holds another number of the worker's blocks than the
        report states.
        """
        member = self._members.get(report.worker)
        if member is None or member.card.epoch != report.epoch:
            return True
        self.last_report_at = member.heard_at = self.clock()
        if report.evicted:
            self.index.evict(member.slot, split_hashes(report.evicted))
        if report.stored:
            self.index.store(member.slot, split_hashes(report.stored))
        for request_id in report.received:
            member.unnamed.pop(request_id, None)
        member.load = report.load
        self._refresh_speeds(member)
        self._refresh(member)
        if report.state != member.state or member.suspect_until:
            self.trust.reported(member)
            self._set_state(member, report.state)
            self._regroup(member.card.model)
            self.changed.send()
        self.room.send()
        known = self.index.count(member.slot) + self.index.dropped(member.slot)
        agrees = known == report.load.cached_blocks
        if isinstance(report.cold, ColdReport):
            agrees &= self.cold.apply(member.slot, report.cold, report.load)
        return agrees

    def on_gone(self, worker: str, reason: str) -> None:
        """Remove a worker. Its requests in flight end on their own."""
        member = self._members.pop(worker, None)
        if member is None:
            return
        slot = member.slot
        self.index.drop(slot)
        self.cold.drop(slot)
        self.coming.drop(slot)
        self.trust.reset(member)
        self._by_slot[slot] = None
        self._table.clear(slot)
        member.slot = -1
        member.unnamed.clear()
        self._regroup(member.card.model)
        self.changed.send()

    # Called by the gateway

    def models(self) -> dict[str, WorkerCard]:
        """Models that a ready worker serves, with the card that other workers must match."""
        return {
            name: group.reference
            for name, group in sorted(self.groups.by_model.items())
            if group.reference is not None
        }

    def known_models(self) -> list[str]:
        """Models of all workers, whatever their state."""
        return sorted(self.groups.by_model)

    def group(self, model: str) -> ModelGroup | None:
        """The workers of `model` that may serve now; None if no worker has that model."""
        self._expire()
        return self.groups.by_model.get(model)

    def candidates(
        self,
        model: str,
        chain: Sequence[bytes],
        prompt_tokens: int,
        excluded: Collection[str] = (),
    ) -> Candidates | None:
        """The workers that may serve a prompt; None if there is none.

        `chain` has the hashes of the prompt's full blocks; `excluded` names workers. A hit is
        at most `prompt_tokens - 1` tokens, in whole blocks: the last token is always computed.
        The load arrays may change with the next change of the fleet.
        """
        group = self.group(model)
        return None if group is None else self.candidates_of(group, chain, prompt_tokens, excluded)

    def candidates_of(
        self,
        group: ModelGroup,
        chain: Sequence[bytes],
        prompt_tokens: int,
        excluded: Collection[str] = (),
    ) -> Candidates | None:
        """`candidates` for a group that `group` has just returned."""
        if group.reference is None or not group.mask:
            return None
        slots, mask, run, columns = group.slots, group.mask, group.run, group.columns
        for worker in excluded:
            member = self._members.get(worker)
            if member is not None and mask >> member.slot & 1:
                mask ^= 1 << member.slot
                slots, run, columns = slots[slots != member.slot], None, None
        if not mask:
            return None
        block_size = group.reference.namespace.block_size
        # no slice of the chain, which would copy all its hashes
        reusable = min(len(chain), (prompt_tokens - 1) // block_size)
        hit_tokens, most = self._device_hits(chain, mask, reusable, block_size)
        cold = bool(self.cold)
        if cold:
            depths = hit_tokens // block_size
            hit_tokens += self.cold.credited_tokens(depths, chain, mask, reusable, block_size)
        if columns is None:
            columns = self._table.columns(slots, None)
        hits = hit_tokens[slots if run is None else run]
        traffic = group.traffic
        return Candidates(
            prompt_tokens=prompt_tokens,
            block_size=block_size,
            chain=chain,
            hit_tokens=hits,
            best_hit_tokens=int(hits.max()) if cold else most * block_size,
            columns=columns,
            stay_s=traffic.stay_s(self.clock()),
            in_flight=traffic.in_flight,
            sharing=self.coming.sharing(chain, most),
        )

    def device_depths(self, chain: Sequence[bytes], mask: int, limit: int) -> NDArray[np.int64]:
        """Leading blocks by slot (at most `limit`) that are on its device or coming there."""
        return self._device_hits(chain, mask, limit, 1)[0]

    def _device_hits(
        self, chain: Sequence[bytes], mask: int, limit: int, unit: int
    ) -> tuple[NDArray[np.int64], int]:
        """`device_depths` times `unit`, and the most blocks of any slot."""
        groups = self.index.ends(chain, mask, limit)
        depths = self._spread.array(groups, self._table.size, unit)
        most = self.coming.raise_depths(depths, groups, chain, mask, limit, unit)
        return depths, max(most, groups[0][0]) if groups else most

    def at(self, slot: int) -> Member:
        """The worker in `slot`. Raises LookupError if there is none."""
        member = self._by_slot[slot]
        if member is None:
            raise LookupError(f"no worker is in slot {slot}")
        return member

    def book(
        self,
        slot: int,
        request_id: str,
        chain: Sequence[bytes],
        prompt_tokens: int,
        hit_tokens: int,
    ) -> Booking:
        """Book a request at a worker, and claim its blocks as coming there, until `release`."""
        member = self.at(slot)
        self._serial += 1
        now, card = self.clock(), member.card
        traffic = self.groups.by_model[card.model].traffic
        new_tokens = prompt_tokens - hit_tokens if hit_tokens < prompt_tokens else 1
        booking = Booking(
            self._serial,
            member,
            traffic,
            request_id,
            new_tokens,
            prefill_pairs(prompt_tokens - new_tokens, prompt_tokens),
            -(-new_tokens // card.namespace.block_size),
            self.coming.claim(slot, chain, now),
        )
        traffic.come(now)
        self._bookings[booking.serial] = booking
        if member.unnamed.setdefault(request_id, booking) is booking:
            self._table.add_booking(slot, booking.new_tokens, booking.new_pairs, booking.new_blocks)
        else:  # another request with the same id: the later one counts
            member.unnamed[request_id] = booking
            self._table.put(slot, booked_of(member))
        self._refresh_wait(member)
        self.trust.booked(booking)
        member.routed += 1
        self.requests_total += 1
        return booking

    def release(self, booking: Booking) -> None:
        """The booking's response ended or failed. Idempotent."""
        if self._bookings.pop(booking.serial, None) is None:
            return
        booking.traffic.end()
        self.coming.end(booking.claim)
        member = booking.member
        if member.unnamed.get(booking.request_id) is booking:
            del member.unnamed[booking.request_id]
            if member.slot >= 0:
                self._table.put(member.slot, booked_of(member))
                self._refresh_wait(member)
        self.trust.released(booking)
        self.room.send()

    @property
    def in_flight(self) -> int:
        """Requests that were routed and have not ended."""
        return len(self._bookings)

    def members(self) -> list[Member]:
        """All workers, by name."""
        self._expire()
        return [self._members[name] for name in sorted(self._members)]

    def load_of(self, member: Member) -> Load:
        """A worker's load as policies see it: reported plus own requests not named yet."""
        row = dict(zip(ROWS, self._table.row(member.slot), strict=True))
        return msgspec.structs.replace(
            member.load,
            pending_prefill_tokens=row["pending_tokens"],
            running=row["running"],
            waiting=row["waiting"],
            free_blocks=row["free_blocks"],
            pending_prefill_pairs=row["pending_pairs"],
        )

    def columns_of(self, group: ModelGroup) -> Columns:
        """The load of the workers that may serve, at least one."""
        return group.columns or self._table.columns(group.slots, None)

    def least_wait_s(self, group: ModelGroup, priority: int) -> float:
        """The shortest expected wait of a request at any of the group's workers."""
        waits = self.columns_of(group).wait_s
        least = waits.item(waits.argmin())
        if least:
            members = [self.at(slot) for slot in group.slots.tolist()]
            if priority or any(member.load.waiting_by_priority for member in members):
                return min(self._urgent_wait_s(member, priority) for member in members)
        return least

    def _urgent_wait_s(self, member: Member, priority: int) -> float:
        """The expected wait of a request that overtakes those of higher numbers."""
        load, wait_s = member.load, self.wait_of(member)
        queued = load.waiting_by_priority or ((0, load.waiting),)
        ahead = sum(number for each, number in queued if each <= priority)
        if ahead == load.waiting:
            return wait_s
        return min(wait_s, (ahead + len(member.unnamed)) * load.start_interval_s)

    def wait_of(self, member: Member) -> float:
        """Expected seconds until a new request would start there."""
        return wait_s(member, *self._table.booked(member.slot))

    def refused(self) -> dict[str, str]:
        """Workers that do not match the others of their model, with the reason."""
        return {name: member.refused for name, member in self._members.items() if member.refused}

    def check(self) -> None:
        """Raise FleetCheckError, with figures, if the fleet contradicts itself."""
        self.index.check()
        self.cold.check()
        self.coming.check()
        for name, member in self._members.items():
            if self._by_slot[member.slot] is not member:
                raise FleetCheckError(f"slot {member.slot} is not {name}'s")
            row, wanted = self._table.row(member.slot), row_of(member)
            if row != wanted:
                raise FleetCheckError(f"{name}: row {row}, but report and bookings {wanted}")
            speeds, load = self._table.speeds[:, member.slot].tolist(), member.load
            if speeds != [*_speeds(load), wait_s(member, *wanted[:4])]:
                raise FleetCheckError(f"{name}: speeds {speeds}, but its report says {load}")
            for booking in member.unnamed.values():
                if self._bookings.get(booking.serial) is not booking:
                    raise FleetCheckError(f"{name} counts {booking.request_id}, which has ended")
        for slot, occupant in enumerate(self._by_slot):
            if occupant is None and (self.index.count(slot) or any(self._table.row(slot))):
                raise FleetCheckError(f"slot {slot} is free but not empty")
        for model, group in self.groups.by_model.items():
            serving = [m.slot for m in self._of(model) if m.serves]
            if (
                sorted(serving) != group.slots.tolist()
                or sum(1 << s for s in serving) != group.mask
            ):
                raise FleetCheckError(f"{model}: slots {serving} serve, kept {group.slots}")
            usable = [m for m in self._of(model) if m.usable]
            if not {m.slot for m in usable} >= {*serving} or bool(usable) != bool(serving):
                raise FleetCheckError(f"{model}: slots {serving} serve, usable {usable}")

    # Inner workings

    def _free_slot(self) -> int:
        for slot, occupant in enumerate(self._by_slot):
            if occupant is None:
                return slot
        self._by_slot.append(None)
        if len(self._by_slot) > self._table.size:
            self._table.grow()
            for model in list(self.groups.by_model):
                self._regroup(model)
        return len(self._by_slot) - 1

    def _begin_epoch(self, member: Member, card: WorkerCard) -> None:
        self.index.drop(member.slot)
        self.cold.drop(member.slot)
        self.coming.drop(member.slot)
        member.load = idle_load(card)
        self._refresh_speeds(member)
        self.trust.reset(member)
        if card.address != member.card.address:
            # another process: it did not receive the requests of the old one
            member.unnamed.clear()

    def _set_state(self, member: Member, state: WorkerState) -> None:
        if state == "ready" and member.state == "ready" and member.ready_serial:
            return
        member.state = state
        self._serial += 1
        member.ready_serial = self._serial if state == "ready" else 0

    def _expire(self) -> None:
        self.coming.expire(self.clock())
        self.trust.expire()

    def _refresh(self, member: Member) -> None:
        if member.slot >= 0:
            self._table.put(member.slot, row_of(member))
            self._refresh_wait(member)

    def _refresh_speeds(self, member: Member) -> None:
        self._table.put_speeds(member.slot, _speeds(member.load))

    def _refresh_wait(self, member: Member) -> None:
        self._table.put_wait(member.slot, wait_s(member, *self._table.booked(member.slot)))

    def _of(self, model: str) -> list[Member]:
        return [member for member in self._members.values() if member.card.model == model]

    def _regroup(self, model: str) -> None:
        members = self._of(model)
        self.trust.refresh(members)
        self.groups.put(model, members)


def _speeds(load: Load) -> tuple[float, float, float]:
    return load.prefill_s_per_token, load.prefill_s_per_pair, load.start_interval_s
