"""Stores the latest decisions on requests that ask for it (`x-stemroute-explain: 1`).

A decision is recorded before it is booked, because the fleet that it saw changes right after. Of
many workers, only the relevant ones are recorded, so that a table is bounded. Other requests cost
one dictionary look-up.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

import msgspec
import numpy as np
from msgspec import structs

from router.explaining import explanation_of
from router.fleet import Fleet
from router.member import ModelGroup
from router.policies import Candidates, Decision
from router.tokenization import Prompt

MOST_DECISIONS = 4096
"""Most decisions of ended requests; those in flight come on top. Some 300 bytes per worker each."""

MOST_WORKERS = 16
"""Most candidates in a table: the chosen one, the largest hit, then the cheapest; and as many
workers that are left out."""


class RecentDecisions:
    """Decisions by request id, as JSON of `router.explaining.Explanation`.

    most     most decisions of ended requests
    wanted   request id -> kind ("chat", "completion") of requests in flight that asked for it
    """

    def __init__(self, most: int = MOST_DECISIONS) -> None:
        self.wanted: dict[str, str] = {}
        self._most = most
        self._kept: dict[str, bytes] = {}
        self._ended: deque[str] = deque()

    def __len__(self) -> int:
        return len(self._kept)

    def want(self, request_id: str, kind: str) -> None:
        """Record the decisions on the request until the caller calls `ended`."""
        self.wanted[request_id] = kind

    def ended(self, request_id: str) -> None:
        """The request is over: its decision stays until `most` others have ended."""
        if self.wanted.pop(request_id, None) is None or request_id not in self._kept:
            return
        self._ended.append(request_id)
        if len(self._ended) > self._most:
            del self._kept[self._ended.popleft()]

    def find(self, request_id: str) -> bytes | None:
        """The latest decision on the request; None if none is stored."""
        return self._kept.get(request_id)

    def keep(
        self,
        fleet: Fleet,
        group: ModelGroup,
        request_id: str,
        prompt: Prompt,
        policy: str,
        candidates: Candidates,
        decision: Decision,
        tried: Collection[str],
    ) -> None:
        """Record a decision on a wanted request before it is booked.

        `group` has the workers of the model, `candidates` those of them that may serve, `tried`
        those that the request was sent to before.
        """
        out = _others(group.slots.tolist(), candidates.columns.slots.tolist())
        shown, chosen = _shown(candidates, decision)
        beyond = (
            len(candidates.hit_tokens) - len(shown.hit_tokens) + max(0, len(out) - MOST_WORKERS)
        )
        slots = [*shown.columns.slots.tolist(), *out[:MOST_WORKERS]]
        assert group.reference is not None, "it has candidates"
        explanation = explanation_of(
            fleet,
            [fleet.at(slot) for slot in slots],
            shown,
            chosen,
            policy=policy,
            model=group.reference.model,
            kind=self.wanted[request_id],
            chain=prompt.chain,
            prompt_tokens=prompt.tokens,
            tried=tried,
            others=beyond,
        )
        self._kept[request_id] = msgspec.json.encode(explanation)


def _others(everybody: list[int], some: list[int]) -> list[int]:
    if len(everybody) == len(some):
        return []
    known = set(some)
    return [slot for slot in everybody if slot not in known]


def _shown(candidates: Candidates, decision: Decision) -> tuple[Candidates, Decision]:
    """The candidates that get a row, and the decision among them."""
    count = len(candidates.hit_tokens)
    if count <= MOST_WORKERS:
        return candidates, decision
    kept = np.zeros(count, dtype=np.bool_)
    kept[decision.chosen] = kept[int(candidates.hit_tokens.argmax())] = True
    rest = np.argsort(decision.costs, kind="stable")
    rest = rest[~kept[rest]]
    kept[rest[: MOST_WORKERS - np.count_nonzero(kept)]] = True
    chosen = int(np.count_nonzero(kept[: decision.chosen]))
    costs = decision.costs[kept]
    return candidates.only(kept), structs.replace(decision, chosen=chosen, costs=costs)
