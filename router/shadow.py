"""Shadow policies: what other policies would have done with the live traffic.

A policy that scatters a prefix finds it everywhere only because another one gathered it. So a
shadow does not judge the real caches: every shadow keeps its own picture of every worker's cache
(LRU, as many blocks as the worker has) and of its own load, and both follow its own choices.
The choices that were really made are replayed by the same rules as the arm `live`: shadows
compare with that, not with the workers' own figures, which also count the blocks of answers.

What a shadow takes from reality: which workers may serve, when a request's first byte came (its
prefill is done) and when it ended.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from router.fleet import Fleet
from router.policies import Candidates, Policy, PolicyError, parse_policy
from router.prefix_index import PrefixIndex

MAX_BLOCKS = 200_000
"""Blocks in all pictures of one shadow at most (about 300 bytes each); more workers than that
has room for get smaller pictures."""

LIVE = "live"
"""Name of the arm that replays the choices that were made."""


class ShadowView(msgspec.Struct, frozen=True, kw_only=True):
    """What one arm would have done since the start.

    agreed            requests that it would have sent where they went
    hit_tokens        prompt tokens that it would have reused
    computed_tokens   worker -> prompt tokens that it would have computed
    requests_to       worker -> requests that it would have got
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


class _Ghost:
    """One worker in one epoch, as an arm imagines it.

    cached      its blocks, the longest unused first; parents are newer than their children, so
                that what is left stays prefix-closed
    unfinished  requests there -> prompt tokens still to compute
    """

    __slots__ = ("cached", "epoch", "unfinished", "worker")

    def __init__(self, worker: str, epoch: int) -> None:
        self.worker = worker
        self.epoch = epoch
        self.cached: dict[bytes, None] = {}
        self.unfinished: dict[str, int] = {}


