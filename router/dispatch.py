"""One decision: look up hits and load, let the policy choose, book the chosen worker."""

from __future__ import annotations

import random
import time
from collections.abc import Collection

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
        self, model: str, prompt: Prompt, request_id: str, excluded: Collection[str] = ()
    ) -> Placement | None:
        """Choose a worker and book the request there; None if no worker may serve it, or if the
        workers that the prompt was hashed for have been replaced.

        The caller releases the booking. `excluded` names workers that were tried already.
        Raises NoRoom if there are workers, but none has room; a retry is placed without room.
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
