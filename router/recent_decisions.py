"""The latest decisions whose requests asked to be explained (`x-stemroute-explain: 1`).

A decision is written down when it is taken, before it is booked: what it saw changes with the
fleet right after. Of many workers only those that matter are written, so that a table has a bound.
Requests that do not ask cost one look into a dictionary.
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
"""Of requests that have ended; those of others are kept as well. Some 300 bytes a worker each."""

MOST_WORKERS = 16
"""In a table: the chosen one, the one that holds most, then the cheapest; and as many left out."""


class RecentDecisions:
    """By request id, as JSON of `router.explaining.Explanation`.

    most     decisions of ended requests that are kept
    wanted   request id -> kind ("chat", "completion"), of those that go on and asked for it
    """

    def __init__(self, most: int = MOST_DECISIONS) -> None:
        self.wanted: dict[str, str] = {}
        self._most = most
        self._kept: dict[str, bytes] = {}
        self._ended: deque[str] = deque()

    def __len__(self) -> int:
        return len(self._kept)

    def want(self, request_id: str, kind: str) -> None:
        """Keep what will be decided on the request. The caller tells when it has `ended`."""
        self.wanted[request_id] = kind

    def ended(self, request_id: str) -> None:
        """The request is over: its decision stays until so many others have ended."""
        if self.wanted.pop(request_id, None) is None or request_id not in self._kept:
            return
        self._ended.append(request_id)
        if len(self._ended) > self._most:
            del self._kept[self._ended.popleft()]

    def find(self, request_id: str) -> bytes | None:
        """The latest decision on the request, None where none is kept."""
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
        """Write a decision on a wanted request down, before it is booked.

        `group` are the workers of the model, of which `candidates` may leave some out; `tried`
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
    """The candidates that are worth a row, and the decision among them."""
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
