"""Requests as a simulated fleet takes them: tokens made from block ids, and block hashes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from cluster.blocks import Namespace, hash_blocks
from loadgen.ideal import Ideal
from loadgen.traces import TraceRequest

OUTPUT_TOKEN = 0xFFFF_FFFF
"""What simulated answers are made of. No prompt holds it: an answer is not asked for again, as
answers are not whose texts a trace does not have."""


class Asked(NamedTuple):
    """A request of a simulation.

    chain   hashes of its full blocks
    """

    id: str
    arrival_s: float
    trace: TraceRequest
    chain: Sequence[bytes]

    def packed(self) -> bytes:
        """The prompt's tokens, packed: every token of a block is the block's id."""
        return packed_tokens(self.trace)


def packed_tokens(request: TraceRequest) -> bytes:
    """Tokens that are equal exactly as far as the ids are: each block's are its id."""
    ids = np.array(request.hash_ids, dtype="<u4")
    return np.repeat(ids, request.block_tokens)[: request.prompt_tokens].tobytes()


def simulated_namespace(block_size: int) -> Namespace:
    """Of all block hashes of a simulation."""
    return Namespace(
        weights="simulated",
        tokenizer="simulated",
        kv_dtype="none",
        block_size=block_size,
        positions="none",
    )


def asked_of(requests: Iterable[TraceRequest], block_size: int) -> list[Asked]:
    """The requests with their block hashes, in order of arrival."""
    root = simulated_namespace(block_size).root()
    known: dict[bytes, bytes] = {}  # one object for equal hashes: they are held by many
    asked = []
    for number, request in enumerate(sorted(requests, key=lambda r: r.arrival_s)):
        hashes = hash_blocks(root, packed_tokens(request), block_size)
        chain = [known.setdefault(block, block) for block in hashes]
        asked.append(Asked(f"q{number}", request.arrival_s, request, chain))
    return asked


def ideal_of(asked: Sequence[Asked], block_size: int) -> Ideal:
    """What an infinite cache of whole blocks that sees the prompts in this order would reuse."""
    seen: set[bytes] = set()
    total = reused = 0
    for request in asked:
        limit = (request.trace.prompt_tokens - 1) // block_size
        hits = 0
        for block in request.chain[:limit]:
            if block not in seen:
                break
            hits += 1
        seen.update(request.chain)
        total += request.trace.prompt_tokens
        reused += hits * block_size
    return Ideal(reused / total if total else 0.0, total - reused)
