"""The interface between the prefix cache and an eviction policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class BlockUse(NamedTuple):
    """A use of consecutive blocks by a sequence, as the policy sees it.

    now            time of the step, seconds on the caller's clock
    depth          index of the first block in its sequence; the others follow
    prompt_blocks  full blocks of the sequence's prompt, to compute the offset from its end
    request_type   kind of work of the request; "": unknown
    turn           1, 2, ... in a conversation; 0: unknown
    """

    now: float
    depth: int
    prompt_blocks: int
    request_type: str = ""
    turn: int = 0


class EvictionPolicy(Protocol):
    """A policy sees block numbers only. Pool and cache call it; it never calls them.

    `pool.last_used` is the time at which a block lost its last reference; a policy may also record
    later uses there. It does not change while the block is a leaf.
    """

    def used(self, blocks: Sequence[int], use: BlockUse) -> None:
        """A sequence stored these blocks, or found them cached."""
        ...

    def leaf(self, block: int) -> None:
        """The block may now be evicted."""
        ...

    def withdrawn(self, block: int) -> None:
        """The block may not be evicted any more: it is referenced again."""
        ...

    def victim(self, now: float) -> int:
        """Remove and return the leaf to evict. Called only while there is one."""
        ...

    def expired(self, now: float) -> int:
        """Remove and return a leaf that has expired although no request needs its block; 0 if there
        is none."""
        ...

    def clear(self) -> None:
        """No block is cached any more."""
        ...
