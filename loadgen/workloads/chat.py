"""Multi-turn chats with think times: prompts that grow by what was asked and answered."""

from __future__ import annotations

import random
from typing import Annotated, ClassVar

from msgspec import Meta

from loadgen.workloads.conversation import Conversation, Ids, Segment, Workload, growing_turns


class Chat(Workload, frozen=True, kw_only=True, tag="chat"):
    """Users under one system prompt; lengths and pauses vary around their means.

    Locality can pay in two ways: the system prompt that all share, and each user's own history.
    """

    paced: ClassVar[bool] = True

    users: Annotated[int, Meta(description="Conversations.")] = 50
    turns: Annotated[int, Meta(description="Turns of a conversation.")] = 6
    system_tokens: Annotated[int, Meta(description="Tokens of the shared system prompt.")] = 400
    input_tokens: Annotated[int, Meta(description="Tokens that a user adds, on average.")] = 100
    output_tokens: Annotated[int, Meta(description="Tokens of an answer, on average.")] = 150
    think_time_s: Annotated[float, Meta(description="Mean pause between two turns.")] = 10.0

    def conversations(self, seed: int) -> list[Conversation]:
        """`users` of them. Raises WorkloadError."""
        self.need(1, "users", "turns", "input_tokens", "output_tokens")
        self.need(0, "system_tokens", "think_time_s")
        rng = random.Random(f"chat/{seed}")
        ids = Ids("chat", seed)
        system = Segment("system", ids.new(), self.system_tokens)
        history = (system,) if self.system_tokens else ()
        added = [self.input_tokens] * self.turns
        return [
            Conversation(
                f"u{user}",
                "all",
                growing_turns(rng, ids, history, added, self.output_tokens, self.think_time_s),
            )
            for user in range(self.users)
        ]
