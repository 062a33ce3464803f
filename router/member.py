"""One worker as the router sees it, its bookings, and the group of workers of one model."""

from __future__ import annotations

import hashlib

import msgspec
import numpy as np
from numpy.typing import NDArray

from cluster.blocks import Namespace
from cluster.protocol import Load, WorkerCard, WorkerState
from router.coming import Claim
from router.policies import Columns
from router.traffic import Traffic


class Booking(msgspec.Struct, eq=False):
    """One request in a worker's load, from the decision until its response ends.

    traffic      the traffic of its model, which counts it
    new_tokens   prompt tokens that the worker is expected to compute for it
    new_pairs    query-key pairs of their attention
    new_blocks   KV blocks that they will take
    claim        its claim on the prompt's blocks as coming to the worker
    """

    serial: int
    member: Member
    traffic: Traffic
    request_id: str
    new_tokens: int
    new_pairs: int
    new_blocks: int
    claim: Claim


class Member(msgspec.Struct, eq=False):
    """One worker as this router sees it.

    slot           its number in the arrays, -1 once it is gone
    key            a number derived from its name: the same at every gateway
    load           the load of its last report
    unnamed        own requests to it that no report has named as received, by request id
    routed         requests sent to it since it appeared
    refused        why it may not serve with the others of its model, "" if it may
    suspect_until  when it stops being suspect; 0 if it is not
    suspect_why    why it is suspect, in words
    avoided        why it is avoided, in words; "" if its requests succeed
    failure_rate   of its latest requests, 0 to 1
    serves         it gets requests: it is usable, and not avoided, unless all others are too
    heard_at       when its last report or card came, seconds of the fleet's clock
    ready_serial   grows with the order in which workers became ready; 0: not ready
    """

    card: WorkerCard
    slot: int
    key: int
    state: WorkerState
    load: Load
    unnamed: dict[str, Booking] = msgspec.field(default_factory=dict)
    routed: int = 0
    refused: str = ""
    suspect_until: float = 0.0
    suspect_why: str = ""
    avoided: str = ""
    failure_rate: float = 0.0
    serves: bool = False
    heard_at: float = 0.0
    ready_serial: int = 0

    @property
    def usable(self) -> bool:
        """Whether requests may be sent to it, as far as it is known to live."""
        return self.state == "ready" and not self.refused and not self.suspect_until

    @property
    def left_out(self) -> str:
        """Why it gets no requests although it is ready, in words; "" if it does or is not."""
        if self.serves or self.refused or self.state != "ready":
            return ""
        return self.suspect_why if self.suspect_until else self.avoided


class ModelGroup(msgspec.Struct, frozen=True, eq=False):
    """The workers of one model that may serve now.

    reference        card of the worker that became ready first; the others must match it
    context_tokens   longest prompt + output that each of them can hold
    slots, mask      their slots, as sorted numbers and as a bit mask
    run              the slots as a slice if they are consecutive
    columns          the columns of `run`: views that change with the fleet
    traffic          this router's own requests to the model
    """

    reference: WorkerCard | None
    context_tokens: int
    slots: NDArray[np.int64]
    mask: int
    run: slice | None
    columns: Columns | None
    traffic: Traffic


def member_of(card: WorkerCard, slot: int) -> Member:
    """A worker that has not reported yet."""
    digest = hashlib.blake2b(card.worker.encode(), digest_size=8).digest()
    key = int.from_bytes(digest, "little", signed=True)
    return Member(card, slot, key, card.state, idle_load(card))


def idle_load(card: WorkerCard) -> Load:
    """The load of a worker that has not reported yet."""
    return Load(free_blocks=card.capacity_blocks)


def row_of(member: Member) -> list[int]:
    """The worker's `router.columns.ROWS`: its last report plus its unnamed bookings."""
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
        load.free_blocks - blocks,
    )


def wait_s(member: Member, tokens: int, waiting: int, batch: int, pairs: int) -> float:
    """Expected seconds until a new request would start at the worker, given the first four of
    `booked_of`; 0: at once, or nothing was measured yet.

    It waits for the prefill of all before it, and for the start of those that wait for a place in
    the batch or for KV blocks. Requests on their way to the worker take the places that are free.
    """
    load = member.load
    behind = waiting if load.waiting else max(0, batch - member.card.max_batch_size)
    prefill_s = tokens * load.prefill_s_per_token + pairs * load.prefill_s_per_pair
    return max(prefill_s, behind * load.start_interval_s)


def context_tokens(card: WorkerCard) -> int:
    """Longest prompt + output that the worker can hold, bounded by its model and its KV pool."""
    return min(card.context_tokens, card.capacity_blocks * card.namespace.block_size)


def difference(card: WorkerCard, reference: WorkerCard) -> str:
    """Why `card` may not serve with `reference`, in words; "" if it may."""
    if card.namespace == reference.namespace and card.namespace_check == reference.namespace_check:
        return ""
    parts = [
        f"{name} {getattr(card.namespace, name)!r} instead of "
        f"{getattr(reference.namespace, name)!r}"
        for name in Namespace.__struct_fields__
        if getattr(card.namespace, name) != getattr(reference.namespace, name)
    ] or ["another pool secret"]
    return (
        f"its blocks are not compatible with those of {reference.worker}, which was ready first: "
        f"{', '.join(parts)}"
    )
