"""The guard: detects a prefix that draws all traffic to its holders, and relieves them.

Source: the two-phase hotspot rule of LMetric, arXiv 2603.15202. A class is the requests that
share the same longest cached prefix; `x` is its share of the latest arrivals, `M` the workers that
hold all of that prefix. While the holders' share of the fleet covers the class's share of the
arrivals, `x / (1 − x) ≤ |M| / (n − |M|)`, following the prefix is safe.

    phase 1   it does not cover it: alarm
    phase 2   after 2 |M| consecutive requests of the class that would still choose a holder,
              the next one excludes the holders. The worker that serves it then holds the prefix
              too, so M grows until it covers the class.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable

import msgspec
import numpy as np

from router.policies.base import BoolArray, Candidates

WINDOW_ARRIVALS = 256
"""Latest arrivals of which a class's share is measured."""


class HotspotState(msgspec.Struct):
    """arrivals   classes of the latest requests, None for those without a hit
    counts     how often each class is among them
    stubborn   class in alarm -> its consecutive requests that would have chosen a holder
    """

    arrivals: deque[bytes | None] = msgspec.field(default_factory=deque)
    counts: Counter[bytes] = msgspec.field(default_factory=Counter)
    stubborn: dict[bytes, int] = msgspec.field(default_factory=dict)


def covers(held: int, workers: int, mine: int, arrivals: int) -> bool:
    """Whether `held` holders of a prefix among `workers` suffice for `mine` requests that share
    it among `arrivals`: `x / (1 − x) ≤ |M| / (n − |M|)`, without the divisions."""
    return mine * workers <= arrivals * held


def left_out(
    candidates: Candidates, state: HotspotState, choose: Callable[[], int]
) -> BoolArray | None:
    """The workers to leave out for this request (`[n]`); None for none.

    `choose` returns the entry that the policy would choose; it is called only in an alarm.
    """
    best = candidates.best_hit_tokens
    place = min(best // candidates.block_size, len(candidates.chain))
    prefix = candidates.chain[place - 1] if place else None
    _arrive(state, prefix)
    if prefix is None:
        return None
    holders: BoolArray = candidates.hit_tokens == best
    n, held = len(holders), int(np.count_nonzero(holders))
    if covers(held, n, state.counts[prefix], len(state.arrivals)):
        state.stubborn.pop(prefix, None)
        return None
    if not holders[choose()]:
        state.stubborn[prefix] = 0
        return None
    before = state.stubborn.get(prefix, 0)
    if before < 2 * held:
        state.stubborn[prefix] = before + 1
        return None
    state.stubborn[prefix] = 0
    return holders


def _arrive(state: HotspotState, prefix: bytes | None) -> None:
    state.arrivals.append(prefix)
    if prefix is not None:
        state.counts[prefix] += 1
    if len(state.arrivals) > WINDOW_ARRIVALS:
        old = state.arrivals.popleft()
        if old is not None:
            state.counts[old] -= 1
            if not state.counts[old]:
                del state.counts[old]
                state.stubborn.pop(old, None)
