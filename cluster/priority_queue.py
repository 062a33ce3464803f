"""A queue in order of priority, then of arrival."""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict
from collections.abc import Iterator
from itertools import chain
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class PriorityQueue(Generic[K, V]):
    """Values by key. Lower priorities are first. O(1) for few priorities."""

    def __init__(self) -> None:
        self._levels: dict[int, OrderedDict[K, V]] = {}
        self._order: list[int] = []  # priorities with values, sorted
        self._priority_of: dict[K, int] = {}

    def add(self, key: K, value: V, priority: int, *, first: bool = False) -> None:
        """Append behind all of its priority, or put it before them if it is to be `first`."""
        level = self._levels.get(priority)
        if level is None:
            level = self._levels[priority] = OrderedDict()
            insort(self._order, priority)
        level[key] = value
        if first:
            level.move_to_end(key, last=False)
        self._priority_of[key] = priority

    def __delitem__(self, key: K) -> None:
        priority = self._priority_of.pop(key)
        level = self._levels[priority]
        del level[key]
        if not level:
            del self._levels[priority]
            self._order.remove(priority)

    def __getitem__(self, key: K) -> V:
        return self._levels[self._priority_of[key]][key]

    def get(self, key: K) -> V | None:
        """The value, or None."""
        priority = self._priority_of.get(key)
        return None if priority is None else self._levels[priority][key]

    def __contains__(self, key: object) -> bool:
        return key in self._priority_of

    def __len__(self) -> int:
        return len(self._priority_of)

    def __iter__(self) -> Iterator[K]:
        return chain.from_iterable(self._levels[priority] for priority in self._order)

    def up_to(self, priority: int) -> int:
        """How many values a new one of this priority would come after."""
        return sum(len(self._levels[each]) for each in self._order if each <= priority)

    def by_priority(self) -> list[tuple[int, int]]:
        """Each priority with values, in order, and their number."""
        return [(each, len(self._levels[each])) for each in self._order]

    def keys(self) -> set[K]:
        """All keys."""
        return set(self._priority_of)

    def values(self) -> Iterator[V]:
        """All values in order. Do not change the queue meanwhile."""
        return chain.from_iterable(self._levels[each].values() for each in self._order)

    def clear(self) -> None:
        """Remove all."""
        self._levels.clear()
        self._order.clear()
        self._priority_of.clear()
