"""What a pool remembers in Redis beyond its workers' lives.

    stem:{<pool>}:weights   hash   worker.model -> GivenWeights (JSON); does not expire

A worker that replaces another has the settings of the first day. Where the pool has been given
other weights since, this record says which.
"""

from __future__ import annotations

import msgspec

from cluster.bus import BusKeys
from cluster.redis_client import connect


class GivenWeights(msgspec.Struct, frozen=True, kw_only=True):
    """The weights that a pool's workers have instead of those in their settings.

    model  directory or file on the workers' machines
    name   under which the model is served, as before
    """

    model: str
    name: str


class PoolRecord:
    """Reads and writes the record. Every method raises RedisError, OSError or TimeoutError where
    Redis cannot be used."""

    def __init__(self, redis_url: str, pool: str, *, timeout_s: float) -> None:
        self._keys = BusKeys(pool)
        self._weights = self._keys.prefix + "weights"
        self._redis = connect(redis_url, timeout_s=timeout_s, key=self._weights)

    async def weights(self, configured: str) -> GivenWeights | None:
        """What workers with `worker.model = configured` have to load; None: just that."""
        raw = await self._redis.hget(self._weights, configured)
        return None if raw is None else msgspec.json.decode(raw, type=GivenWeights)

    async def give_weights(self, configured: str, given: GivenWeights) -> None:
        """Have workers with these settings load other weights from now on."""
        await self._redis.hset(self._weights, configured, msgspec.json.encode(given).decode())

    async def last_epoch(self, worker: str) -> int:
        """Epoch of the card under this name, 0 where there is none."""
        raw = await self._redis.hget(self._keys.card(worker), "epoch")
        return 0 if raw is None else int(raw)

    async def close(self) -> None:
        """Close the connection."""
        await self._redis.aclose()
