"""Whether Redis has memory for the pool's keys, judged by its INFO."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FULL_SHARE = 0.9
"""Of `maxmemory`: beyond it a Redis that evicts nothing is about to take no writes."""

REMEMBER_S = 60.0
"""Evictions are told of for so long."""


class MemoryWatch:
    """Compares one INFO with the one before."""

    def __init__(self) -> None:
        self._evicted: int | None = None
        self._evicting_until = 0.0
        self.warning = ""

    def look(self, info: Mapping[str, Any], now: float) -> None:
        """Set `warning` by the sections `memory` and `stats` of INFO. `now`: seconds, monotonic."""
        evicted = int(info.get("evicted_keys", 0))
        if self._evicted is not None and evicted > self._evicted:
            self._evicting_until = now + REMEMBER_S
        self._evicted = evicted
        limit, used = int(info.get("maxmemory", 0)), int(info.get("used_memory", 0))
        policy = str(info.get("maxmemory_policy", "noeviction"))
        if now < self._evicting_until:
            self.warning = (
                f"Redis is full and evicts keys (maxmemory-policy {policy}, {evicted} so far): "
                "workers publish again what is lost; raise maxmemory, or give the pool a Redis of "
                "its own"
            )
        elif limit and policy == "noeviction" and used >= FULL_SHARE * limit:
            self.warning = (
                f"Redis uses {used / limit:.0%} of its maxmemory and evicts nothing: beyond it, it "
                "takes no writes; raise maxmemory"
            )
        else:
            self.warning = ""
