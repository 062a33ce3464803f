"""`stemroute gateway --processes 2`, as real processes on one port before one fake worker."""

import asyncio
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from cluster.protocol import HEADER_EXPLAIN, HEADER_REQUEST_ID
from cluster.settings import BusSettings
from ops.gateway_processes import _reserve
from tests.router.support import FakeWorker
from tests.router.test_over_the_bus import Published
from tests.system.processes import alive, descendants

START_S = 120
HOST = "127.0.0.1"


class Command:
    """`stemroute gateway` with what it says; a context manager."""

    def __init__(self, redis_url: str, pool: str, *flags: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "ops.cli", "gateway", "--port", "0", *flags],
            env={
                **os.environ,
                "STEMROUTE_POOL": pool,
                "STEMROUTE_REDIS_URL": redis_url,
                "STEMROUTE_GATEWAY_DRAIN_NOTICE_S": "0.05",
            },
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
        )
        self.said: list[str] = []

    def __enter__(self) -> "Command":
        return self

    def __exit__(self, *_) -> None:
        left = [self.process.pid, *descendants(self.process.pid)]
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(30)
        self.process.stderr.close()

    def url(self) -> str:
        """Of the gateway, once it listens."""
        for line in self.process.stderr:
            self.said.append(line)
            found = re.search(r"listens on (http://\S+)", line)
            if found:
                return found.group(1)
        raise AssertionError("".join(self.said))

    def children(self) -> list[int]:
        return list(descendants(self.process.pid))

    def ended(self) -> tuple[int, str]:
        """Exit code, and all that was said. Reading ends when the last process has ended."""
        self.said += self.process.stderr.readlines()
        return self.process.wait(30), "".join(self.said)


@contextlib.asynccontextmanager
async def one_worker(redis_url, pool):
    """A worker that is on the bus."""
    async with FakeWorker("w0") as worker:
        published = Published(worker, redis_url, pool, BusSettings())
        try:
            yield worker
        finally:
            await published.die()


@pytest.fixture
async def served(redis_url, pool):
    """A command with two processes, ready, and a client."""
    async with one_worker(redis_url, pool):
        with Command(redis_url, pool, "--processes", "2") as command:
            url = await asyncio.to_thread(command.url)
            async with asyncio.timeout(START_S), httpx.AsyncClient(base_url=url) as client:
                while (await client.get("/ready")).status_code != 200:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)  # the worker's card travels through Redis
                yield command, client


async def test_two_processes_are_one_gateway(served):
    command, client = served
    assert len(command.children()) == 2
    ids = []
    for _ in range(40):  # connections, which the kernel spreads over the processes
        async with httpx.AsyncClient(base_url=client.base_url) as one:
            answer = await one.post(
                "/v1/completions",
                json={"model": "tiny", "prompt": "x"},
                headers={HEADER_EXPLAIN: "1"},
            )
            assert answer.status_code == 200
            ids.append(answer.headers[HEADER_REQUEST_ID])
    assert (await client.get("/admin/fleet")).json()["requests_total"] == 40
    for request_id in ids:
        assert (await client.get(f"/admin/decisions/{request_id}")).status_code == 200
    families = text_string_to_metric_families((await client.get("/metrics")).text)
    answered = [
        (sample.labels["process"], sample.value)
        for family in families
        for sample in family.samples
        if sample.labels.get("endpoint") == "/v1/completions"
    ]
    assert {process for process, _ in answered} == {"0", "1"}
    assert sum(value for _, value in answered) == 40
    await client.post("/admin/policy", json={"policy": "round_robin"})
    for _ in range(10):
        async with httpx.AsyncClient(base_url=client.base_url) as one:
            assert (await one.get("/admin/policy")).json()["policy"] == "round_robin"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_ends_all_processes(served, number):
    command, _ = served
    children = command.children()
    command.process.send_signal(number)
    code, said = await asyncio.to_thread(command.ended)
    assert code == 0, said
    assert not any(map(alive, children))
    assert "Traceback" not in said


async def test_answers_under_way_end_before_the_processes_do(redis_url, pool):
    async with one_worker(redis_url, pool) as worker:
        go_on = asyncio.Event()
        say = worker.say("hello")

        async def slow(request, generate):
            await go_on.wait()
            return await say(request, generate)

        worker.answer = slow
        with Command(redis_url, pool, "--processes", "2") as command:
            url = await asyncio.to_thread(command.url)
            async with asyncio.timeout(START_S), httpx.AsyncClient(base_url=url) as client:
                while (await client.get("/ready")).status_code != 200:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
                body = {"model": "tiny", "prompt": "x"}
                asking = asyncio.create_task(client.post("/v1/completions", json=body))
                await worker.got_request.wait()
                command.process.terminate()
                while True:  # until no process listens any more
                    try:
                        socket.create_connection((HOST, client.base_url.port)).close()
                    except OSError:
                        break
                    await asyncio.sleep(0.01)
                go_on.set()
                assert (await asking).status_code == 200
            assert (await asyncio.to_thread(command.ended))[0] == 0


async def test_killing_the_parent_leaves_no_process_behind(served):
    command, _ = served
    children = command.children()
    (directory,) = {line.split()[-2] for line in descendants(command.process.pid).values()}
    assert await asyncio.to_thread(Path(directory).is_dir)
    command.process.kill()
    code, said = await asyncio.to_thread(command.ended)  # all have closed its standard error
    assert code == -signal.SIGKILL
    async with asyncio.timeout(30):
        while any(map(alive, children)):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert not await asyncio.to_thread(Path(directory).exists)
    assert "Traceback" not in said


async def test_a_process_that_dies_ends_the_gateway_with_its_name(served):
    command, _ = served
    first, second = sorted(command.children())
    os.kill(first, signal.SIGKILL)
    code, said = await asyncio.to_thread(command.ended)
    assert code == 1
    assert f"(pid {first}) has ended with signal 9; the others are stopped" in " ".join(
        said.split()
    )
    assert not alive(second)


def test_a_port_that_others_listen_on_is_refused(redis_url, pool):
    with socket.create_server(("127.0.0.1", 0), reuse_port=True) as taken:
        port = str(taken.getsockname()[1])
        with Command(redis_url, pool, "--processes", "2", "--port", port) as command:
            code, said = command.ended()
    assert code == 1
    assert "the gateway cannot listen on 127.0.0.1" in said


def test_a_port_that_another_gateway_is_about_to_listen_on_is_refused():
    """Else both would listen, and requests would reach one or the other."""
    with _reserve(HOST, 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(OSError, match="in use"), _reserve(HOST, port):
            pass
        for _ in range(2):  # its own processes
            socket.create_server((HOST, port), reuse_port=True).close()


def test_a_process_that_cannot_start_ends_the_command(redis_url, pool):
    with Command(redis_url, pool, "--processes", "2", "--policy", "best") as command:
        code, said = command.ended()
    assert code == 1
    assert "there is no policy 'best'" in " ".join(said.split())
    assert "the others are stopped" in said
