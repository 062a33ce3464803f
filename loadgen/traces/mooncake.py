"""Mooncake traces (FAST'25: conversation, toolagent, synthetic).

One JSON object a line: `timestamp` (ms), `input_length`, `output_length` (tokens), `hash_ids`
(chained ids of 512-token blocks, the last one partial). Sessions are not recorded.
Source: kvcache-ai/Mooncake, FAST25-release/traces.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from loadgen.traces.files import Line
from loadgen.traces.records import TraceRequest, check_blocks, check_lengths, decode_line

BLOCK_TOKENS = 512


class _Row(msgspec.Struct, frozen=True):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


def read(lines: Sequence[Line]) -> list[TraceRequest]:
    """Requests in the order of the lines. Raises TraceError."""
    requests = []
    for index, line in enumerate(lines):
        row = decode_line(line, _Row, "mooncake")
        check_lengths(line, row.timestamp, row.input_length, row.output_length)
        check_blocks(line, row.hash_ids, row.input_length, BLOCK_TOKENS)
        requests.append(
            TraceRequest(
                arrival_s=row.timestamp / 1e3,
                session=f"r{index}",
                turn=0,
                prompt_tokens=row.input_length,
                output_tokens=row.output_length,
                hash_ids=row.hash_ids,
                block_tokens=BLOCK_TOKENS,
            )
        )
    return requests
