"""One request of a trace, whatever format it was recorded in."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from loadgen.traces.files import Line


class TraceError(ValueError):
    """An invalid trace. The message names file, line and what to change."""


class TraceRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A recorded request.

    arrival_s       seconds after the trace's begin
    session         the conversation it belongs to; a request of its own where none is recorded
    turn            0, 1, 2, … within the session, by arrival
    prompt_tokens   length of the whole prompt, at least 1
    output_tokens   length of the answer, at least 1
    hash_ids        one id for each block of `block_tokens` prompt tokens, the last block may be
                    partial: `len == ceil(prompt_tokens / block_tokens)`. Ids are chained: equal
                    ids mean that the prompts are equal up to and including that block. Prompts
                    that share nothing have no id in common
    text            the prompt itself where the trace has it: then tokens are estimates
    kind            what the trace calls the request's type, "" where it does not
    """

    arrival_s: float
    session: str
    turn: int
    prompt_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...]
    block_tokens: int
    text: str | None = None
    kind: str = ""


T = TypeVar("T")


def decode_line(line: Line, kind: type[T], format_name: str) -> T:
    """A JSON line as `kind`. Raises TraceError."""
    try:
        return msgspec.json.decode(line.data, type=kind)
    except msgspec.DecodeError as error:
        raise TraceError(
            f"{line.place}: not a request of the {format_name} format ({error}); "
            "fix the line, or set another --format"
        ) from error


def check_lengths(line: Line, arrival: float, prompt_tokens: int, output_tokens: int) -> None:
    """Raises TraceError for what no request can have."""
    if not 0 <= arrival < float("inf"):
        raise TraceError(f"{line.place}: the timestamp {arrival} must not be negative")
    if prompt_tokens < 1 or output_tokens < 0:
        raise TraceError(
            f"{line.place}: a prompt has at least 1 token and an answer at least 0, "
            f"got {prompt_tokens} and {output_tokens}; remove the line"
        )


def check_blocks(line: Line, ids: tuple[int, ...], prompt_tokens: int, block_tokens: int) -> None:
    """Raises TraceError where the ids do not cover the prompt's full blocks."""
    full, partial = divmod(prompt_tokens, block_tokens)
    if not full <= len(ids) <= full + (partial > 0):
        raise TraceError(
            f"{line.place}: {prompt_tokens} tokens in blocks of {block_tokens} need {full} full "
            f"hash_ids{' and may have one partial' if partial else ''}, got {len(ids)}; mend the "
            "line, or say another --format"
        )
