"""Agent loops: a long context that grows by short actions and long tool outputs."""

from __future__ import annotations

import random
from typing import Annotated, ClassVar

from msgspec import Meta

from loadgen.workloads.conversation import Conversation, Ids, Segment, Workload, growing_turns


class Agent(Workload, frozen=True, kw_only=True, tag="agent"):
    """Tasks under one prompt that describes the tools; each step answers, then reads a tool.

    Nearly all of a step's prompt is the prompt of the step before: whoever has that computes
    little. Tool outputs are user messages, because not every chat template knows a tool's role.
    """

    paced: ClassVar[bool] = True

    tasks: Annotated[int, Meta(description="Tasks, each an agent loop.")] = 20
    steps: Annotated[int, Meta(description="Model calls of a task.")] = 12
    system_tokens: Annotated[int, Meta(description="Tokens of the tools' description.")] = 1500
    input_tokens: Annotated[int, Meta(description="Tokens of a task, on average.")] = 300
    tool_tokens: Annotated[int, Meta(description="Tokens of a tool output, on average.")] = 400
    output_tokens: Annotated[int, Meta(description="Tokens of an action, on average.")] = 80
    think_time_s: Annotated[
        float, Meta(description="Mean time from one call to the next: the answer and the tool.")
    ] = 5.0

    def conversations(self, seed: int) -> list[Conversation]:
        """`tasks` of them. Raises WorkloadError."""
        self.need(1, "tasks", "steps", "input_tokens", "tool_tokens", "output_tokens")
        self.need(0, "system_tokens", "think_time_s")
        rng = random.Random(f"agent/{seed}")
        ids = Ids("agent", seed)
        system = Segment("system", ids.new(), self.system_tokens)
        history = (system,) if self.system_tokens else ()
        added = [self.input_tokens] + [self.tool_tokens] * (self.steps - 1)
        return [
            Conversation(
                f"a{task}",
                "all",
                growing_turns(rng, ids, history, added, self.output_tokens, self.think_time_s),
            )
            for task in range(self.tasks)
        ]
