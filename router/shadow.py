"""Shadow policies: what other policies would have done with the live traffic.

The real caches are the result of the live policy's choices, so they say nothing about another
policy. Therefore each shadow models every worker's cache (LRU, as many blocks as the worker has)
and load: pending prefill, requests, and the blocks that these take. Both follow the shadow's own
choices, and so does which workers are full. The arm `live` replays the real choices with the same
model. Compare shadows with it, not with the workers' own figures, which include the blocks of
outputs.

A shadow takes from reality: which workers may serve, their size and measured speed, when the first
byte of a response arrived (its prefill is done), when it ended, and how long requests stay.
"""

from __future__ import annotations

import math
import random
from collections import Counter as Tally
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from msgspec import structs

from cluster.protocol import prefill_pairs
from router.coming import Claim, ComingBlocks
from router.fleet import Fleet
from router.policies import Candidates, Policy, PolicyError, only_with_room, parse_policy
from router.prefix_index import PrefixIndex

MAX_BLOCKS = 200_000
"""Most blocks in the cache models of one shadow (about 300 bytes each). If the workers have more in
total, each model is smaller than its worker's cache."""

LIVE = "live"
"""Name of the arm that replays the real choices."""


class ShadowView(msgspec.Struct, frozen=True, kw_only=True):
    """What one arm would have done since the start.

    agreed            requests that it would have sent to the same worker
    hit_tokens        prompt tokens that would have been reused
    computed_tokens   worker -> prompt tokens that it would have computed
    requests_to       worker -> requests that it would have received
    imbalance         most computed tokens of a worker / mean over all workers seen
    """

    policy: str
    requests: int
    agreed: int
    prompt_tokens: int
    hit_tokens: int
    hit_ratio: float
    imbalance: float
    computed_tokens: dict[str, int]
    requests_to: dict[str, int]


class _Counts(msgspec.Struct):
    """The counts of a ShadowView."""

    requests: int = 0
    agreed: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    computed_tokens: Tally[str] = msgspec.field(default_factory=Tally)
    requests_to: Tally[str] = msgspec.field(default_factory=Tally)

    def add(self, other: ShadowView) -> None:
        self.requests += other.requests
        self.agreed += other.agreed
        self.prompt_tokens += other.prompt_tokens
        self.hit_tokens += other.hit_tokens
        self.computed_tokens.update(other.computed_tokens)
        self.requests_to.update(other.requests_to)

    def view(self, policy: str) -> ShadowView:
        computed = self.computed_tokens
        mean = computed.total() / len(computed) if computed else 0.0
        return ShadowView(
            policy=policy,
            requests=self.requests,
            agreed=self.agreed,
            prompt_tokens=self.prompt_tokens,
            hit_tokens=self.hit_tokens,
            hit_ratio=self.hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0,
            imbalance=max(computed.values()) / mean if mean else 1.0,
            computed_tokens=dict(sorted(computed.items())),
            requests_to=dict(sorted(self.requests_to.items())),
        )


def sum_of_views(views: Sequence[ShadowView]) -> ShadowView:
    """Merge the views of one policy at several gateways, at least one."""
    counts = _Counts()
    for view in views:
        counts.add(view)
    return counts.view(views[0].policy)


class _Placed(NamedTuple):
    """A request at a modelled worker: the blocks that it takes, and its pending prefill.

    own_blocks   blocks of its prompt beyond the full ones of `claim`, which cannot be shared
    """

    claim: Claim
    own_blocks: int
    pending_tokens: int
    pending_pairs: int


