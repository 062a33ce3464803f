"""Bounds the number of values in a JSON body before it is decoded.

Decoding holds the GIL for some 0.1 to 0.4 µs per value. A body of the admitted size can hold
millions of values, but no request needs more than some ten thousand: most of its size is text. The
values are counted by passes over the bytes, each of a few ms at most.
"""

from __future__ import annotations

from cluster.protocol import RequestError

CONTAINERS_PER_MESSAGE = 6
"""Objects and arrays of a message: itself, its list of parts, tool calls with a function each."""

MAX_STRINGS = 200_000
MAX_VALUES = 1_000_000
"""Elements of objects and arrays, such as the token ids of a prompt."""


def check_json_size(body: bytes, max_messages: int) -> None:
    """Refuse a body whose decoding would take too long. Raises RequestError (400)."""
    most = CONTAINERS_PER_MESSAGE * max_messages
    if len(body) <= most or _within(body, most):
        return  # even with the characters in texts counted, it is within the bounds
    if b"\\" in body:
        body = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    strings = body.count(b'"') // 2
    if strings > MAX_STRINGS:
        raise _refusal(f"{strings} strings: send at most {MAX_STRINGS}", max_messages)
    outside = b"".join(body.split(b'"')[::2])
    containers = outside.count(b"{") + outside.count(b"[")
    if containers > most:
        raise _refusal(f"{containers} objects and arrays: send at most {most}", max_messages)
    if outside.count(b",") > MAX_VALUES:
        raise _refusal(f"more than {MAX_VALUES} values: send fewer", max_messages)


def _within(body: bytes, containers: int) -> bool:
    return (
        body.count(b"{") + body.count(b"[") <= containers
        and body.count(b",") <= MAX_VALUES
        and body.count(b'"') <= 2 * MAX_STRINGS
    )


def _refusal(what: str, max_messages: int) -> RequestError:
    return RequestError(
        f"the body holds {what}, in at most {max_messages} messages (gateway.max_messages)",
        code="too_many_values",
    )
