"""The trap: one prefix that most requests share, which a greedy router sends to one worker."""

from __future__ import annotations

import random
from typing import Annotated

from msgspec import Meta

from loadgen.workloads.conversation import (
    Conversation,
    Ids,
    Segment,
    Turn,
    Workload,
    WorkloadError,
    around,
)


class HotPrefix(Workload, frozen=True, kw_only=True, tag="hot_prefix"):
    """A share of the requests begins with one prefix, the others share nothing.

    Whoever follows the longest match alone puts the hot share on one worker: look at imbalance.
    """

    num_prompts: Annotated[int, Meta(description="Requests.")] = 200
    hot_share: Annotated[float, Meta(description="Share of requests with the hot prefix.")] = 0.8
    prefix_tokens: Annotated[int, Meta(description="Tokens of the hot prefix.")] = 1000
    input_tokens: Annotated[int, Meta(description="Tokens of a prompt's own part, mean.")] = 200
    output_tokens: Annotated[int, Meta(description="Tokens of an answer, on average.")] = 100

    def conversations(self, seed: int) -> list[Conversation]:
        """`num_prompts` of one turn. Raises WorkloadError."""
        self.need(1, "num_prompts", "prefix_tokens", "input_tokens", "output_tokens")
        if not 0 <= self.hot_share <= 1:
            raise WorkloadError(f"hot_share must lie between 0 and 1, got {self.hot_share}")
        rng = random.Random(f"hot_prefix/{seed}")
        ids = Ids()
        hot = ids.new()
        conversations = []
        for number in range(self.num_prompts):
            is_hot = rng.random() < self.hot_share
            # The others are as long, so that only sharing tells them apart.
            prefix = Segment("user", hot if is_hot else ids.new(), self.prefix_tokens)
            own = Segment("user", ids.new(), around(rng, self.input_tokens))
            turn = Turn((prefix, own), around(rng, self.output_tokens))
            conversations.append(Conversation(f"h{number}", "hot" if is_hot else "cold", [turn]))
        return conversations