class _Ghost(msgspec.Struct, eq=False):
    """An arm's model of one worker in one epoch.

    cached        its blocks, least recently used first; parents are newer than their children, so
                  that the set stays prefix-closed when old blocks are dropped
    unfinished    its requests; the other numbers are sums over them
    computing     requests whose prefill is not done; they have the pending tokens and pairs
    claimed       full blocks of all requests; shared ones count once
    own_blocks    other blocks of all requests
    """

    worker: str
    epoch: int
    cached: dict[bytes, None] = msgspec.field(default_factory=dict)
    unfinished: dict[str, _Placed] = msgspec.field(default_factory=dict)
    computing: int = 0
    pending_tokens: int = 0
    pending_pairs: int = 0
    claimed: ComingBlocks = msgspec.field(default_factory=lambda: ComingBlocks(math.inf))
    own_blocks: int = 0

    @property
    def taken_blocks(self) -> int:
        """KV blocks that its requests take."""
        return len(self.claimed) + self.own_blocks

    def place(
        self, request_id: str, chain: Sequence[bytes], own: int, hit: int, prompt: int
    ) -> None:
        """Add a request of `prompt` tokens, `hit` of them cached, with the blocks of `chain` and
        `own` more."""
        pending, pairs = prompt - hit, prefill_pairs(hit, prompt)
        claim = self.claimed.claim(0, chain, 0.0)
        self.unfinished[request_id] = _Placed(claim, own, pending, pairs)
        self.own_blocks += own
        self.computing += 1
        self.pending_tokens += pending
        self.pending_pairs += pairs

    def began(self, request_id: str) -> None:
        """The prefill of the request is done."""
        placed = self.unfinished[request_id]
        if placed.pending_tokens:
            self.computing -= 1
            self.pending_tokens -= placed.pending_tokens
            self.pending_pairs -= placed.pending_pairs
            self.unfinished[request_id] = placed._replace(pending_tokens=0, pending_pairs=0)

    def ended(self, request_id: str) -> None:
        """The request has ended."""
        self.began(request_id)
        placed = self.unfinished.pop(request_id)
        self.own_blocks -= placed.own_blocks
        self.claimed.end(placed.claim)
        self.claimed.expire(0.0)

    def check(self) -> None:
        """Raise AssertionError if the sums do not match the unfinished requests."""
        there = self.unfinished.values()
        sums = (
            sum(placed.pending_tokens > 0 for placed in there),
            sum(placed.pending_tokens for placed in there),
            sum(placed.pending_pairs for placed in there),
            len({block for placed in there for block in placed.claim.chain})
            + sum(placed.own_blocks for placed in there),
        )
        kept = self.computing, self.pending_tokens, self.pending_pairs, self.taken_blocks
        if kept != sums:
            raise AssertionError(f"{self.worker}: {kept} kept, but its requests make {sums}")