class Arm:
    """One policy with its own pictures. `policy` None replays what was chosen."""

    def __init__(self, name: str, policy: Policy | None, rng: random.Random) -> None:
        self.name = name
        self._policy = policy
        self._rng = rng
        self._ghosts: dict[int, _Ghost] = {}
        self._index = PrefixIndex()
        self._at: dict[str, _Ghost] = {}
        self._requests = self._agreed = 0
        self._prompt_tokens = self._hit_tokens = 0
        self._computed: dict[str, int] = {}
        self._requests_to: dict[str, int] = {}

    def observe(
        self,
        fleet: Fleet,
        request_id: str,
        chain: Sequence[bytes],
        candidates: Candidates,
        chosen: int,
    ) -> None:
        """A request was sent to entry `chosen` of `candidates`: do with it what this arm would."""
        slots: list[int] = candidates.slots.tolist()
        ghosts = [self._ghost(fleet, slot) for slot in slots]
        mine = self._as_seen(candidates, chain, slots, ghosts)
        choice = chosen if self._policy is None else self._policy.choose(mine, self._rng).chosen
        ghost, hit = ghosts[choice], int(mine.hit_tokens[choice])
        computed = candidates.prompt_tokens - hit
        self._requests += 1
        self._agreed += choice == chosen
        self._prompt_tokens += candidates.prompt_tokens
        self._hit_tokens += hit
        self._computed[ghost.worker] = self._computed.get(ghost.worker, 0) + computed
        self._requests_to[ghost.worker] = self._requests_to.get(ghost.worker, 0) + 1
        for worker in (each.worker for each in ghosts):
            self._computed.setdefault(worker, 0)
        ghost.unfinished[request_id] = computed
        self._at[request_id] = ghost
        capacity = int(candidates.capacity_blocks[choice])
        self._cache(slots[choice], ghost, chain, min(capacity, MAX_BLOCKS // len(slots)))

    def began(self, request_id: str) -> None:
        """The request's prefill is done."""
        ghost = self._at.get(request_id)
        if ghost is not None:
            ghost.unfinished[request_id] = 0

    def ended(self, request_id: str) -> None:
        """The request's answer ended or failed."""
        ghost = self._at.pop(request_id, None)
        if ghost is not None:
            del ghost.unfinished[request_id]

    def view(self) -> ShadowView:
        """What it would have done so far."""
        computed = self._computed
        mean = sum(computed.values()) / len(computed) if computed else 0.0
        return ShadowView(
            policy=self.name,
            requests=self._requests,
            agreed=self._agreed,
            prompt_tokens=self._prompt_tokens,
            hit_tokens=self._hit_tokens,
            hit_ratio=self._hit_tokens / self._prompt_tokens if self._prompt_tokens else 0.0,
            imbalance=max(computed.values()) / mean if mean else 1.0,
            computed_tokens=dict(sorted(computed.items())),
            requests_to=dict(sorted(self._requests_to.items())),
        )

    def check(self) -> None:
        """Raise AssertionError where pictures and index disagree."""
        self._index.check()
        for slot, ghost in self._ghosts.items():
            if self._index.blocks_of(slot) != ghost.cached.keys():
                raise AssertionError(f"{self.name}: index and picture of {ghost.worker} differ")

    def _ghost(self, fleet: Fleet, slot: int) -> _Ghost:
        card = fleet.at(slot).card
        ghost = self._ghosts.get(slot)
        if ghost is None or ghost.worker != card.worker or ghost.epoch != card.epoch:
            self._index.drop(slot)
            ghost = self._ghosts[slot] = _Ghost(card.worker, card.epoch)
        return ghost

    def _as_seen(
        self,
        candidates: Candidates,
        chain: Sequence[bytes],
        slots: Sequence[int],
        ghosts: Sequence[_Ghost],
    ) -> Candidates:
        """The candidates with this arm's hits and load in place of the real ones."""
        block_size = candidates.block_size
        reusable = chain[: (candidates.prompt_tokens - 1) // block_size]
        mask = sum(1 << slot for slot in slots)
        depths = self._index.depths(reusable, mask, max(slots) + 1)
        batch = np.array([len(ghost.unfinished) for ghost in ghosts], dtype=np.int64)
        pending = np.array([sum(ghost.unfinished.values()) for ghost in ghosts], dtype=np.int64)
        computing = np.array(
            [sum(left > 0 for left in ghost.unfinished.values()) for ghost in ghosts],
            dtype=np.int64,
        )
        return candidates._replace(
            hit_tokens=depths[candidates.slots] * block_size,
            pending_tokens=pending,
            running=batch - computing,
            waiting=computing,
            batch=batch,
            room_blocks=None,
            most_hit_tokens=None,
            pending_pairs=None,
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

    def observe(
        self,
        fleet: Fleet,
        request_id: str,
        chain: Sequence[bytes],
        candidates: Candidates,
        chosen: int,
    ) -> None:
        """A request was sent to entry `chosen` of `candidates`."""
        for arm in self.arms:
            arm.observe(fleet, request_id, chain, candidates, chosen)

    def began(self, request_id: str) -> None:
        """The request's first byte came."""
        for arm in self.arms:
            arm.began(request_id)

    def ended(self, request_id: str) -> None:
        """The request ended or failed; harmless for unknown ones."""
        for arm in self.arms:
            arm.ended(request_id)

    def views(self) -> list[ShadowView]:
        """What every arm would have done, `live` first."""
        return [arm.view() for arm in self.arms]


def parse_shadows(text: str) -> list[Policy]:
    """The policies of "round_robin,dynamo:overlap_weight=1.0,kv=2". Raises PolicyError.

    A part that is a parameter (`name=value` without a policy) belongs to the policy before it.
    """
    names: list[str] = []
    for part in (piece.strip() for piece in text.split(",")):
        if names and "=" in part and ":" not in part:
            names[-1] += f",{part}"
        elif part:
            names.append(part)
    policies = [parse_policy(name) for name in names]
    _unique(policy.name for policy in policies)
    return policies


def _unique(names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise PolicyError(f"the shadow policy {name!r} is named twice")
        seen.add(name)
