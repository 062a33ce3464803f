"""The slowest requests of a replay, tracked while it runs."""

from __future__ import annotations

from collections.abc import Iterator

from loadgen.outcomes import Outcome

WORST = 5
"""So many of an arm are shown, and known of each replay."""


class Slowest:
    """Is told every outcome of one replay, keeps the slowest."""

    def __init__(self) -> None:
        self._found: list[Outcome] = []

    def add(self, outcome: Outcome) -> bool:
        """A request has ended; whether it is one of the slowest now."""
        found = self._found
        if len(found) == WORST and slowness(outcome) <= slowness(found[-1]):
            return False
        found.append(outcome)
        found.sort(key=slowness, reverse=True)
        del found[WORST:]
        return True

    def __iter__(self) -> Iterator[Outcome]:
        return iter(list(self._found))


def slowness(outcome: Outcome) -> tuple[float, str]:
    """By first token, then by id; a request that has no first token is slower than all others."""
    return (float("inf") if outcome.ttft_ms is None else outcome.ttft_ms, outcome.id)
