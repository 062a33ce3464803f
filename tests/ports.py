"""Ports of this machine."""

from __future__ import annotations

from ops import addresses


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on, and that no connection gets by chance."""
    return addresses.free_port("127.0.0.1")
