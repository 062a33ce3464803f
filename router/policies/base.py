"""Common to all policies: candidates, decisions, the tie rule, room."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from math import floor
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
from msgspec import structs
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]
CostArray = FloatArray | IntArray
BoolArray = NDArray[np.bool_]


MANY_NEAR = 16
"""Loads of more entries than this are compared as arrays; fewer are compared one by one."""


class Columns(msgspec.Struct, frozen=True, eq=False):
    """The workers and their load: arrays of shape `[n]`, one entry per worker, in one order.

    slots            a number per worker, the same from request to request
    pending_tokens   prompt tokens that the worker still has to compute
    waiting          requests not yet running, including those on their way to the worker
    batch            running + waiting
    pending_pairs    query-key pairs of the pending tokens' attention
    room_blocks      free blocks minus those that requests on their way to it will take
    running          requests running
    free_blocks      KV blocks that no sequence references
    capacity_blocks  KV blocks in total
    worker_keys      a number per worker, the same at every gateway
    s_per_token      measured seconds to prefill a token; 0: not measured yet
    s_per_pair       additional seconds per query-key pair of its attention
    start_interval_s measured seconds from one start of a waiting request to the next; 0: none has
                     had to wait yet
    wait_s           expected seconds until a new request would start (`router.member.wait_s`)
    """

    slots: IntArray
    pending_tokens: IntArray
    waiting: IntArray
    batch: IntArray
    pending_pairs: IntArray
    room_blocks: IntArray
    running: IntArray
    free_blocks: IntArray
    capacity_blocks: IntArray
    worker_keys: IntArray
    s_per_token: FloatArray
    s_per_pair: FloatArray
    start_interval_s: FloatArray
    wait_s: FloatArray


class Candidates(msgspec.Struct, frozen=True, eq=False):
    """A prompt, and the workers that may serve it: at least one. Policies must not change arrays.

    prompt_tokens    tokens of the prompt
    block_size       tokens in a block
    chain            hashes of the prompt's full blocks
    hit_tokens       `[n]`, predicted hit of each worker in prompt tokens
    best_hit_tokens  the largest of them
    columns          the workers and their load
    stay_s           present mean seconds from placement to end of this router's requests to the
                     model; 0: unknown
    in_flight        this router's requests to the model that have not ended
    sharing          those of them whose prompts begin with the longest prefix of this one that any
                     worker holds, on its device or coming there
    """

    prompt_tokens: int
    block_size: int
    chain: Sequence[bytes]
    hit_tokens: IntArray
    best_hit_tokens: int
    columns: Columns
    stay_s: float = 0.0
    in_flight: int = 0
    sharing: int = 0

    @property
    def new_tokens(self) -> IntArray:
        """Prompt tokens that each worker would have to compute: at least 1."""
        new: IntArray = self.prompt_tokens - self.hit_tokens
        if self.best_hit_tokens < self.prompt_tokens:
            return new
        return np.maximum(new, 1, out=new)

    def only(self, kept: BoolArray) -> Candidates:
        """The candidates where `kept` (`[n]`) is true, at least one."""
        hits = self.hit_tokens[kept]
        return structs.replace(
            self,
            hit_tokens=hits,
            best_hit_tokens=int(hits.max()),
            columns=Columns(*(column[kept] for column in structs.astuple(self.columns))),
        )


LeftOut = Literal["busy", "undrawn", "guard"]

LEFT_OUT: dict[LeftOut, str] = {
    "busy": "it is busy: its batch exceeds the mean plus `sigmas` standard deviations",
    "undrawn": "it is not one of the two workers drawn at random",
    "guard": "it holds a prefix that gets more requests than its holders' share",
}


class Decision(msgspec.Struct, frozen=True, eq=False):
    """What a policy chose.

    chosen    entry of the candidates
    costs     `[n]`, cost of each entry; the least wins, near-ties by the tie rule. Infinite for
              an entry that was left out
    left_out  why entries of infinite cost were left out, if any; one of LEFT_OUT
    """

    chosen: int
    costs: CostArray
    left_out: LeftOut | None = None


class PolicyError(ValueError):
    """An unknown policy or an invalid parameter; the message lists what is available."""


Function = Callable[[Candidates, Any, Any, random.Random], Decision]
"""The function of a policy: candidates, parameters, state, random numbers."""


class Policy(NamedTuple):
    """A policy with its parameters and state.

    name     as in `parse_policy`, with the given parameters
    state    state between requests; None if it has none
    """

    name: str
    function: Function
    parameters: msgspec.Struct
    state: Any

    def choose(self, candidates: Candidates, rng: random.Random) -> Decision:
        """Choose one of `candidates`. Raises ValueError if there is none."""
        if not len(candidates.hit_tokens):
            raise ValueError("a policy needs at least one candidate")
        return self.function(candidates, self.parameters, self.state, rng)


class NoParameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Parameters of a policy that has none."""


def least(costs: CostArray, candidates: Candidates, tie: float, rng: random.Random) -> int:
    """The entry of least cost, by the tie rule.

    Entries within the share `tie` of the least cost count as equal. Of those the smallest batch
    wins, then the fewest pending tokens, then chance: never the first entry, which would be the
    same worker each time.
    """
    lowest = costs.item(costs.argmin())
    most = lowest + tie * abs(lowest)
    # compare integers with an integer: numpy would convert them to floats first
    near = (costs <= (floor(most) if isinstance(lowest, int) else most)).nonzero()[0]
    if len(near) == 1:
        return near.item()
    if len(near) > MANY_NEAR:
        for load in (candidates.columns.batch, candidates.columns.pending_tokens):
            loads = load[near]
            near = near[loads == loads.min()]
    entries: list[int] = near.tolist()
    for load in (candidates.columns.batch, candidates.columns.pending_tokens):
        if len(entries) > 1:
            of_each = [load.item(entry) for entry in entries]
            smallest = min(of_each)
            entries = [e for e, each in zip(entries, of_each, strict=True) if each == smallest]
    return entries[0] if len(entries) == 1 else entries[rng.randrange(len(entries))]


def any_least(costs: FloatArray, rng: random.Random) -> int:
    """One of the entries of least cost, at random."""
    near = np.flatnonzero(costs == costs.min())
    return int(near[0] if len(near) == 1 else near[rng.randrange(len(near))])


def with_room(candidates: Candidates) -> BoolArray | None:
    """`[n]`: whether each worker has room for the prompt now. None: all of them have.

    A worker has room if it has a free block for each block of the prompt that is not cached there,
    without the blocks promised to requests on their way. An idle worker always has room: prompts
    that it can never hold exceed its context and are refused.
    """
    size = candidates.block_size
    columns = candidates.columns
    free = columns.room_blocks
    if free.item(free.argmin()) * size >= candidates.prompt_tokens:
        return None
    needed = (candidates.new_tokens + (size - 1)) // size
    room: BoolArray = (free >= needed) | (columns.batch == 0)
    return None if room.all() else room


def only_with_room(candidates: Candidates, *, holds_back: bool) -> Candidates | None:
    """The candidates with room for the prompt; None if all are full.

    If none has room, those with any free block (or without requests): the prompt waits there. If
    requests are held back until a worker has room, None.
    """
    room = with_room(candidates)
    if room is None:
        return candidates
    if not room.any() and not holds_back:
        columns = candidates.columns
        room = (columns.free_blocks > 0) | (columns.batch == 0)
    return candidates.only(room) if room.any() else None
