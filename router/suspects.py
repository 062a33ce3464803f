"""Suspects: workers that seem out of reach, until their next sign of life or a time limit."""

from __future__ import annotations

from router.member import Member


class Suspects:
    """The suspects of a fleet. A member's `suspect_until` is 0 if it is not a suspect."""

    def __init__(self, for_s: float) -> None:
        self._for_s = for_s
        self._members: set[Member] = set()

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._members)

    def add(self, member: Member, why: str, now: float) -> None:
        """The worker seems out of reach, or does not take requests."""
        member.suspect_until = now + self._for_s
        member.suspect_why = why
        self._members.add(member)

    def trust(self, member: Member) -> None:
        """The worker is not a suspect any more. Idempotent."""
        member.suspect_until = 0.0
        self._members.discard(member)

    def due(self, now: float) -> list[Member]:
        """Suspects whose time is up. They stay suspects until `trust`."""
        return [member for member in self._members if member.suspect_until <= now]

    def next_return_s(self, now: float) -> float | None:
        """Seconds until the time of the first suspect is up; None if there is none."""
        if not self._members:
            return None
        return max(0.0, min(member.suspect_until for member in self._members) - now)
