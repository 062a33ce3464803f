"""One worker as the router sees it, its bookings, and the group of workers of one model."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cluster.blocks import Namespace
from cluster.protocol import Load, WorkerCard, WorkerState, prefill_pairs
from router.coming import Claim
from router.policies import Candidates
from router.traffic import Traffic

ROWS = (
    "pending_tokens",
    "waiting",
    "batch",
    "pending_pairs",
    "booked_blocks",
    "running",
    "free_blocks",
    "capacity_blocks",
    "worker_key",
)
"""What the fleet keeps of each worker as whole numbers, in this order: first what bookings
change (`booked_of`), then what the worker alone says."""

SPEEDS = ("s_per_token", "s_per_pair")
"""What it keeps of each worker's measured prefill speed, in this order."""


class Booking:
    """One request's place at one worker, from the decision until its response ends.

    traffic      of its model, which counts it
    new_tokens   prompt tokens that the worker is expected to compute for it
    new_pairs    query-key pairs of their attention
    new_blocks   KV blocks that they will take
    """

    __slots__ = (
        "claim",
        "member",
        "new_blocks",
        "new_pairs",
        "new_tokens",
        "request_id",
        "serial",
        "traffic",
    )

    def __init__(
        self,
        serial: int,
        member: Member,
        traffic: Traffic,
        request_id: str,
        prompt_tokens: int,
        hit_tokens: int,
    ) -> None:
        self.serial = serial
        self.member = member
        self.traffic = traffic
        self.request_id = request_id
        self.new_tokens = max(1, prompt_tokens - hit_tokens)
        self.new_pairs = prefill_pairs(prompt_tokens - self.new_tokens, prompt_tokens)
        self.new_blocks = -(-self.new_tokens // member.card.namespace.block_size)
        self.claim: Claim | None = None


class Member:
    """One worker as this router sees it.

    slot        its number in the arrays, -1 once it is gone
    key         a number made of its name: the same at every gateway
    load        as last reported
    unnamed     own requests to it that no report has named as received, by request id
    routed      requests sent to it since it appeared
    refused     why it may not serve beside the others of its model, "" where it may
    """

    __slots__ = (
        "card",
        "key",
        "load",
        "ready_serial",
        "refused",
        "routed",
        "slot",
        "state",
        "suspect_until",
        "unnamed",
    )

    def __init__(self, card: WorkerCard, slot: int) -> None:
        self.card = card
        self.slot = slot
        digest = hashlib.blake2b(card.worker.encode(), digest_size=8).digest()
        self.key = int.from_bytes(digest, "little", signed=True)
        self.state: WorkerState = card.state
        self.load = idle_load(card)
        self.unnamed: dict[str, Booking] = {}
        self.routed = 0
        self.refused = ""
        self.suspect_until = 0.0
        self.ready_serial = 0

    @property
    def usable(self) -> bool:
        """Whether requests may be sent to it."""
        return self.state == "ready" and not self.refused and not self.suspect_until


class Columns(NamedTuple):
    """What policies see of the workers of one model, `[n]` each, in the order of their slots."""

    pending_tokens: NDArray[np.int64]
    waiting: NDArray[np.int64]
    batch: NDArray[np.int64]
    pending_pairs: NDArray[np.int64]
    booked_blocks: NDArray[np.int64]
    running: NDArray[np.int64]
    free_blocks: NDArray[np.int64]
    capacity_blocks: NDArray[np.int64]
    worker_keys: NDArray[np.int64]
    s_per_token: NDArray[np.float64]
    s_per_pair: NDArray[np.float64]

    def candidates(
        self,
        slots: NDArray[np.int64],
        hit_tokens: NDArray[np.int64],
        prompt_tokens: int,
        block_size: int,
        chain: Sequence[bytes],
        stay_s: float,
    ) -> Candidates:
        """These columns and `[n]` hits as what a policy sees of a prompt."""
        pending, waiting, batch, pairs, booked, running, free, capacity, keys, token_s, pair_s = (
            self
        )
        return Candidates(
            slots,
            hit_tokens,
            pending,
            running,
            waiting,
            batch,
            free,
            capacity,
            prompt_tokens,
            block_size,
            chain,
            booked,
            keys,
            pairs,
            token_s,
            pair_s,
            stay_s,
        )


class ModelGroup(NamedTuple):
    """The workers of one model that may serve now.

    reference        card of the one that became ready first; the others must match it
    context_tokens   longest prompt + output that every one of them can hold
    slots, mask      the usable ones, as sorted numbers and as a bit mask
    run              the slots as a slice, where they are one
    columns          of the slots where they are a run: views that change with the fleet
    """

    reference: WorkerCard | None
    context_tokens: int
    slots: NDArray[np.int64]
    mask: int
    run: slice | None
    columns: Columns | None


def columns_of(
    rows: NDArray[np.int64],
    speeds: NDArray[np.float64],
    slots: slice | NDArray[np.int64],
) -> Columns:
    """The columns of `slots`, read-only: views of `rows` and `speeds` where they are a slice."""
    picked, measured = rows[:, slots], speeds[:, slots]
    picked.flags.writeable = measured.flags.writeable = False
    return Columns(*picked, *measured)


def run_of(slots: NDArray[np.int64]) -> slice | None:
    """The sorted `slots` as a slice where they are a run, as they mostly are."""
    if not len(slots):
        return None
    first, last = int(slots[0]), int(slots[-1])
    return slice(first, last + 1) if last - first + 1 == len(slots) else None


def idle_load(card: WorkerCard) -> Load:
    """Load of a worker that has not reported yet."""
    return Load(free_blocks=card.capacity_blocks)


def row_of(member: Member) -> list[int]:
    """The worker's entries of `ROWS`: its last report plus its unnamed bookings."""
    load, card = member.load, member.card
    return [
        *booked_of(member),
        load.running,
        load.free_blocks,
        card.capacity_blocks,
        member.key,
    ]


def booked_of(member: Member) -> tuple[int, int, int, int, int]:
    """The first five of `row_of`, which change with the worker's bookings."""
    load, unnamed = member.load, member.unnamed
    tokens = pairs = blocks = 0
    for booking in unnamed.values():
        tokens += booking.new_tokens
        pairs += booking.new_pairs
        blocks += booking.new_blocks
    waiting = load.waiting + len(unnamed)
    return (
        load.pending_prefill_tokens + tokens,
        waiting,
        load.running + waiting,
        load.pending_prefill_pairs + pairs,
        blocks,
    )


def context_tokens(card: WorkerCard) -> int:
    """Longest prompt + output that the worker can hold: bounded by its model and its pool."""
    return min(card.context_tokens, card.capacity_blocks * card.namespace.block_size)


def difference(card: WorkerCard, reference: WorkerCard) -> str:
    """Why `card` may not serve beside `reference`, in words; "" where it may."""
    if card.namespace == reference.namespace and card.namespace_check == reference.namespace_check:
        return ""
    parts = [
        f"{name} {getattr(card.namespace, name)!r} instead of "
        f"{getattr(reference.namespace, name)!r}"
        for name in Namespace.__struct_fields__
        if getattr(card.namespace, name) != getattr(reference.namespace, name)
    ] or ["another pool secret"]
    return (
        f"its blocks cannot be shared with those of {reference.worker}, which was ready first: "
        f"{', '.join(parts)}"
    )
