"""The control: prompts that share nothing, where no routing by prefix can help."""

from __future__ import annotations

import random
from typing import Annotated

from msgspec import Meta

from loadgen.workloads.conversation import Conversation, Ids, Segment, Turn, Workload, around


class NoSharing(Workload, frozen=True, kw_only=True, tag="no_sharing"):
    """Every prompt differs from its first token on.

    A policy that looks faster here than one that balances is not faster because of prefixes.
    """

    num_prompts: Annotated[int, Meta(description="Requests.")] = 200
    input_tokens: Annotated[int, Meta(description="Tokens of a prompt, on average.")] = 800
    output_tokens: Annotated[int, Meta(description="Tokens of an answer, on average.")] = 100

    def conversations(self, seed: int) -> list[Conversation]:
        """`num_prompts` of one turn. Raises WorkloadError."""
        self.need(1, "num_prompts", "input_tokens", "output_tokens")
        rng = random.Random(f"no_sharing/{seed}")
        ids = Ids()
        return [
            Conversation(
                f"n{number}",
                f"n{number}",
                [
                    Turn(
                        (Segment("user", ids.new(), around(rng, self.input_tokens)),),
                        around(rng, self.output_tokens),
                    )
                ],
            )
            for number in range(self.num_prompts)
        ]
