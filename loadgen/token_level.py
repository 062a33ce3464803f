"""A workload as block ids, the form that traces have: what a simulation runs on."""

from __future__ import annotations

from collections.abc import Sequence

from loadgen.arrivals import Arrival
from loadgen.traces import TraceRequest
from loadgen.workloads import Segment


def trace_of(arranged: Sequence[Arrival], block_tokens: int) -> list[TraceRequest]:
    """The requests as a trace with blocks of `block_tokens` tokens; exact, token by token."""
    chain = Chain(block_tokens)
    return [
        TraceRequest(
            arrival_s=arrival.at_s,
            session=arrival.conversation.session,
            turn=arrival.turn,
            prompt_tokens=arrival.asked.prompt_tokens,
            output_tokens=arrival.asked.output_tokens,
            hash_ids=chain.ids(arrival.asked.prompt),
            block_tokens=block_tokens,
            kind=arrival.conversation.group,
        )
        for arrival in arranged
    ]


class Chain:
    """Chained ids of blocks of segments: equal ids mean equal prompts up to and with the block."""

    def __init__(self, block_tokens: int) -> None:
        self._size = block_tokens
        self._ids: dict[tuple[int, tuple[tuple[int, int, int], ...]], int] = {}

    def ids(self, prompt: Sequence[Segment]) -> tuple[int, ...]:
        """One id for each block, of which the last one may be partial."""
        parent, found = -1, []
        for block in self._blocks(prompt):
            parent = self._ids.setdefault((parent, block), len(self._ids))
            found.append(parent)
        return tuple(found)

    def _blocks(self, prompt: Sequence[Segment]) -> list[tuple[tuple[int, int, int], ...]]:
        """The prompt's blocks as pieces `(segment id, begin, end)` within the segment."""
        blocks = []
        pieces: list[tuple[int, int, int]] = []
        room = self._size
        for segment in prompt:
            begin = 0
            while begin < segment.tokens:
                end = min(segment.tokens, begin + room)
                pieces.append((segment.id, begin, end))
                room -= end - begin
                begin = end
                if room == 0:
                    blocks.append(tuple(pieces))
                    pieces, room = [], self._size
        if pieces:
            blocks.append(tuple(pieces))
        return blocks
