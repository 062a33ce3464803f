"""Azure LLM inference traces of 2023 and 2024: lengths only, no prefixes (Splitwise, ISCA'24).

CSV with the header `TIMESTAMP,ContextTokens,GeneratedTokens`. Timestamps are UTC, such as
`2023-11-16 18:15:46.6805900` (2023) or `2024-05-10 00:00:00.009930+00:00` (2024). No prompt is
taken to share a prefix with another.
Source: Azure/AzurePublicDataset.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime

from loadgen.traces.files import Line
from loadgen.traces.records import TraceError, TraceRequest, check_lengths

BLOCK_TOKENS = 16
HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"

_STAMP = re.compile(r"([^.+Z]+)(?:\.(\d+))?(Z|[+-]\d{2}:\d{2})?")
"""Date and time to the second, the fraction's digits, and the offset from UTC."""


def read(lines: Sequence[Line]) -> list[TraceRequest]:
    """Requests in the order of the lines; arrivals count from the earliest. Raises TraceError."""
    if not lines or lines[0].data.decode(errors="replace").strip() != HEADER:
        raise TraceError(
            f"{lines[0].place if lines else 'the file'}: an azure trace begins with the header "
            f"{HEADER}; set another --format"
        )
    requests: list[TraceRequest] = []
    next_id = 0
    for line in lines[1:]:
        if line.number == 1 and line.data == lines[0].data:
            continue  # the header of a further file
        time, prompt_tokens, output_tokens = _row(line)
        check_lengths(line, time, prompt_tokens, output_tokens)
        blocks = -(-prompt_tokens // BLOCK_TOKENS)
        requests.append(
            TraceRequest(
                arrival_s=time,
                session=f"r{len(requests)}",
                turn=0,
                prompt_tokens=prompt_tokens,
                output_tokens=output_tokens,
                hash_ids=tuple(range(next_id, next_id + blocks)),
                block_tokens=BLOCK_TOKENS,
            )
        )
        next_id += blocks
    return requests


def _row(line: Line) -> tuple[float, int, int]:
    try:
        stamp, prompt, output = line.data.decode().strip().split(",")
        parts = _STAMP.fullmatch(stamp)
        if parts is None:
            raise ValueError(f"not a timestamp: {stamp!r}")
        # datetime reads six decimals of a second, the 2023 trace has seven.
        whole, fraction, offset = parts.groups()
        seconds = datetime.fromisoformat(f"{whole}{offset or '+00:00'}").timestamp()
        return seconds + float(f"0.{fraction or 0}"), int(prompt), int(output)
    except ValueError as error:
        raise TraceError(
            f"{line.place}: not a row of {HEADER} ({error}); fix the line or set another --format"
        ) from error
