"""The interface between the prefix cache and an eviction policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class BlockUse(NamedTuple):
    """Who uses blocks, told to the policy once for a whole run of them.

    now            time of the step, seconds on the caller's clock
    depth          index of the first block in its sequence; the others follow
    prompt_blocks  full blocks of the sequence's prompt, to tell the offset from its end
    request_type   kind of work that the request belongs to, "" where nobody said
    turn           1, 2, ... in a conversation; 0 where nobody said
    """

    now: float
    depth: int
    prompt_blocks: int
    request_type: str = ""
    turn: int = 0


class EvictionPolicy(Protocol):
    """A policy sees block numbers only; pool and cache call it, never the other way round.

    When a block lost its last reference stands in `pool.last_used`; a policy may note later uses
    there too. It does not change while the block is a leaf.
    """

    def used(self, blocks: Sequence[int], use: BlockUse) -> None:
        """A sequence stored these blocks, or found them cached."""
        ...

    def leaf(self, block: int) -> None:
        """The block may now be evicted."""
        ...

    def withdrawn(self, block: int) -> None:
        """It may not any longer: it is referenced again."""
        ...

    def victim(self, now: float) -> int:
        """The leaf to evict now; it is a leaf no more. Called only while there is one."""
        ...

    def expired(self, now: float) -> int:
        """A leaf that is not worth keeping though nobody needs its block, and a leaf no more; 0
        where there is none."""
        ...

    def clear(self) -> None:
        """No block is cached any more."""
        ...
