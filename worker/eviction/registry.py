"""Eviction policies by name, as settings spell them: "lru", "ttl:ttl_s=600"."""

from __future__ import annotations

from collections.abc import Callable

from worker.block_pool import BlockPool
from worker.eviction.base import EvictionPolicy
from worker.eviction.lfu import Lfu
from worker.eviction.lru import Lru
from worker.eviction.ttl import Ttl
from worker.eviction.workload_aware import WorkloadAware

MakePolicy = Callable[[BlockPool], EvictionPolicy]

POLICIES: dict[str, tuple[Callable[..., EvictionPolicy], dict[str, float]]] = {
    "lru": (Lru, {}),
    "lfu": (Lfu, {}),
    "ttl": (Ttl, {"ttl_s": 600.0}),
    "workload_aware": (WorkloadAware, {}),
}
"""Name -> factory of the policy for a pool, and its parameters with their defaults."""


def parse_eviction(text: str) -> MakePolicy:
    """Factory of the policy that the text describes.

    Raises ValueError for an unknown name, an unknown parameter or an invalid value.
    """
    name, _, rest = text.strip().partition(":")
    if name not in POLICIES:
        raise ValueError(f"unknown eviction policy {name!r}; use one of {', '.join(POLICIES)}")
    make, defaults = POLICIES[name]
    fields = dict(defaults)
    for part in rest.split(",") if rest else []:
        key, equals, value = part.strip().partition("=")
        if not equals or key not in defaults:
            known = ", ".join(f"{key}={default:g}" for key, default in defaults.items())
            raise ValueError(
                f"the eviction policy {name} has no parameter {part!r}; it has {known or 'none'}"
            )
        try:
            fields[key] = float(value)
        except ValueError as error:
            raise ValueError(
                f"{key} of the eviction policy {name} must be a number, got {value!r}"
            ) from error
    make(BlockPool(1), **fields)  # an invalid value fails here
    return lambda pool: make(pool, **fields)
