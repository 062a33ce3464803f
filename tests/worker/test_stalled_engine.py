"""An engine process that is stopped: named, left by its requests, used again or killed."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable

import aiohttp
import msgspec
import pytest

from tests.worker.conftest import StartWorker
from tests.worker.test_server import PROMPT, post, request
from worker.engine_client import EngineDead
from worker.server import WorkerServer

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


async def until(true: Callable[[], bool]) -> None:
    """Wait until something of another process can be seen; there is no event for it."""
    while not true():  # noqa: ASYNC110
        await asyncio.sleep(0.02)


async def stall(worker: WorkerServer) -> None:
    os.kill(worker.service.engine.pid, signal.SIGSTOP)
    await until(lambda: bool(worker.service.failure()))


async def health(http: aiohttp.ClientSession, worker: WorkerServer) -> tuple[int, str]:
    async with http.get(worker.url + "/health") as answer:
        return answer.status, (await answer.json())["reason"]


async def test_requests_leave_a_stopped_engine_and_it_is_used_again_when_it_comes_back(
    start_worker: StartWorker, http: aiohttp.ClientSession
) -> None:
    worker = await start_worker(stall_timeout_s=1.0, context_tokens=1500)
    service = worker.service
    epoch = service.epoch
    await post(http, worker, request("warm", PROMPT, max_tokens=1))
    wanted = request("a", PROMPT, max_tokens=1300, stream=True)
    async with http.post(worker.url + "/generate", data=msgspec.msgpack.encode(wanted)) as answer:
        await answer.content.readany()
        os.kill(service.engine.pid, signal.SIGSTOP)
        waiting = asyncio.create_task(post(http, worker, request("b", [1, *PROMPT], max_tokens=2)))
        asked = asyncio.create_task(service.engine.stats())
        with pytest.raises(aiohttp.ClientError):
            await answer.content.read()
    status, _, body = await waiting
    assert (status, b"is stopped" in body) == (503, True)
    with pytest.raises(EngineDead, match="is stopped"):
        await asked
    assert "is stopped" in service.failure()
    await until(lambda: service.publisher.card.state == "failed")
    status, reason = await health(http, worker)
    assert (status, "is stopped" in reason) == (503, True)
    assert (await post(http, worker, request("c", PROMPT)))[0] == 503

    os.kill(service.engine.pid, signal.SIGCONT)
    await until(lambda: service.publisher.card.state == "ready")
    assert service.failure() == ""
    assert await health(http, worker) == (200, "")
    assert (await post(http, worker, request("d", PROMPT, max_tokens=2)))[0] == 200
    # what was left is cancelled in the engine too
    await until(lambda: not service.publisher.load.batch)
    assert service.publisher.load.free_blocks == 100
    assert service.epoch == epoch


async def test_a_drained_worker_does_not_become_ready_when_its_engine_comes_back(
    start_worker: StartWorker,
) -> None:
    worker = await start_worker(stall_timeout_s=1.0)
    await worker.service.drain()
    await stall(worker)
    os.kill(worker.service.engine.pid, signal.SIGCONT)
    await until(lambda: not worker.service.failure())
    await until(lambda: worker.service.publisher.card.state == "draining")


async def test_closing_kills_an_engine_that_is_stopped(start_worker: StartWorker) -> None:
    worker = await start_worker(stall_timeout_s=1.0)
    await stall(worker)
    process = worker.service.engine._process
    assert process is not None
    await worker.stop()
    assert process.returncode == -signal.SIGKILL


async def test_closing_ends_an_engine_that_was_stopped_a_moment_ago(
    start_worker: StartWorker,
) -> None:
    worker = await start_worker()
    process = worker.service.engine._process
    assert process is not None
    process.send_signal(signal.SIGSTOP)
    await worker.stop()
    assert process.returncode == -signal.SIGKILL
