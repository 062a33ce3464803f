"""What every workload is made of: conversations of turns, prompts of segments.

Prompts are scripted, the assistant's turns in them included, so that every arm of a comparison
sends the same bytes whatever the model answers.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Literal, NamedTuple

import msgspec

from loadgen.blocktext import MAX_ID

Role = Literal["system", "user", "assistant"]


class WorkloadError(ValueError):
    """Invalid workload parameters. The message names the parameter."""


class Segment(NamedTuple):
    """A piece of a prompt.

    id      equal ids are equal contents, of which a shorter segment is the begin
    tokens  its length; exact where the text is made from the id, else estimated
    text    the content where it is given; "" has it made from the id (`loadgen.blocktext`)
    """

    role: Role
    id: int
    tokens: int
    text: str = ""


class Turn(NamedTuple):
    """One request of a conversation.

    prompt        the whole prompt, the history included
    output_tokens tokens of the answer, or their bound where it may end earlier
    think_time_s  least pause since the turn before was sent; 0 at the first turn
    ignore_eos    whether the answer runs to `output_tokens` whatever the model says
    """

    prompt: tuple[Segment, ...]
    output_tokens: int
    think_time_s: float = 0.0
    ignore_eos: bool = True

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the whole prompt; a chat template adds its own."""
        return sum(segment.tokens for segment in self.prompt)


class Conversation(NamedTuple):
    """One user's conversation. Those of one group share a prefix."""

    session: str
    group: str
    turns: list[Turn]


class Workload(msgspec.Struct, frozen=True, kw_only=True, tag_field="name"):
    """Parameters of a workload; each subclass is one, and its `tag` is its name.

    The same parameters and seed give the same conversations in every process.
    """

    paced: ClassVar[bool] = False
    """Whether think times set the pace within a conversation and only its begin arrives by the
    request rate. Else every turn arrives by the request rate."""

    @abstractmethod
    def conversations(self, seed: int) -> list[Conversation]:
        """All of them. Raises WorkloadError for parameters that make no workload."""

    def need(self, least: float, *names: str) -> None:
        """Raises WorkloadError for a parameter that is below `least` or not finite."""
        for name in names:
            value = getattr(self, name)
            if not least <= value < float("inf"):
                raise WorkloadError(f"{name} must be at least {least:g}, got {value}")


class Ids:
    """Gives every content its own id, below `blocktext.MAX_ID`.

    Where they begin depends on workload and seed, so that the texts of two differ: a cache
    that one has warmed gives the other nothing.
    """

    def __init__(self, workload: str, seed: int) -> None:
        begin = hashlib.sha256(f"{workload}/{seed}".encode()).digest()
        self._next = itertools.count(int.from_bytes(begin, "big"))
        self._of_text: dict[str, int] = {}

    def new(self) -> int:
        """An id that nothing had before."""
        return next(self._next) % MAX_ID

    def of(self, text: str) -> int:
        """The same id for the same text."""
        if text not in self._of_text:
            self._of_text[text] = self.new()
        return self._of_text[text]


def zipf_weights(count: int, exponent: float) -> list[float]:
    """Popularity of ranks 1 to `count`: rank^−exponent; 0 makes all equally popular."""
    return [rank**-exponent for rank in range(1, count + 1)]


def draw(rng: random.Random, weights: Sequence[float], count: int) -> list[int]:
    """`count` indices, in proportion to the weights."""
    return rng.choices(range(len(weights)), weights=weights, k=count)


def around(rng: random.Random, mean: int) -> int:
    """A length between half and one and a half of the mean, evenly; at least 1."""
    return max(1, round(mean * rng.uniform(0.5, 1.5)))


def pause(rng: random.Random, mean_s: float) -> float:
    """An exponentially distributed think time, 0 where the mean is."""
    return rng.expovariate(1 / mean_s) if mean_s else 0.0


def growing_turns(
    rng: random.Random,
    ids: Ids,
    system: tuple[Segment, ...],
    added_tokens: Sequence[int],
    output_tokens: int,
    think_time_s: float,
) -> list[Turn]:
    """Turns whose history grows: to each the user adds about so many tokens, and the answer, of
    about `output_tokens`, stays in the history of those after it.

    Before each turn but the first comes a pause of `think_time_s` on average.
    """
    history = system
    turns = []
    for number, tokens in enumerate(added_tokens):
        history = (*history, Segment("user", ids.new(), around(rng, tokens)))
        answer_tokens = around(rng, output_tokens)
        turns.append(Turn(history, answer_tokens, pause(rng, think_time_s) if number else 0.0))
        history = (*history, Segment("assistant", ids.new(), answer_tokens))
    return turns
