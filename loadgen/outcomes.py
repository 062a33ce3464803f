"""The outcome of one request and the times derived from it."""

from __future__ import annotations

from typing import Literal

import msgspec

Status = Literal["ok", "failed", "unfinished"]


class Outcome(msgspec.Struct, kw_only=True):
    """One request of one arm. Times are seconds after the arm's begin, on one clock.

    status          ok; failed (refused, an error event, no connection); unfinished (cut off
                    or timed out before its end)
    repeat          which replay of the arm it belongs to, from 0
    intended_s      when it was to be sent: latencies count from here
    sent_s          when the client began to send it
    first_token_s   when the first text came; of an answer without text, when it ended
    end_s           when the stream ended or failed
    prompt_tokens, cached_tokens, completion_tokens   as `usage` says, None where it does not
    request_id, worker, policy, predicted_hit_tokens, hit_tokens   as the response headers say
    itl_ms          gap before each token after the first; the gap before a chunk is divided
                    among the chunk's tokens
    """

    arm: str
    id: str
    session: str
    turn: int
    group: str
    intended_s: float
    repeat: int = 0
    status: Status = "unfinished"
    error: str = ""
    http_status: int = 0
    sent_s: float | None = None
    first_token_s: float | None = None
    end_s: float | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    request_id: str = ""
    worker: str = ""
    policy: str = ""
    predicted_hit_tokens: int | None = None
    hit_tokens: int | None = None
    finish_reason: str = ""
    text: str = ""
    itl_ms: list[float] = msgspec.field(default_factory=list)

    @property
    def lag_ms(self) -> float | None:
        """How late the client sent it: sent − intended."""
        return _between_ms(self.intended_s, self.sent_s)

    @property
    def ttft_ms(self) -> float | None:
        """Time to first token: first token − intended."""
        return _between_ms(self.intended_s, self.first_token_s)

    @property
    def e2e_ms(self) -> float | None:
        """End to end: end − intended; None of a request that did not end well."""
        return _between_ms(self.intended_s, self.end_s) if self.status == "ok" else None

    @property
    def tpot_ms(self) -> float | None:
        """Time per output token: (e2e − ttft) / (n − 1); None below two tokens."""
        if self.status != "ok" or self.completion_tokens is None or self.completion_tokens < 2:
            return None
        decode_ms = _between_ms(self.first_token_s, self.end_s)
        return None if decode_ms is None else decode_ms / (self.completion_tokens - 1)


class _Line(msgspec.Struct, kw_only=True):
    """A line of `requests.jsonl`."""

    arm: str
    repeat: int
    id: str
    session: str
    turn: int
    group: str
    status: Status
    error: str
    http_status: int
    request_id: str
    worker: str
    policy: str
    intended_s: float
    sent_s: float | None
    first_token_s: float | None
    end_s: float | None
    ttft_ms: float | None
    tpot_ms: float | None
    e2e_ms: float | None
    itl_max_ms: float | None
    prompt_tokens: int | None
    cached_tokens: int | None
    completion_tokens: int | None
    predicted_hit_tokens: int | None
    hit_tokens: int | None
    finish_reason: str
    text: str


def line_fields(outcome: Outcome) -> dict[str, object]:
    """The outcome's fields and the times derived from them, as `requests.jsonl` has them."""
    fields = {name: getattr(outcome, name, None) for name in _Line.__struct_fields__}
    fields["itl_max_ms"] = max(outcome.itl_ms, default=None)
    return fields


def outcome_line(outcome: Outcome) -> bytes:
    """The outcome as a line of `requests.jsonl`."""
    return msgspec.json.encode(msgspec.convert(line_fields(outcome), _Line)) + b"\n"


def _between_ms(start_s: float | None, end_s: float | None) -> float | None:
    return None if start_s is None or end_s is None else (end_s - start_s) * 1e3
