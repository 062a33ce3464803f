"""What every policy shares: the candidates it sees, the decision it gives, the tie rule."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from math import floor
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]
CostArray = FloatArray | IntArray
BoolArray = NDArray[np.bool_]


MANY_NEAR = 16
"""Entries whose loads are compared at once; fewer are compared one by one."""


class Candidates(NamedTuple):
    """The workers that may serve a request. Arrays are `[n]`, n at least 1, in one order; policies
    do not write to them.

    slots            a number for each worker, the same from request to request
    hit_tokens       prompt tokens that the worker is expected not to compute
    pending_tokens   prompt tokens that it still has to compute for others
    running          requests admitted
    waiting          requests not yet admitted, those on their way to it included
    batch            running + waiting
    free_blocks      KV blocks that no sequence references
    capacity_blocks  KV blocks in all
    prompt_tokens    tokens of this request's prompt
    block_size       tokens in a block
    chain            hashes of the prompt's full blocks
    room_blocks      free blocks less those that requests on their way to it will take; None: all
    worker_keys      a number for each worker, the same at every gateway; None: the slots
    pending_pairs    query-key pairs of the pending tokens' attention; None: unknown
    s_per_token      measured seconds to prefill a token; 0 or None: not measured
    s_per_pair       seconds on top for each query-key pair of its attention
    most_hit_tokens  the greatest of the hits; None: not known
    stay_s           seconds from a request's placement to its end, as this router's own requests
                     to the model stay at present; 0: unknown
    in_flight        this router's requests to the model that have not ended
    sharing          those of them whose prompts begin with all that any worker holds of this one,
                     on its device or on its way
    """

    slots: IntArray
    hit_tokens: IntArray
    pending_tokens: IntArray
    running: IntArray
    waiting: IntArray
    batch: IntArray
    free_blocks: IntArray
    capacity_blocks: IntArray
    prompt_tokens: int
    block_size: int
    chain: Sequence[bytes] = ()
    room_blocks: IntArray | None = None
    worker_keys: IntArray | None = None
    pending_pairs: IntArray | None = None
    s_per_token: FloatArray | None = None
    s_per_pair: FloatArray | None = None
    most_hit_tokens: int | None = None
    stay_s: float = 0.0
    in_flight: int = 0
    sharing: int = 0

    @property
    def new_tokens(self) -> IntArray:
        """Prompt tokens that each worker would have to compute: at least 1."""
        new: IntArray = self.prompt_tokens - self.hit_tokens
        if self.best_hit < self.prompt_tokens:
            return new
        return np.maximum(new, 1, out=new)

    @property
    def best_hit(self) -> int:
        """The greatest of the hits, in tokens."""
        if self.most_hit_tokens is not None:
            return self.most_hit_tokens
        return self.hit_tokens.item(self.hit_tokens.argmax())

    def only(self, kept: BoolArray) -> Candidates:
        """The candidates where `kept` (`[n]`) is true."""
        columns = self._replace(most_hit_tokens=None)
        return Candidates._make(
            value[kept] if isinstance(value, np.ndarray) else value for value in columns
        )


LeftOut = Literal["busy", "undrawn", "guard"]

LEFT_OUT: dict[LeftOut, str] = {
    "busy": "it is busy: its batch is beyond the mean plus `sigmas` standard deviations",
    "undrawn": "it is not among the two that chance drew",
    "guard": "it holds a prefix that draws more requests than its holders' share",
}


class Decision(NamedTuple):
    """What a policy chose.

    chosen    entry of the candidates
    costs     `[n]`, what each entry was judged by; the least wins, near-ties by the tie rule.
              Infinite for an entry that was left out
    left_out  why entries of infinite cost were left out, if any; one of LEFT_OUT
    """

    chosen: int
    costs: CostArray
    left_out: LeftOut | None = None


class PolicyError(ValueError):
    """A policy that cannot be had. Its text says which there are."""


Function = Callable[[Candidates, Any, Any, random.Random], Decision]
"""A policy: candidates, parameters, state, chance."""


class Policy(NamedTuple):
    """A policy with its parameters, ready to be asked.

    name     as in `parse_policy`, with the parameters that were given
    state    what it remembers between requests; None where it remembers nothing
    """

    name: str
    function: Function
    parameters: msgspec.Struct
    state: Any

    def choose(self, candidates: Candidates, rng: random.Random) -> Decision:
        """Choose one of `candidates`. Raises ValueError where there is none."""
        if not len(candidates.slots):
            raise ValueError("a policy needs at least one candidate")
        return self.function(candidates, self.parameters, self.state, rng)


class NoParameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of a policy that has nothing to set."""


def least(costs: CostArray, candidates: Candidates, tie: float, rng: random.Random) -> int:
    """The entry of least cost, by the tie rule.

    Entries within the share `tie` of the least cost are as good; of those the smallest batch
    wins, then the fewest pending tokens, then chance: never "the first", which would be the
    same worker each time.
    """
    lowest = costs.item(costs.argmin())
    most = lowest + tie * abs(lowest)
    # whole numbers are compared with a whole one: numpy would copy them as floats first
    near = (costs <= (floor(most) if isinstance(lowest, int) else most)).nonzero()[0]
    if len(near) == 1:
        return near.item()
    if len(near) > MANY_NEAR:
        for load in (candidates.batch, candidates.pending_tokens):
            loads = load[near]
            near = near[loads == loads.min()]
    entries: list[int] = near.tolist()
    for load in (candidates.batch, candidates.pending_tokens):
        if len(entries) > 1:
            of_each = [load.item(entry) for entry in entries]
            smallest = min(of_each)
            entries = [e for e, each in zip(entries, of_each, strict=True) if each == smallest]
    return entries[0] if len(entries) == 1 else entries[rng.randrange(len(entries))]


def any_least(costs: FloatArray, rng: random.Random) -> int:
    """One of the entries of least cost, by chance alone."""
    near = np.flatnonzero(costs == costs.min())
    return int(near[0] if len(near) == 1 else near[rng.randrange(len(near))])


def with_room(candidates: Candidates) -> BoolArray | None:
    """`[n]`: whether each worker's pool can take the prompt now. None: all of them can.

    It must have a free block for each block that the prompt does not find in the cache, those
    promised to requests on their way left out. An idle worker always has room: what it can
    never hold is refused by its context.
    """
    size = candidates.block_size
    free = candidates.free_blocks if candidates.room_blocks is None else candidates.room_blocks
    if free.item(free.argmin()) * size >= candidates.prompt_tokens:
        return None
    needed = (candidates.new_tokens + (size - 1)) // size
    room: BoolArray = (free >= needed) | (candidates.batch == 0)
    return None if room.all() else room


def only_with_room(candidates: Candidates, *, holds_back: bool) -> Candidates | None:
    """Those whose pool can take the prompt now, None where all are full.

    Where none can, those that have any free block (or nothing to do): the prompt waits there.
    Not so if requests are held back until a worker has room.
    """
    room = with_room(candidates)
    if room is None:
        return candidates
    if not room.any() and not holds_back:
        room = (candidates.free_blocks > 0) | (candidates.batch == 0)
    return candidates.only(room) if room.any() else None
