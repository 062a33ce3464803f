"""Alibaba Bailian traces (KVCacheInTheWild, ATC'25).

One JSON object a line: `chat_id`, `parent_chat_id` (−1 for the first turn), `timestamp` (s),
`input_length`, `output_length` (tokens), `type`, `turn`, `hash_ids` (chained ids of 16-token
blocks). A session is a tree of chats; its turns are counted by arrival.
Source: alibaba-edu/qwen-bailian-usagetraces-anon.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from loadgen.traces.files import Line
from loadgen.traces.records import TraceRequest, check_blocks, check_lengths, decode_line

BLOCK_TOKENS = 16


class _Row(msgspec.Struct, frozen=True):
    chat_id: int | str
    parent_chat_id: int | str
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]
    type: str = ""


def read(lines: Sequence[Line]) -> list[TraceRequest]:
    """Requests in the order of arrival. Raises TraceError."""
    rows = []
    for line in lines:
        row = decode_line(line, _Row, "bailian")
        check_lengths(line, row.timestamp, row.input_length, row.output_length)
        check_blocks(line, row.hash_ids, row.input_length, BLOCK_TOKENS)
        rows.append(row)
    rows.sort(key=lambda row: row.timestamp)
    root: dict[int | str, int | str] = {}
    turns: Counter[int | str] = Counter()
    requests = []
    for row in rows:
        # A parent from before the trace's begin is not there: its child begins the session.
        first = root.setdefault(row.chat_id, root.get(row.parent_chat_id, row.chat_id))
        requests.append(
            TraceRequest(
                arrival_s=row.timestamp,
                session=f"c{first}",
                turn=turns[first],
                prompt_tokens=row.input_length,
                output_tokens=row.output_length,
                hash_ids=row.hash_ids,
                block_tokens=BLOCK_TOKENS,
                kind=row.type,
            )
        )
        turns[first] += 1
    return requests
