"""Which ready workers get no requests for now: suspects, and workers that fail requests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from router.failures import Failures
from router.member import Booking, Member
from router.signals import Signal
from router.suspects import Suspects

SUSPECT_S = 5.0
"""A suspect is one until its next sign of life, or for this time if none comes."""


class Trust:
    """Owns `suspect_until`, `suspect_why`, `avoided` and `failure_rate` of a fleet's members.

    members    of the fleet, by name
    regroup    forms the group of a model anew
    changed    sent when a worker becomes or stops being a suspect
    room       sent when one stops being a suspect
    clock      seconds, monotonic
    suspect_s  how long a suspect is one without a sign of life
    """

    def __init__(
        self,
        members: Mapping[str, Member],
        regroup: Callable[[str], None],
        changed: Signal,
        room: Signal,
        clock: Callable[[], float],
        suspect_s: float = SUSPECT_S,
    ) -> None:
        self.failures = Failures()
        self._members = members
        self._regroup = regroup
        self._changed = changed
        self._room = room
        self._clock = clock
        self._suspects = Suspects(suspect_s)
        self._newest = 0

    # Called by the request path

    def note(self, booking: Booking, *, failed: bool) -> None:
        """A booked request has succeeded or failed at its worker."""
        member = booking.member
        if member.slot >= 0 and (failed or self.failures):
            now, worker = self._clock(), member.card.worker
            self.failures.note(worker, booking.serial, self._newest, now, failed=failed)
            if member.avoided or self.failures.avoided(worker, now):
                self._regroup(member.card.model)

    def at_fault(self, worker: str) -> None:
        """The worker fails whatever it is sent."""
        if (member := self._members.get(worker)) is not None:
            self.failures.at_fault(worker, self._newest, self._clock())
            self._regroup(member.card.model)

    def forgive(self, worker: str) -> None:
        """The latest failure of the worker was the request's own."""
        if (member := self._members.get(worker)) is not None:
            self.failures.forgive(worker)
            self._regroup(member.card.model)

    def suspect(self, worker: str, why: str) -> bool:
        """A worker gets no requests until its next sign of life. Returns whether that is new.

        why   in words, such as "it refused a connection"
        """
        member = self._members.get(worker)
        if member is None:
            return False
        is_new = not member.suspect_until
        self._suspects.add(member, why, self._clock())
        if is_new:
            self._regroup(member.card.model)
            self._changed.send()
        return is_new

    def alive(self, worker: str) -> None:
        """A worker has given a sign of life."""
        member = self._members.get(worker)
        if member is not None and member.suspect_until:
            self._suspects.trust(member)
            self._regroup(member.card.model)
            self._changed.send()
            self._room.send()

    def next_return_s(self) -> float | None:
        """Seconds until the next suspect or avoided worker becomes a candidate again; None if there
        is none."""
        now = self._clock()
        waits = (self._suspects.next_return_s(now), self.failures.next_return_s(now))
        return min((wait for wait in waits if wait is not None), default=None)

    # Called by the fleet, which forms the groups anew where nothing else is said

    def booked(self, booking: Booking) -> None:
        """An attempt begins; forms the group anew if it is a trial of an avoided worker."""
        self._newest = booking.serial
        card = booking.member.card
        if self.failures and self.failures.began(card.worker, booking.serial):
            self._regroup(card.model)

    def released(self, booking: Booking) -> None:
        """An attempt has ended; forms the group anew if it was a trial."""
        card = booking.member.card
        if self.failures and self.failures.ended(card.worker, booking.serial):
            self._regroup(card.model)

    def reported(self, member: Member) -> None:
        """The worker is not a suspect any more."""
        self._suspects.trust(member)

    def reset(self, member: Member) -> None:
        """The worker begins an epoch or has left."""
        self._suspects.trust(member)
        self.failures.forget(member.card.worker)

    def expire(self) -> None:
        """Suspects and avoided workers whose time is up become candidates again."""
        if not (self._suspects or self.failures):
            return
        now = self._clock()
        for member in self._suspects.due(now):
            self._suspects.trust(member)
            self._regroup(member.card.model)
        for worker in self.failures.due(now):
            returning = self._members.get(worker)
            if returning is not None and returning.avoided:
                self._regroup(returning.card.model)

    def refresh(self, members: Iterable[Member]) -> None:
        """Set which of these members are avoided, and their failure rates."""
        if self.failures:
            now = self._clock()
            for member in members:
                member.avoided = self.failures.avoided(member.card.worker, now)
                member.failure_rate = self.failures.rate(member.card.worker)
        else:
            for member in members:
                member.avoided, member.failure_rate = "", 0.0
