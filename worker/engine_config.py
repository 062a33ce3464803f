"""Sizes and limits of one engine."""

from __future__ import annotations

import msgspec


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes and limits of one engine. Raises ValueError if they are invalid.

    block_size       tokens per block
    capacity_blocks  usable KV blocks, the reserved block 0 not counted
    context_tokens   longest prompt + output of one sequence
    max_batch_size   maximum of running sequences
    token_budget     maximum of tokens computed in one step
    chunk_tokens     maximum of prefill tokens per sequence and step; 0: the whole budget
    max_waiting      maximum of waiting requests
    eos_token_ids    tokens that end an answer
    cache_share      share of the pool that may hold cached blocks which no sequence references
    pin_share        share of the pool for pinned prefixes; not available to sequences
    embedding_rows   token ids must be below this; 0: the runner takes any
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
        """`chunk_tokens`, or the whole budget if it is 0."""
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
        """Maximum of tokens in one sequence: the context, or less if the pool is smaller."""
        usable_blocks = self.capacity_blocks - self.pin_limit
        return min(self.context_tokens, usable_blocks * self.block_size)
