"""Whether a worker's reports agree with the index, and when to read its block set again.

Every report contains the number of blocks that the worker caches. If the index holds another
number, the router reads the whole set, which corrects anything that was lost on the way. If reading
does not help, because the worker does not publish what it caches, the worker disagrees. Reads that
bring nothing, because Redis has lost the worker or is behind, become rare without blaming it.

    reads asked for in a row          1   2   3   4   5   6   7    8 and more
    pause before the next, s          0   0   1   2   4   8   16   30

    sets read that did not help       1   2   3 and more
    said to disagree                          yes
"""

from __future__ import annotations

UNHELPED_READS = 3
"""Reads in a row after which a worker is said to disagree. One read mends what a router lost. A
second and third are needed at most where Redis itself is being filled again meanwhile."""

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0
"""A set that did drift besides is mended after so long at the latest."""


class Agreement:
    """Of one worker's reports with what a follower knows of it.

    unhelped   whole sets read in a row after which a report still disagreed
    """

    __slots__ = ("_asked", "_due_at", "_was_read", "unhelped")

    def __init__(self) -> None:
        self.unhelped = 0
        self._asked = 0  # reads in a row, whatever they brought
        self._was_read = False
        self._due_at = 0.0

    @property
    def broken(self) -> bool:
        """Whether reading does not help."""
        return self.unhelped >= UNHELPED_READS

    def read(self) -> None:
        """The worker's whole set was read."""
        self._was_read = True

    def judge(self, agrees: bool, now: float) -> None:
        """A report was compared with what was known right after it. `now`: seconds."""
        if agrees:
            self.unhelped = self._asked = 0
            self._due_at = now
        elif self._was_read:
            self.unhelped += 1
        self._was_read = False

    def wants_read(self, now: float) -> bool:
        """Whether to ask for the set of a worker that has just disagreed."""
        return now >= self._due_at

    def asked(self, now: float) -> None:
        """The worker's set is asked for; Redis may have none, or an old one."""
        self._asked += 1
        self._due_at = now + _pause_s(self._asked)


def _pause_s(asked: int) -> float:
    beyond = asked - UNHELPED_READS
    if beyond < 0:
        return 0.0
    return min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(beyond, 30))
