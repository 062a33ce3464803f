"""A worker's published set of block hashes: the whole set, and the change since the last take."""

from __future__ import annotations

from collections.abc import Iterable

from cluster.blocks import join_hashes


class AnnouncedSet:
    """In order of storing, so that parents come before what continues them."""

    def __init__(self) -> None:
        self.whole: dict[bytes, None] = {}
        self._delta: dict[bytes, bool] = {}  # hash -> stored (True) or evicted (False)

    @property
    def changed(self) -> bool:
        """Whether there is anything to take."""
        return bool(self._delta)

    def update(self, stored: Iterable[bytes], evicted: Iterable[bytes]) -> None:
        """Evictions come first. Storing a stored block or evicting an absent one is no error."""
        whole, delta = self.whole, self._delta
        for block in evicted:
            if block in whole:
                del whole[block]
                if delta.get(block):
                    del delta[block]
                else:
                    delta[block] = False
        for block in stored:
            if block not in whole:
                whole[block] = None
                if delta.get(block) is False:
                    del delta[block]
                else:
                    delta[block] = True

    def take(self) -> tuple[bytes, bytes]:
        """The net stored and evicted hashes since the last take, joined; the two are disjoint."""
        delta, self._delta = self._delta, {}
        return (
            join_hashes([block for block, is_stored in delta.items() if is_stored]),
            join_hashes([block for block, is_stored in delta.items() if not is_stored]),
        )

    def clear(self) -> None:
        """Forget all; nothing is left to take."""
        self.whole.clear()
        self._delta.clear()
