"""Arrivals: when requests are sent. Open loop: a time never depends on an answer."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence

import msgspec

from loadgen.requests import Request
from loadgen.workloads import Conversation


class ArrivalError(ValueError):
    """Arrivals that cannot be made. Its text names the parameter."""


def poisson_gaps_s(rate: float, seed: int) -> Iterator[float]:
    """Gaps in seconds of a Poisson process with `rate` arrivals a second, without end.

    Raises ArrivalError for a rate that is not positive and finite.
    """
    if not (0 < rate < math.inf):
        raise ArrivalError(f"the request rate must be positive and finite, got {rate}")
    rng = random.Random(f"poisson/{seed}")
    while True:
        yield rng.expovariate(rate)


def interleave(
    conversations: Sequence[Conversation], gaps_s: Iterator[float], think_time_s: float, seed: int
) -> list[Request]:
    """Give every turn of every conversation its time, in the order of time.

    At each arrival the next turn of a conversation is taken, drawn in proportion to its turns
    left, so that conversations mix evenly from begin to end. A turn comes at least `think_time_s`
    after the turn before it; where no conversation is due yet, this arrival and all after it move
    back to when one is.
    """
    rng = random.Random(f"interleave/{seed}")
    next_turn = [0] * len(conversations)
    # Whole microseconds: what is written is what was meant, on every platform.
    due_us = [0] * len(conversations)
    think_us = math.ceil(think_time_s * 1e6)
    requests = []
    clock_us = 0
    for _ in range(sum(len(conversation.turns) for conversation in conversations)):
        open_ones = [i for i, c in enumerate(conversations) if next_turn[i] < len(c.turns)]
        clock_us = max(clock_us + round(next(gaps_s) * 1e6), min(due_us[i] for i in open_ones))
        ready = [i for i in open_ones if due_us[i] <= clock_us]
        left = [len(conversations[i].turns) - next_turn[i] for i in ready]
        chosen = rng.choices(ready, weights=left)[0]
        conversation, turn = conversations[chosen], next_turn[chosen]
        requests.append(
            Request(
                id=f"{conversation.session}-t{turn}",
                intended_at_s=clock_us / 1e6,
                session=conversation.session,
                turn=turn,
                group=conversation.group,
                body=msgspec.Raw(conversation.turns[turn]),
            )
        )
        next_turn[chosen] += 1
        due_us[chosen] = clock_us + think_us
    return requests
