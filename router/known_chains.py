"""Block hashes of prompts that begin as earlier ones did: only what is new is hashed."""

from __future__ import annotations

from cluster.blocks import hash_blocks

RUN_TOKENS = 256
"""Tokens that are looked up together. Looking up a run takes a thirtieth of hashing it."""

KEPT_RUNS = 16_384
"""Some 2 KB each where a block has 16 tokens: 33 MB for 4 million tokens."""


class KnownChains:
    """Hashes of blocks by what they continue and their tokens. Thread-safe.

    Runs are kept in two generations: those used since the younger one began, and those before it,
    which are dropped when the younger one is full.
    """

    def __init__(self, kept_runs: int = KEPT_RUNS) -> None:
        self._generation = kept_runs // 2
        self._young: dict[bytes, list[bytes]] = {}
        self._old: dict[bytes, list[bytes]] = {}

    def hash_blocks(self, root: bytes, packed: bytes, block_size: int) -> list[bytes]:
        """As `cluster.blocks.hash_blocks`."""
        step = 4 * block_size * max(1, RUN_TOKENS // block_size)
        whole = len(packed) - len(packed) % step
        parent, hashes = root, []
        for start in range(0, whole, step):
            run = packed[start : start + step]
            key = parent + run
            known = self._young.get(key)
            if known is None:
                known = self._old.get(key) or hash_blocks(parent, run, block_size)
                self._keep(key, known)
            hashes += known
            parent = known[-1]
        if whole < len(packed):
            hashes += hash_blocks(parent, packed[whole:], block_size)
        return hashes

    def _keep(self, key: bytes, run: list[bytes]) -> None:
        if len(self._young) >= self._generation:
            self._old, self._young = self._young, {}
        self._young[key] = run
