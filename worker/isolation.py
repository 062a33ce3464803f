"""Recompute a failed batch in halves, to find the items that cannot be computed."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from worker.batch import BatchItem, Runner, check_sampled


class Isolated(NamedTuple):
    """Result per item of a batch, by its index.

    sampled   as `Runner.execute` returns; None for an item that was not computed
    failed    items that fail alone, with their exceptions
    starved   items that do not fit in memory, even alone
    """

    sampled: list[int | None]
    failed: dict[int, Exception]
    starved: dict[int, MemoryError]

    @property
    def computed(self) -> int:
        """Items that were computed."""
        return len(self.sampled) - len(self.failed) - len(self.starved)


def isolate(runner: Runner, batch: list[BatchItem]) -> Isolated:
    """Compute the items of a batch that can be computed, after the runner raised.

    Halving costs at most 2 * log2(n) + 1 runs per failing item of n. It changes no answer: an item
    writes only its own KV slots, with the same values each time, and its sampled token depends on
    its request alone. A prefill chunk that does not fit in memory is halved too.
    """
    found = Isolated([None] * len(batch), {}, {})
    _compute(runner, batch, 0, found)
    return found


def _compute(runner: Runner, items: list[BatchItem], first: int, found: Isolated) -> None:
    """Compute items [first, first + len(items)) of the batch, at once or in halves."""
    try:
        sampled = runner.execute(items)
        check_sampled(items, sampled, 0)
    except Exception as error:
        if len(items) > 1:
            middle = len(items) // 2
            _compute(runner, items[:middle], first, found)
            _compute(runner, items[middle:], first + middle, found)
        elif not isinstance(error, MemoryError):
            found.failed[first] = error
        elif len(items[0].token_ids) > 1:
            for part in _halves(items[0]):
                if first not in found.starved and first not in found.failed:
                    _compute(runner, [part], first, found)
        else:
            found.starved[first] = error
    else:
        found.sampled[first : first + len(items)] = sampled


def _halves(item: BatchItem) -> tuple[BatchItem, BatchItem]:
    """The same tokens in two items; only the second one samples."""
    middle = len(item.token_ids) // 2
    return (
        replace(item, token_ids=item.token_ids[:middle], sample=False),
        replace(item, token_ids=item.token_ids[middle:], start=item.start + middle),
    )
