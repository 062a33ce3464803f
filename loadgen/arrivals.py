"""Arrival times of requests. Open loop: a time never depends on a response."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Sequence
from typing import Literal, NamedTuple

import msgspec

from loadgen.workloads import Conversation, Turn, Workload


class ArrivalError(ValueError):
    """Invalid arrival parameters. The message names the parameter."""


Ramp = Literal["linear", "exponential"]


class Arrivals(msgspec.Struct, frozen=True, kw_only=True):
    """An arrival process.

    request_rate           requests per second; inf sends all at once
    burstiness             shape of the gamma distribution of the gaps: 1 is Poisson, below 1 is
                           burstier, above 1 more regular, inf is a constant gap
    ramp_up_strategy       the rate goes from `ramp_up_start_rps` to `ramp_up_end_rps` over the
                           requests, linearly or exponentially, and `request_rate` is not used
    """

    request_rate: float = 2.0
    burstiness: float = 1.0
    ramp_up_strategy: Ramp | None = None
    ramp_up_start_rps: float | None = None
    ramp_up_end_rps: float | None = None

    def gaps_s(self, count: int, seed: int) -> list[float]:
        """Gaps in seconds before each of `count` arrivals. Raises ArrivalError."""
        if not self.burstiness > 0:
            raise ArrivalError(f"the burstiness must be positive, got {self.burstiness}")
        rng = random.Random(f"arrivals/{seed}")
        return [_gap_s(rng, rate, self.burstiness) for rate in self._rates(count)]

    def _rates(self, count: int) -> list[float]:
        start, end = self.ramp_up_start_rps, self.ramp_up_end_rps
        if self.ramp_up_strategy is None:
            if start is not None or end is not None:
                raise ArrivalError("a ramp needs a ramp_up_strategy: linear or exponential")
            if not self.request_rate > 0:
                raise ArrivalError(f"the request rate must be positive, got {self.request_rate}")
            return [self.request_rate] * count
        if self.ramp_up_strategy not in ("linear", "exponential"):
            raise ArrivalError(
                f"ramp_up_strategy must be linear or exponential, got {self.ramp_up_strategy!r}"
            )
        if start is None or end is None or not (0 < start < math.inf and 0 < end < math.inf):
            raise ArrivalError("a ramp needs positive ramp_up_start_rps and ramp_up_end_rps")
        shares = [index / max(1, count - 1) for index in range(count)]
        if self.ramp_up_strategy == "linear":
            return [start + (end - start) * share for share in shares]
        return [start * (end / start) ** share for share in shares]


class Arrival(NamedTuple):
    """A turn and its send time, in seconds after the start (whole microseconds)."""

    at_s: float
    conversation: Conversation
    turn: int

    @property
    def asked(self) -> Turn:
        """What is sent."""
        return self.conversation.turns[self.turn]


def arrange(workload: Workload, arrivals: Arrivals, seed: int) -> list[Arrival]:
    """Every turn of the workload with its send time, in order of time.

    Raises WorkloadError or ArrivalError.
    """
    conversations = workload.conversations(seed)
    if workload.paced:
        return start_sessions(conversations, arrivals, seed)
    return interleave(conversations, arrivals, seed)


def interleave(
    conversations: Sequence[Conversation], arrivals: Arrivals, seed: int
) -> list[Arrival]:
    """Every turn arrives by the process.

    At each arrival the next turn of a conversation is taken, drawn in proportion to its turns
    left, so that conversations mix evenly from start to end. A turn whose think time is not over
    lets others go first; where none is due, this arrival and all after it move back.
    """
    # A shuffled list of one entry a turn is that draw, made in advance.
    order = [i for i, c in enumerate(conversations) for _ in c.turns]
    gaps_s = arrivals.gaps_s(len(order), seed)
    random.Random(f"interleave/{seed}").shuffle(order)
    # Whole microseconds: what is written is what was meant, on every platform.
    due_us = [0] * len(conversations)
    next_turn = [0] * len(conversations)
    waiting: list[tuple[int, int, int]] = []  # (due, place in the order, conversation)
    place = 0
    clock_us = 0
    arranged = []
    for gap_s in gaps_s:
        clock_us += round(gap_s * 1e6)
        chosen = -1
        while chosen < 0:
            if waiting and waiting[0][0] <= clock_us:
                _, at, index = heapq.heappop(waiting)
            elif place < len(order):
                at, index = place, order[place]
                place += 1
            else:
                clock_us = waiting[0][0]
                continue
            if due_us[index] <= clock_us:
                chosen = index
            else:
                heapq.heappush(waiting, (due_us[index], at, index))
        conversation, turn = conversations[chosen], next_turn[chosen]
        arranged.append(Arrival(clock_us / 1e6, conversation, turn))
        next_turn[chosen] += 1
        if turn + 1 < len(conversation.turns):
            due_us[chosen] = clock_us + math.ceil(conversation.turns[turn + 1].think_time_s * 1e6)
    return arranged


def start_sessions(
    conversations: Sequence[Conversation], arrivals: Arrivals, seed: int
) -> list[Arrival]:
    """Conversations begin by the process; their turns follow after their think times.

    Begins come as much more rarely than the process says as a conversation has turns, so that
    its rate is the rate of requests while conversations begin and end evenly.
    """
    turns = sum(len(conversation.turns) for conversation in conversations)
    stretch = turns / len(conversations)
    begin_us = 0
    arranged = []
    for conversation, gap_s in zip(
        conversations, arrivals.gaps_s(len(conversations), seed), strict=True
    ):
        begin_us += round(gap_s * stretch * 1e6)
        clock_us = begin_us
        for turn, asked in enumerate(conversation.turns):
            clock_us += math.ceil(asked.think_time_s * 1e6)
            arranged.append(Arrival(clock_us / 1e6, conversation, turn))
    return sorted(arranged, key=lambda arrival: arrival.at_s)


def _gap_s(rng: random.Random, rate: float, burstiness: float) -> float:
    if rate == math.inf:
        return 0.0
    if burstiness == math.inf:
        return 1 / rate
    return rng.gammavariate(burstiness, 1 / (rate * burstiness))
