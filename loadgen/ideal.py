"""What a cache that never forgets could reuse: the bound that hit ratios are read against."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence

import msgspec

from loadgen.requests import Request, prompt_text


class Ideal(msgspec.Struct, frozen=True):
    """One infinite cache that sees every request of the file, in order.

    cached_token_ratio   share of prompt tokens that an earlier prompt already holds
    distinct_tokens      prompt tokens that remain: the size of the working set

    Both are estimates: shares are taken in bytes of text and weighted with the measured prompt
    tokens; whole blocks, the generated answers and requests still in flight are not looked at.
    """

    cached_token_ratio: float
    distinct_tokens: int


def shared_shares(requests: Sequence[Request]) -> list[float]:
    """For each request the share of its prompt's bytes that begins an earlier prompt, 0 to 1.

    In the sorted order of the earlier prompts, the longest common prefix is with a neighbour.
    """
    earlier: list[bytes] = []
    shares = []
    for request in requests:
        text = prompt_text(request)
        at = bisect_left(earlier, text)
        common = max(
            (_common(text, other) for other in earlier[max(0, at - 1) : at + 1]), default=0
        )
        shares.append(common / len(text) if text else 0.0)
        earlier.insert(at, text)
    return shares


def ideal(requests: Sequence[Request], prompt_tokens: Mapping[str, int]) -> Ideal | None:
    """The bound, with prompt tokens by request id as measured; None where none were."""
    total = reused = 0.0
    for request, share in zip(requests, shared_shares(requests), strict=True):
        tokens = prompt_tokens.get(request.id, 0)
        total += tokens
        reused += tokens * share
    return Ideal(reused / total, round(total - reused)) if total else None


def _common(one: bytes, other: bytes) -> int:
    """Length of the longest common prefix, by bisection: slices compare at the speed of C."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
