"""A request inside the engine: its tokens, how many are computed, and where their KV is."""

from __future__ import annotations

import enum
import sys
from array import array

from cluster.blocks import split_hashes
from worker.eviction.base import BlockUse
from worker.messages import EngineRequest

BIG_ENDIAN = sys.byteorder == "big"


class Status(enum.Enum):
    """Stage of a sequence. A preempted sequence waits again."""

    WAITING = "waiting"
    RUNNING = "running"
    ENDED = "ended"


class Sequence:
    """One request with its state. Only the scheduler writes to it.

    ```
    tokens       |<------------ prompt ------------>|<----- output ----->|
                 |<-- computed_tokens: KV is in the pool -->|<- to come ->|
    block_table  | b0 | b1 | b2 | ...            whole blocks, may be longer
    hashes       | h0 | h1 | h2 | ...            full blocks only
    settled      blocks [0, settled_blocks) are full and were offered to the cache
    ```

    The newest output token is never computed: it is the input of the next step.

    limit_tokens     maximum of prompt and output tokens
    order            1, 2, 3, … in order of arrival
    priority         lower ones start first
    pending_tokens   prefill tokens still to compute: exact while running, an estimate without
                     cached tokens while waiting; 0 when it only decodes
    publishes        whether its next full blocks may be cached
    held_for         hash of the block, computed by another sequence or loaded, that it waits for
    loaded           whether a load was started for it since it was queued
    isolated         whether it neither reuses nor caches, because its logits were not finite
    starved          (tokens, steps): steps in which it did not fit in memory since its newest token
    due              step of `Decodes` after which it is due; 0 while it does not decode
    hit_tokens       prompt tokens reused at the first admission; None before it
    """

    __slots__ = (
        "block_table",
        "due",
        "hashes",
        "held_for",
        "hit_tokens",
        "isolated",
        "limit_tokens",
        "loaded",
        "order",
        "pending_tokens",
        "priority",
        "prompt_tokens",
        "publishes",
        "request",
        "request_id",
        "sampling",
        "settled_blocks",
        "starved",
        "status",
        "tokens",
    )

    def __init__(self, request: EngineRequest, order: int, sequence_limit: int) -> None:
        """`sequence_limit`: the engine's maximum of tokens in one sequence.

        Raises ValueError if the bytes of token ids or hashes are incomplete.
        """
        self.request = request
        self.request_id = request.request_id
        self.sampling = request.sampling
        self.order = order
        self.priority = request.priority
        # An array, not a list of objects: a ninth of the memory, packed already, and the garbage
        # collector has nothing to scan in hundreds of long sequences.
        self.tokens = array("I")
        self.tokens.frombytes(request.token_ids)
        self.prompt_tokens = len(self.tokens)
        self.tokens.frombytes(request.output_ids)
        if BIG_ENDIAN:
            self.tokens.byteswap()
        self.limit_tokens = min(self.prompt_tokens + request.sampling.max_tokens, sequence_limit)
        self.hashes: list[bytes] = split_hashes(request.block_hashes)
        self.block_table: list[int] = []
        self.settled_blocks = 0
        self.pending_tokens = 0
        self.publishes = False
        self.held_for: bytes | None = None
        self.loaded = False
        self.isolated = False
        self.starved = (0, 0)
        self.due = 0
        self.hit_tokens: int | None = None
        self.status = Status.WAITING

    @property
    def computed_tokens(self) -> int:
        """Leading tokens whose KV is in the pool; 0 unless running.

        Not stored, so that a decode changes only the tokens: all tokens are computed except the
        pending ones or, without pending ones, the newest.
        """
        if self.status is not Status.RUNNING:
            return 0
        return len(self.tokens) - (self.pending_tokens or 1)

    @property
    def output_tokens(self) -> int:
        """Tokens sampled so far."""
        return len(self.tokens) - self.prompt_tokens

    def starve(self) -> int:
        """Count a step in which it did not fit in memory; how many since its newest token."""
        tokens, steps = self.starved
        self.starved = len(self.tokens), steps + 1 if tokens == len(self.tokens) else 1
        return self.starved[1]

    def packed(self) -> bytes:
        """All tokens, packed as `pack_tokens` does: little-endian u32."""
        if len(self.tokens) == self.prompt_tokens:
            return self.request.token_ids
        tokens = self.tokens
        if BIG_ENDIAN:
            tokens = tokens[:]
            tokens.byteswap()
        return tokens.tobytes()

    def packed_block(self, index: int, block_size: int) -> bytes:
        """The tokens of full block `index`, packed."""
        start = index * block_size
        end = start + block_size
        if end <= self.prompt_tokens:
            return self.request.token_ids[4 * start : 4 * end]
        tokens = self.tokens[start:end]
        if BIG_ENDIAN:
            tokens.byteswap()
        return tokens.tobytes()

    def use(self, now: float, depth: int, block_size: int) -> BlockUse:
        """Description of the use of its block at `depth` for an eviction policy."""
        request = self.request
        blocks = self.prompt_tokens // block_size
        return BlockUse(now, depth, blocks, request.request_type, request.turn)

    def parent_key(self, index: int) -> bytes:
        """Parent of block `index`: the hash before it, or the namespace root at index 0."""
        return self.hashes[index - 1] if index else self.request.namespace_root
