"""One worker without Ray, as a process.

    python -m tests.chaos.worker_process NAME

Settings come from the environment. SIGUSR1 makes it answer every request with status 500 from
then on, SIGUSR2 ends that; SIGTERM drains it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import sys
from collections.abc import AsyncGenerator

from cluster.settings import load_settings
from worker.messages import EngineRequest, Output
from worker.server import WorkerServer


class Broken:
    """Stands in for an engine's `generate` while the worker is to fail every request."""

    def __init__(self, worker: WorkerServer) -> None:
        self._engine = worker.service.engine
        self._generate = self._engine.generate
        self._broken = False

    def turn(self, broken: bool) -> None:
        """Fail every request from now on, or none."""
        self._broken = broken
        self._engine.generate = self.generate  # type: ignore[method-assign]

    async def generate(self, request: EngineRequest) -> AsyncGenerator[Output, None]:
        """As the engine's own; raises RuntimeError while broken."""
        if self._broken:
            raise RuntimeError("this worker was told to fail every request")
        async with contextlib.aclosing(self._generate(request)) as outputs:
            async for output in outputs:
                yield output


async def serve(name: str) -> None:
    """Until SIGTERM."""
    worker = WorkerServer(load_settings(), name)
    await worker.start()
    broken, ended = Broken(worker), asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGUSR1, broken.turn, True)
    loop.add_signal_handler(signal.SIGUSR2, broken.turn, False)
    loop.add_signal_handler(signal.SIGTERM, ended.set)
    await ended.wait()
    await worker.stop()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    asyncio.run(serve(sys.argv[1]))
