"""Where a follower stands in the reports of one worker, and what that makes of the next report."""

from __future__ import annotations

from enum import Enum


class Verdict(Enum):
    """What to do with a report."""

    APPLY = "apply"
    IGNORE = "ignore"
    SNAPSHOT = "snapshot"


class Tracker:
    """Where a follower stands with one worker: epoch and sequence of what it knows.

    Epochs only grow. Within an epoch reports apply in order without holes; whatever else
    happens (a lost, late or repeated report, a later epoch) ends in APPLY of the next report in
    line, IGNORE of an old one, or SNAPSHOT.
    """

    def __init__(self) -> None:
        self.epoch = -1
        self.sequence = 0
        self.gaps = 0

    def snapshot(self, epoch: int, sequence: int) -> bool:
        """A whole set was read. False where it is older than what is known: drop it."""
        if (epoch, sequence) < (self.epoch, self.sequence):
            return False
        self.epoch, self.sequence = epoch, sequence
        return True

    def offer(self, epoch: int, sequence: int, *, resync: bool) -> Verdict:
        """Judge a report; APPLY also takes note of it."""
        if epoch < self.epoch or (epoch == self.epoch and sequence <= self.sequence):
            return Verdict.IGNORE
        if epoch > self.epoch:
            return Verdict.SNAPSHOT
        if sequence == self.sequence + 1 and not resync:
            self.sequence = sequence
            return Verdict.APPLY
        self.gaps += sequence != self.sequence + 1
        return Verdict.SNAPSHOT
