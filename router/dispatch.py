"""One decision: look up hits and load, let the policy choose, book the choice."""

from __future__ import annotations

import random
import time
from collections.abc import Collection
from typing import NamedTuple

from router.explaining import Explanation, explain, reason_of
from router.fleet import Fleet
from router.member import Booking
from router.metrics import Metrics
from router.policies import Candidates, Decision, Policy
from router.shadow import Shadows
from router.tokenization import Prompt


class Placement(NamedTuple):
    """Where a request goes, and what was known when that was decided."""

    worker: str
    address: str
    policy: str
    predicted_hit_tokens: int
    booking: Booking
    candidates: Candidates
    decision: Decision


class Dispatcher:
    """Decides with the policy of the moment; the owner of policy state and chance."""

    def __init__(
        self,
        fleet: Fleet,
        policy: Policy,
        metrics: Metrics,
        rng: random.Random | None = None,
        shadows: Shadows | None = None,
    ) -> None:
        self.fleet = fleet
        self.policy = policy
        self.shadows = shadows or Shadows([])
        self._metrics = metrics
        self._rng = rng or random.Random()

    def place(
        self, model: str, prompt: Prompt, request_id: str, excluded: Collection[str] = ()
    ) -> Placement | None:
        """Choose a worker and book the request there; None where no worker may serve it.

        The caller releases the booking. `excluded` names workers that were tried already.
        """
        began = time.perf_counter()
        fleet, policy = self.fleet, self.policy
        group = fleet.group(model)
        if (
            group is None
            or group.reference is None
            or group.reference.namespace != prompt.namespace  # hashed for workers now replaced
        ):
            return None
        candidates = fleet.candidates(model, prompt.chain, prompt.tokens, excluded)
        if candidates is None:
            return None
        decision = policy.choose(candidates, self._rng)
        slot = int(candidates.slots[decision.chosen])
        hit_tokens = int(candidates.hit_tokens[decision.chosen])
        booking = fleet.book(slot, request_id, prompt.chain, prompt.tokens, hit_tokens)
        card = booking.member.card
        reason = reason_of(candidates, decision.chosen)
        self._metrics.decisions.labels(policy.name, reason).inc()
        self._metrics.decision_seconds.observe(time.perf_counter() - began)
        if not excluded:  # a second attempt is the same request
            self.shadows.observe(fleet, request_id, prompt.chain, candidates, decision.chosen)
        return Placement(
            card.worker, card.address, policy.name, hit_tokens, booking, candidates, decision
        )

    def explain(self, model: str, kind: str, prompt: Prompt) -> Explanation:
        """What `place` would do now with this prompt, without doing it."""
        return explain(
            self.fleet,
            self.policy,
            self._rng,
            model=model,
            kind=kind,
            chain=prompt.chain,
            prompt_tokens=prompt.tokens,
        )