class Arm:
    """One policy with its own models of the workers. `policy` None replays the real choices."""

    def __init__(self, name: str, policy: Policy | None, rng: random.Random) -> None:
        self.name = name
        self._policy = policy
        self._rng = rng
        self._ghosts: dict[int, _Ghost] = {}
        self._index = PrefixIndex()
        self._at: dict[str, _Ghost] = {}
        self._counts = _Counts()

    def observe(self, fleet: Fleet, request_id: str, candidates: Candidates, sent_to: int) -> None:
        """A request was sent to slot `sent_to` of `candidates`: place it as this arm would."""
        self.ended(request_id)  # another request with the same id: the later one counts
        slots: list[int] = candidates.columns.slots.tolist()
        ghosts = [self._ghost(fleet, slot) for slot in slots]
        mine = self._as_seen(candidates, slots, ghosts)
        slot = sent_to if self._policy is None else self._choice(self._policy, mine)
        choice = slots.index(slot)
        ghost, hit = ghosts[choice], mine.hit_tokens.item(choice)
        chain, prompt = candidates.chain, candidates.prompt_tokens
        counts = self._counts
        counts.requests += 1
        counts.agreed += slot == sent_to
        counts.prompt_tokens += prompt
        counts.hit_tokens += hit
        counts.requests_to[ghost.worker] += 1
        for each in ghosts:  # those without computed tokens count in the mean
            counts.computed_tokens[each.worker] += prompt - hit if each is ghost else 0
        own_blocks = -(-prompt // candidates.block_size) - len(chain)
        ghost.place(request_id, chain, own_blocks, hit, prompt)
        self._at[request_id] = ghost
        capacity = candidates.columns.capacity_blocks.item(choice)
        self._cache(slot, ghost, chain, min(capacity, MAX_BLOCKS // len(slots)))

    def began(self, request_id: str) -> None:
        """The request's prefill is done."""
        ghost = self._at.get(request_id)
        if ghost is not None:
            ghost.began(request_id)

    def ended(self, request_id: str) -> None:
        """The request's answer ended or failed."""
        ghost = self._at.pop(request_id, None)
        if ghost is not None:
            ghost.ended(request_id)

    def view(self) -> ShadowView:
        """What the arm would have done so far."""
        return self._counts.view(self.name)

    def check(self) -> None:
        """Raise AssertionError if the models and the index disagree."""
        self._index.check()
        for slot, ghost in self._ghosts.items():
            if self._index.blocks_of(slot) != ghost.cached.keys():
                raise AssertionError(f"{self.name}: index and picture of {ghost.worker} differ")
            ghost.check()

    def _ghost(self, fleet: Fleet, slot: int) -> _Ghost:
        card = fleet.at(slot).card
        ghost = self._ghosts.get(slot)
        if ghost is None or ghost.worker != card.worker or ghost.epoch != card.epoch:
            self._index.drop(slot)
            ghost = self._ghosts[slot] = _Ghost(card.worker, card.epoch)
        return ghost

    def _choice(self, policy: Policy, mine: Candidates) -> int:
        """The slot that the policy chooses among those with room in this arm's models.

        The real request was placed, so it cannot wait here: if all are full, all are candidates.
        """
        able = only_with_room(mine, holds_back=False)
        if able is None:
            able = mine
        return able.columns.slots.item(policy.choose(able, self._rng).chosen)

    def _as_seen(
        self, candidates: Candidates, slots: Sequence[int], ghosts: Sequence[_Ghost]
    ) -> Candidates:
        """The candidates with this arm's hits and load instead of the real ones."""
        block_size = candidates.block_size
        reusable = candidates.chain[: (candidates.prompt_tokens - 1) // block_size]
        mask = sum(1 << slot for slot in slots)
        depths = self._index.depths(reusable, mask, max(slots) + 1)
        batch, computing, pending, pairs, taken = np.array(
            [
                (
                    len(ghost.unfinished),
                    ghost.computing,
                    ghost.pending_tokens,
                    ghost.pending_pairs,
                    ghost.taken_blocks,
                )
                for ghost in ghosts
            ],
            dtype=np.int64,
        ).T
        columns = candidates.columns
        hit_tokens = depths[columns.slots] * block_size
        free_blocks = np.maximum(columns.capacity_blocks - taken, 0)
        return structs.replace(
            candidates,
            hit_tokens=hit_tokens,
            best_hit_tokens=int(hit_tokens.max()),
            columns=structs.replace(
                columns,
                pending_tokens=pending,
                running=batch - computing,
                waiting=computing,
                batch=batch,
                free_blocks=free_blocks,
                room_blocks=free_blocks,
                pending_pairs=pairs,
            ),
        )

    def _cache(self, slot: int, ghost: _Ghost, chain: Sequence[bytes], room: int) -> None:
        cached = ghost.cached
        kept = chain[:room]
        self._index.store(slot, kept)
        for block in reversed(kept):  # the parent becomes newer than its child
            cached.pop(block, None)
            cached[block] = None
        surplus = len(cached) - room
        if surplus > 0:
            oldest = [block for block, _ in zip(cached, range(surplus), strict=False)]
            self._index.evict(slot, oldest)
            for block in oldest:
                del cached[block]


class Shadows:
    """All arms of a gateway: `live`, and one for each shadow policy."""

    def __init__(self, policies: Sequence[Policy], rng: random.Random | None = None) -> None:
        rng = rng or random.Random()
        self.arms: list[Arm] = []
        if policies:
            self.arms = [Arm(LIVE, None, rng), *(Arm(p.name, p, rng) for p in policies)]

    def observe(self, fleet: Fleet, request_id: str, candidates: Candidates, sent_to: int) -> None:
        """A request was sent to slot `sent_to` of `candidates`: all workers that may serve it,
        including full ones."""
        for arm in self.arms:
            arm.observe(fleet, request_id, candidates, sent_to)

    def began(self, request_id: str) -> None:
        """The first byte of the response has arrived."""
        for arm in self.arms:
            arm.began(request_id)

    def ended(self, request_id: str) -> None:
        """The request ended or failed; unknown requests are ignored."""
        for arm in self.arms:
            arm.ended(request_id)

    def views(self) -> list[ShadowView]:
        """The view of every arm, `live` first."""
        return [arm.view() for arm in self.arms]


def parse_shadows(text: str) -> list[Policy]:
    """Parse policies such as "round_robin,dynamo:overlap_weight=1.0,kv=2". Raises PolicyError.

    A part of the form `name=value`, without a policy, is a parameter of the policy before it.
    """
    names: list[str] = []
    for part in (piece.strip() for piece in text.split(",")):
        if names and "=" in part and ":" not in part:
            names[-1] += f",{part}"
        elif part:
            names.append(part)
    policies = [parse_policy(name) for name in names]
    for name, times in Tally(policy.name for policy in policies).items():
        if times > 1:
            raise PolicyError(f"the shadow policy {name!r} is given twice")
    return policies
