"""Whole workers for tests: a real engine process on the tiny model, a real server, real Valkey."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from cluster.settings import BusSettings, Settings, WorkerSettings
from tests.tiny_model import write_tiny_llama
from worker.server import WorkerServer

StartWorker = Callable[..., Awaitable[WorkerServer]]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a tiny random Llama."""
    return write_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
async def start_worker(
    redis_url: str, pool: str, tiny_model: Path, tmp_path: Path
) -> AsyncIterator[StartWorker]:
    """Starts workers, and stops those that the test has not stopped."""
    started: list[WorkerServer] = []

    async def start(name: str = "w0", secret: str = "", **changes: object) -> WorkerServer:
        fields: dict[str, object] = {
            "model": str(tiny_model),
            "device": "cpu",
            "dtype": "float32",
            "kv_blocks": 100,
            "cache_dir": str(tmp_path / "cache"),
            "drain_timeout_s": 5,
        }
        worker = WorkerSettings(**{**fields, **changes})  # type: ignore[arg-type]
        bus = BusSettings(lease_s=1.0, heartbeat_s=0.1, min_report_gap_s=0.002)
        settings = Settings(pool=pool, redis_url=redis_url, secret=secret, bus=bus, worker=worker)
        server = WorkerServer(settings, name)
        started.append(server)
        await server.start()
        return server

    yield start
    for server in started:
        await server.stop()
