"""Workloads: who asks what. Arrivals (`arrivals.py`) decide when.

A workload is a list of conversations. The assistant's turns in a history are scripted, so that
every arm sends the same bytes whatever the model answers.
"""

from __future__ import annotations

import itertools
import random
from typing import NamedTuple

import msgspec

from loadgen import prose


class WorkloadError(ValueError):
    """A workload that cannot be made. Its text names the parameter."""


class Conversation(NamedTuple):
    """One user's conversation: the JSON body of each turn, in order."""

    session: str
    group: str
    turns: list[bytes]


class SharedPrefix(msgspec.Struct, frozen=True, kw_only=True):
    """Groups of users that share a long system prompt, each user with a multi-turn chat.

    groups         system prompts
    users          conversations in a group
    turns          questions in a conversation
    system_tokens  tokens of a system prompt: approximate, counted in words
                   (`prose.WORDS_PER_TOKEN`), because the model's tokenizer is not at hand
    output_tokens  `max_tokens` of each answer
    think_time_s   least pause between two turns of a user
    ignore_eos     let every answer run to `max_tokens`

    About `groups * system_tokens` tokens are shared; make that larger than one worker's cache
    and smaller than all of them together, and it shows what routing is worth.
    """

    groups: int = 8
    users: int = 3
    turns: int = 4
    system_tokens: int = 800
    output_tokens: int = 32
    think_time_s: float = 0.0
    ignore_eos: bool = False

    def check(self) -> None:
        """Raises WorkloadError for a size that makes no workload."""
        for name in ("groups", "users", "turns", "output_tokens"):
            if getattr(self, name) < 1:
                raise WorkloadError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.system_tokens < 0:
            raise WorkloadError(f"system_tokens must not be negative, got {self.system_tokens}")
        if not 0 <= self.think_time_s < float("inf"):
            raise WorkloadError(f"think_time_s must be finite, got {self.think_time_s}")


class _Message(msgspec.Struct, frozen=True):
    role: str
    content: str


class _StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool = True
    continuous_usage_stats: bool = True


class _ChatBody(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`stream` and `stream_options` hold no defaults here, so that they are always written."""

    model: str
    messages: list[_Message]
    max_tokens: int
    temperature: float
    stream: bool
    stream_options: _StreamOptions
    ignore_eos: bool = False


def shared_prefix(parameters: SharedPrefix, model: str, seed: int) -> list[Conversation]:
    """The conversations of a `SharedPrefix` workload, `groups * users` of them.

    The same parameters, model and seed give the same bytes. Raises WorkloadError.
    """
    parameters.check()
    rng = random.Random(f"shared_prefix/{seed}")
    houses = prose.house_names(rng, parameters.groups)
    words = round(parameters.system_tokens * prose.WORDS_PER_TOKEN)
    conversations = []
    for group, house in enumerate(houses):
        system = _Message("system", prose.rule_book(rng, house, words))
        # How users open and what they ask first tells them apart, as long as that suffices.
        exchanges = prose.topic_of(house).exchanges
        firsts = list(itertools.product(prose.OPENINGS, exchanges))
        rng.shuffle(firsts)
        for user in range(parameters.users):
            opening, first = firsts[user % len(firsts)]
            others = [exchange for exchange in exchanges if exchange != first]
            order = [first, *rng.sample(others, len(others))]
            conversations.append(
                Conversation(
                    session=f"g{group}-u{user}",
                    group=f"g{group}",
                    turns=_turns(rng, parameters, model, system, opening, order),
                )
            )
    return conversations


def _turns(
    rng: random.Random,
    parameters: SharedPrefix,
    model: str,
    system: _Message,
    opening: str,
    order: list[tuple[str, str]],
) -> list[bytes]:
    history = [system]
    bodies = []
    for turn in range(parameters.turns):
        question, answer = order[turn % len(order)]
        begin = rng.choice(prose.FOLLOW_UPS) if turn else opening
        history.append(_Message("user", f"{begin} {question}"))
        bodies.append(
            msgspec.json.encode(
                _ChatBody(
                    model=model,
                    messages=history,
                    max_tokens=parameters.output_tokens,
                    temperature=0.0,
                    stream=True,
                    stream_options=_StreamOptions(),
                    ignore_eos=parameters.ignore_eos,
                )
            )
        )
        history.append(_Message("assistant", answer))
    return bodies
