"""The processes of the gateway benchmark: Valkey, mock workers, gateways. All on 127.0.0.1."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx

from ops.keeper import start_valkey
from tests.ports import free_port

START_S = 30.0
POOL = "gateway-benchmark"


class CannotRun(Exception):
    """A part does not start; the text says which, and what to do."""


class Gateway:
    """A gateway that runs. `modules` are those of `python -m` with which it was started."""

    def __init__(self, name: str, port: int, process: subprocess.Popen[bytes]) -> None:
        self.name = name
        self.port = port
        self._process = process

    @property
    def pids(self) -> list[int]:
        """Its process and that one's children."""
        pid = self._process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return [pid, *map(int, children)]

    @property
    def threads(self) -> int:
        """How many they have."""
        return sum(len(os.listdir(f"/proc/{pid}/task")) for pid in self.pids)


class Stage:
    """Starts the parts; a context that ends them all, each by its process id."""

    def __init__(self, peers_python: str) -> None:
        self._peers_python = peers_python
        self._parts = contextlib.ExitStack()
        self._redis_url = ""
        self.worker_urls: list[str] = []

    def __enter__(self) -> Stage:
        with contextlib.ExitStack() as parts:
            valkey = start_valkey()
            parts.callback(valkey.stop)
            self._redis_url = valkey.connection_url
            self._parts = parts.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._parts.close()

    def start_workers(self, count: int, *options: str) -> None:
        """Mock workers, in `worker_urls` once they listen. `options`: see `mock_worker`."""
        for number in range(count):
            process = self._start(
                [
                    *(sys.executable, "-m", "tests.benchmarks.gateways.mock_worker"),
                    *(self._redis_url, POOL, f"w{number}", *options),
                ],
                stdout=subprocess.PIPE,
            )
            assert process.stdout is not None
            url = process.stdout.readline().decode().strip()
            if not url:
                raise CannotRun("a mock worker does not start: its message is above")
            self.worker_urls.append(url)

    def start_ours(self, processes: int = 1) -> Gateway:
        """`stemroute gateway`, ready for all workers."""
        port = free_port()
        name = "stemroute" if processes == 1 else f"stemroute, {processes} processes"
        command = ["ops.cli", "gateway", "--port", str(port), "--processes", str(processes)]
        return self._ready(name, port, command)

    def start_on_uvicorn(self) -> Gateway:
        """The same gateway as an ASGI application, ready for all workers."""
        port = free_port()
        return self._ready("uvicorn", port, ["tests.benchmarks.gateways.on_uvicorn", str(port)])

    def start_bare(self, name: str) -> Gateway:
        """An HTTP server, "stemroute" or "uvicorn", that forwards nothing."""
        port = free_port()
        return self._ready(name, port, ["tests.benchmarks.gateways.bare_server", name, str(port)])

    def _ready(self, name: str, port: int, module: list[str]) -> Gateway:
        process = self._start(
            [sys.executable, "-m", *module],
            env={
                **os.environ,
                "STEMROUTE_POOL": POOL,
                "STEMROUTE_REDIS_URL": self._redis_url,
            },
        )
        gateway = Gateway(name, port, process)

        def ready() -> bool:
            answer = httpx.get(f"http://127.0.0.1:{port}/ready", timeout=5)
            if answer.status_code != 200:
                return False
            return bool(answer.json()["workers_ready"] == len(self.worker_urls))

        self._wait(process, gateway.name, ready)
        return gateway

    def start_peer(self, name: str, module: str) -> Gateway:
        """A peer's gateway, cache-aware, with the same workers."""
        port, metrics_port = free_port(), free_port()
        process = self._start(
            [
                *(self._peers_python, "-m", module, "launch"),
                *("--host", "127.0.0.1", "--port", str(port), "--policy", "cache_aware"),
                *("--worker-urls", *self.worker_urls, "--worker-startup-check-interval", "1"),
                *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)),
                *("--log-level", "error"),
            ],
            stdout=subprocess.DEVNULL,
        )
        gateway = Gateway(name, port, process)

        def ready() -> bool:
            answer = httpx.get(f"http://127.0.0.1:{port}/v1/models", timeout=5)
            return answer.status_code == 200 and "mock" in answer.text

        self._wait(process, name, ready)
        return gateway

    def start_client(self) -> subprocess.Popen[bytes]:
        """The load client, with pipes for orders and results."""
        return self._start(
            [sys.executable, "-m", "tests.benchmarks.gateways.load_client"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def _start(self, command: list[str], **options: object) -> subprocess.Popen[bytes]:
        options.setdefault("stdin", subprocess.DEVNULL)
        process = subprocess.Popen(command, **options)  # type: ignore[call-overload]
        self._parts.callback(_end, process)
        return process  # type: ignore[no-any-return]

    def _wait(self, process: subprocess.Popen[bytes], name: str, ready: Callable[[], bool]) -> None:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            if process.poll() is not None:
                raise CannotRun(f"{name} has ended with exit code {process.returncode}")
            with contextlib.suppress(httpx.HTTPError, ValueError):
                if ready():
                    return
            time.sleep(0.1)  # another process: there is nothing here to wait on
        raise CannotRun(f"{name} is not ready after {START_S:g} s")


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
