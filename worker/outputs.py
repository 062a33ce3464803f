"""What an engine tells: news of requests, and what changed in its cache."""

from __future__ import annotations

import msgspec

from cluster.protocol import ColdReport


class Output(msgspec.Struct, gc=False):
    """News of one request.

    token_ids      new tokens, the end token included; the next step reads the list too
    finish_reason  "" while it runs; else "stop" (end token), "length" (max_tokens or the end of
                   the context), or "error". Exactly one output of a request has one; a
                   cancelled request gets none
    hit_tokens     prompt tokens reused when it was first admitted
    error          what went wrong, for "error"
    """

    request_id: str
    token_ids: list[int]
    finish_reason: str = ""
    hit_tokens: int = 0
    error: str = ""


class Changes(msgspec.Struct, kw_only=True):
    """Net change since the last take: `stored` and `evicted` are disjoint, parents come first in
    `stored`, and a hash both stored and evicted in between is in neither.

    received   ids of the requests added since the last take
    cold       the same of the cold tiers, where there are any; `stored` and `evicted` are of the
               device
    """

    stored: list[bytes]
    evicted: list[bytes]
    received: list[str]
    cold: ColdReport | None = None
