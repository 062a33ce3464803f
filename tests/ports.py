"""Ports of this machine."""

from __future__ import annotations

import socket


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on right now."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
    return port
