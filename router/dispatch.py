"""One decision: look up hits and load, let the policy choose, book the chosen worker."""

from __future__ import annotations

import random
import time
from collections.abc import Collection
from math import inf

import msgspec

from router.explaining import Explanation, explain, reason_of
from router.fleet import Fleet
from router.member import Booking
from router.metrics import Metrics
from router.policies import Candidates, Decision, Policy, only_with_room
from router.recent_decisions import RecentDecisions
from router.shadow import Shadows
from router.tokenization import Prompt


class Placement(msgspec.Struct, frozen=True, eq=False):
    """The worker of a request, and what the decision was based on."""

    worker: str
    address: str
    policy: str
    predicted_hit_tokens: int
    booking: Booking
    candidates: Candidates
    decision: Decision


class NoRoom(Exception):
    """Workers are ready, but none has room."""


class TooSlow(Exception):
    """No worker is expected to have the first token in time.

    expected_s   when the quickest would have it
    prefill_s    of that, the prefill of the prompt itself
    """

    def __init__(self, expected_s: float, prefill_s: float) -> None:
        super().__init__(expected_s, prefill_s)
        self.expected_s = expected_s
        self.prefill_s = prefill_s


class Dispatcher:
    """Decides with the current policy. Owns the policy's state and the random numbers.

    holds_back   requests wait until a worker has room for their prompt. Otherwise they are sent to
                 a worker that has any free block, and wait there
    recent       stores the decisions of requests that asked for it
    """

    def __init__(
        self,
        fleet: Fleet,
        policy: Policy,
        metrics: Metrics,
        rng: random.Random | None = None,
        shadows: Shadows | None = None,
        recent: RecentDecisions | None = None,
        *,
        holds_back: bool = False,
    ) -> None:
        self.fleet = fleet
        self.policy = policy
        self.shadows = shadows or Shadows([])
        self.recent = RecentDecisions() if recent is None else recent
        self._holds_back = holds_back
        self._metrics = metrics
        self._rng = rng or random.Random()

    def place(
        self,
        model: str,
        prompt: Prompt,
        request_id: str,
        excluded: Collection[str] = (),
        *,
        wait_limit_s: float = inf,
        within_s: float = inf,
    ) -> Placement | None:
        """Choose a worker and book the request there; None if no worker may serve it, or if the
        workers that the prompt was hashed for have been replaced.

        The caller releases the booking. `excluded` names workers that were tried already. Workers
        with a longer expected wait than `wait_limit_s` are left out unless all are such.
        Raises NoRoom if there are workers, but none has room; a retry is placed without room.
        Raises TooSlow if none is expected to have the first token `within_s` seconds.
        """
        began = time.perf_counter()
        fleet, policy = self.fleet, self.policy
        group = fleet.group(model)
        if group is None or group.reference is None:
            return None
        if group.reference.namespace != prompt.namespace:
            return None  # the workers that it was hashed for have been replaced
        chain, tokens = prompt.chain, prompt.tokens
        everybody = fleet.candidates_of(group, chain, tokens, excluded)
        if everybody is None:
            return None
        candidates = only_with_room(everybody, holds_back=self._holds_back)
        if candidates is None:
            if not excluded:
                raise NoRoom
            candidates = everybody  # a retry does not wait here, but at its worker
        if wait_limit_s < inf:
            candidates = _that_start(candidates, wait_limit_s)
        if within_s < inf:
            candidates = _in_time(candidates, within_s)
        decision = policy.choose(candidates, self._rng)
        if request_id in self.recent.wanted:  # before the booking changes the load that is shown
            self.recent.keep(
                fleet, group, request_id, prompt, policy.name, candidates, decision, excluded
            )
        slot = candidates.columns.slots.item(decision.chosen)
        hit_tokens = candidates.hit_tokens.item(decision.chosen)
        booking = fleet.book(slot, request_id, chain, tokens, hit_tokens)
        card = booking.member.card
        reason = reason_of(candidates, decision)
        self._metrics.decisions.note(policy.name, reason, time.perf_counter() - began)
        if self.shadows.arms and not excluded:  # a retry is the same request
            self.shadows.observe(fleet, request_id, everybody, slot)
        return Placement(
            card.worker, card.address, policy.name, hit_tokens, booking, candidates, decision
        )

    def explain(self, model: str, kind: str, prompt: Prompt) -> Explanation:
        """What `place` would decide now for this prompt, without a booking."""
        return explain(
            self.fleet,
            self.policy,
            self._rng,
            model=model,
            kind=kind,
            chain=prompt.chain,
            prompt_tokens=prompt.tokens,
            holds_back=self._holds_back,
        )

    def ended(self, request_id: str, placement: Placement | None) -> None:
        """The request is over: release its booking, and tell shadows and recent decisions."""
        if placement is not None:
            self.fleet.release(placement.booking)
        self.shadows.ended(request_id)
        self.recent.ended(request_id)


def _that_start(candidates: Candidates, limit_s: float) -> Candidates:
    """The candidates with an expected wait of at most `limit_s`; all if there is none."""
    waits = candidates.columns.wait_s
    if waits.item(waits.argmax()) <= limit_s:
        return candidates
    kept = waits <= limit_s
    return candidates.only(kept) if kept.any() else candidates


def _in_time(candidates: Candidates, within_s: float) -> Candidates:
    """The candidates that are expected to have the first token in time. Raises TooSlow."""
    columns, prompt, new = candidates.columns, candidates.prompt_tokens, candidates.new_tokens
    pairs = (prompt * prompt - (prompt - new) ** 2) // 2  # `prefill_pairs`
    prefill_s = new * columns.s_per_token + pairs * columns.s_per_pair
    expected_s = columns.wait_s + prefill_s
    kept = expected_s <= within_s
    if not kept.any():
        best = int(expected_s.argmin())
        raise TooSlow(expected_s.item(best), prefill_s.item(best))
    return candidates if kept.all() else candidates.only(kept)
