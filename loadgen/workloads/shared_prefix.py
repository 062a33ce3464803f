"""Groups of users that share a long system prompt, each user with a short chat in plain English."""

from __future__ import annotations

import itertools
import random
from typing import Annotated

from msgspec import Meta

from loadgen import prose
from loadgen.workloads.conversation import (
    Conversation,
    Ids,
    Role,
    Segment,
    Turn,
    Workload,
    draw,
    zipf_weights,
)


class SharedPrefix(Workload, frozen=True, kw_only=True, tag="shared_prefix"):
    """Users ask the assistants of several houses; all users of a house share its rule book.

    Lengths are estimates (`prose.WORDS_PER_TOKEN`), because the model's tokenizer is not at hand.
    About `groups * system_tokens` tokens are shared; make that larger than one worker's cache
    and smaller than all of them together, and it shows what routing is worth.
    """

    groups: Annotated[int, Meta(description="System prompts.")] = 8
    users: Annotated[int, Meta(description="Users in a group, on average.")] = 3
    turns: Annotated[int, Meta(description="Questions of a user.")] = 4
    system_tokens: Annotated[int, Meta(description="Tokens of a system prompt.")] = 800
    output_tokens: Annotated[int, Meta(description="Tokens of an answer.")] = 32
    think_time_s: Annotated[float, Meta(description="Pause between two turns.")] = 0.0
    zipf: Annotated[
        float, Meta(description="Exponent of the groups' popularity; 0: all alike.")
    ] = 0.0
    ignore_eos: Annotated[bool, Meta(description="Let every answer run to its full length.")] = (
        False
    )

    def conversations(self, seed: int) -> list[Conversation]:
        """`groups * users` of them. Raises WorkloadError."""
        self.need(1, "groups", "users", "turns", "output_tokens")
        self.need(0, "system_tokens", "think_time_s", "zipf")
        rng = random.Random(f"shared_prefix/{seed}")
        houses = prose.house_names(rng, self.groups)
        words = round(self.system_tokens * prose.WORDS_PER_TOKEN)
        ids = Ids()
        conversations = []
        for group, (house, users) in enumerate(zip(houses, self._users(rng), strict=True)):
            system = _segment(ids, "system", prose.rule_book(rng, house, words))
            # How users open and what they ask first tells them apart, as long as that suffices.
            exchanges = prose.topic_of(house).exchanges
            firsts = list(itertools.product(prose.OPENINGS, exchanges))
            rng.shuffle(firsts)
            for user in range(users):
                opening, first = firsts[user % len(firsts)]
                others = [exchange for exchange in exchanges if exchange != first]
                order = [first, *rng.sample(others, len(others))]
                conversations.append(
                    Conversation(
                        session=f"g{group}-u{user}",
                        group=f"g{group}",
                        turns=self._turns(rng, ids, system, opening, order),
                    )
                )
        return conversations

    def _users(self, rng: random.Random) -> list[int]:
        """Users of each group."""
        if not self.zipf:
            return [self.users] * self.groups
        drawn = draw(rng, zipf_weights(self.groups, self.zipf), self.groups * self.users)
        return [drawn.count(group) for group in range(self.groups)]

    def _turns(
        self,
        rng: random.Random,
        ids: Ids,
        system: Segment,
        opening: str,
        order: list[tuple[str, str]],
    ) -> list[Turn]:
        history: tuple[Segment, ...] = (system,)
        turns = []
        for turn in range(self.turns):
            question, answer = order[turn % len(order)]
            begin = rng.choice(prose.FOLLOW_UPS) if turn else opening
            history = (*history, _segment(ids, "user", f"{begin} {question}"))
            turns.append(
                Turn(
                    history,
                    self.output_tokens,
                    self.think_time_s if turn else 0.0,
                    self.ignore_eos,
                )
            )
            history = (*history, _segment(ids, "assistant", answer))
        return turns


def _segment(ids: Ids, role: Role, text: str) -> Segment:
    tokens = max(1, round(len(text.split()) / prose.WORDS_PER_TOKEN))
    return Segment(role, ids.of(text), tokens, text)
