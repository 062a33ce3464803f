"""Workers that refused a connection: left out until their next report, or until time is up."""

from __future__ import annotations

from router.member import Member


class Suspects:
    """A suspect's `suspect_until` is set; whoever is trusted has 0 there."""

    def __init__(self, for_s: float) -> None:
        self._for_s = for_s
        self._members: set[Member] = set()

    def add(self, member: Member, now: float) -> None:
        """The worker refused a connection."""
        member.suspect_until = now + self._for_s
        self._members.add(member)

    def trust(self, member: Member) -> None:
        """It is none any more, or never was one."""
        member.suspect_until = 0.0
        self._members.discard(member)

    def due(self, now: float) -> list[Member]:
        """Those whose time is up. They stay suspects until they are trusted."""
        if not self._members:
            return []
        return [member for member in self._members if member.suspect_until <= now]

    def next_return_s(self, now: float) -> float | None:
        """Seconds until the time of one is up; None where there is none."""
        if not self._members:
            return None
        return max(0.0, min(member.suspect_until for member in self._members) - now)
