"""LMCache agent traces: the prompts themselves, growing turn by turn.

One JSON object a line: `timestamp` (µs), `input` (the whole prompt), `output`, `session_id`.
Tokens are estimated from characters, because the tokenizer of the model that will answer is not
at hand. Source: LMCache/lmcache-agent-trace.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from loadgen.traces.files import Line
from loadgen.traces.records import TraceRequest, check_lengths, decode_line

BLOCK_TOKENS = 16
CHARACTERS_PER_TOKEN = 4
"""Of English text and code, roughly, for vocabularies of 50,000 tokens and more."""


class _Row(msgspec.Struct, frozen=True):
    timestamp: float
    input: str
    output: str
    session_id: int | str


def read(lines: Sequence[Line]) -> list[TraceRequest]:
    """Requests in the order of arrival, which counts from the earliest. Raises TraceError."""
    rows = []
    for line in lines:
        row = decode_line(line, _Row, "lmcache")
        check_lengths(line, row.timestamp, len(row.input), len(row.output))
        rows.append(row)
    rows.sort(key=lambda row: row.timestamp)
    turns: Counter[str] = Counter()
    chunks = TextChunks()
    requests = []
    for row in rows:
        session = f"s{row.session_id}"
        requests.append(
            TraceRequest(
                arrival_s=row.timestamp / 1e6,
                session=session,
                turn=turns[session],
                prompt_tokens=estimated_tokens(row.input),
                output_tokens=estimated_tokens(row.output),
                hash_ids=chunks.ids(row.input),
                block_tokens=BLOCK_TOKENS,
                text=row.input,
            )
        )
        turns[session] += 1
    return requests


def estimated_tokens(text: str) -> int:
    """At least 1."""
    return max(1, -(-len(text) // CHARACTERS_PER_TOKEN))


class TextChunks:
    """Chained ids of a text's chunks of `BLOCK_TOKENS` estimated tokens."""

    def __init__(self) -> None:
        self._ids: dict[tuple[int, str], int] = {}

    def ids(self, text: str) -> tuple[int, ...]:
        """Equal ids mean texts that are equal up to the end of that chunk."""
        size = BLOCK_TOKENS * CHARACTERS_PER_TOKEN
        parent, found = -1, []
        for begin in range(0, len(text), size):
            key = (parent, text[begin : begin + size])
            parent = self._ids.setdefault(key, len(self._ids))
            found.append(parent)
        return tuple(found)
