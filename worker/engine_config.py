"""Sizes and limits of one engine."""

from __future__ import annotations

import msgspec


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of one engine. Raises ValueError where they cannot work.

    block_size       tokens in a block
    capacity_blocks  usable KV blocks, the reserved block 0 not counted
    context_tokens   longest prompt + output of one sequence
    max_batch_size   sequences that may run at once
    token_budget     tokens computed in one step at most
    chunk_tokens     prefill tokens of one sequence in one step at most; 0 is the whole budget
    max_waiting      requests that may wait
    eos_token_ids    tokens that end an answer
    cache_share      share of the pool that may hold cached blocks which no sequence references
    pin_share        share of the pool for pinned prefixes; no sequence may count on it
    embedding_rows   token ids are below this; 0 where the runner takes any
    """

    block_size: int
    capacity_blocks: int
    context_tokens: int
    max_batch_size: int
    token_budget: int
    chunk_tokens: int = 0
    max_waiting: int = 1024
    eos_token_ids: list[int] = msgspec.field(default_factory=list)
    prefix_caching: bool = True
    cache_share: float = 1.0
    pin_share: float = 0.0
    embedding_rows: int = 0

    def __post_init__(self) -> None:
        for name in (
            "block_size",
            "capacity_blocks",
            "context_tokens",
            "max_batch_size",
            "token_budget",
            "max_waiting",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.chunk_tokens < 0:
            raise ValueError(f"chunk_tokens must not be negative, got {self.chunk_tokens}")
        if not 0.0 <= self.cache_share <= 1.0:
            raise ValueError(f"cache_share must be between 0 and 1, got {self.cache_share:g}")
        if not 0.0 <= self.pin_share < 1.0:
            raise ValueError(f"pin_share must be at least 0 and below 1, got {self.pin_share:g}")

    @property
    def chunk_limit(self) -> int:
        """`chunk_tokens`, or the whole budget where it is 0."""
        return min(self.chunk_tokens or self.token_budget, self.token_budget)

    @property
    def keep_limit(self) -> int:
        """Blocks that may be cached while no sequence references them."""
        return int(self.cache_share * self.capacity_blocks)

    @property
    def pin_limit(self) -> int:
        """Blocks that may be pinned."""
        return int(self.pin_share * self.capacity_blocks)

    @property
    def sequence_limit(self) -> int:
        """Tokens that one sequence may have: the context, or all that a smaller pool can give."""
        usable_blocks = self.capacity_blocks - self.pin_limit
        return min(self.context_tokens, usable_blocks * self.block_size)
