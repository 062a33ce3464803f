"""The faults, a module per part of the system. Importing them registers them, in this order."""

from tests.chaos.faults import (  # isort: skip
    workers,
    ray,
    redis,
    gateways,
    overload,
    clients,
    failing,
    weights,
    machine,
    soak,
)

ON_REQUEST = frozenset({"soak"})
"""Faults that run only when they are named."""

__all__ = [
    "ON_REQUEST",
    "clients",
    "failing",
    "gateways",
    "machine",
    "overload",
    "ray",
    "redis",
    "soak",
    "weights",
    "workers",
]
