"""A gateway of several processes on one port (`stemroute gateway --processes N`).

The command's own process starts the others and waits. It holds one end of a socket pair per
process: the process says over it that it is ready, and drains and ends when it is closed. So a
parent that is killed leaves no process behind. A process that ends by itself ends the gateway: a
new one would miss what `/admin` changed in the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import selectors
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from cluster.settings import Settings, load_settings, settings_environment
from ops.addresses import listen_address, listen_url
from ops.signals import until_signal
from ops.start_stop import StartStop

START_S = 60.0
STOP_S = 15.0
"""For all processes to end, after the time in which they drain; the rest is killed."""

LOG_FORMAT = "%(asctime)s %(name)s %(levelname)s %(message)s"


class GatewayProcessError(RuntimeError):
    """The gateway cannot start, or has ended; the text says which process, and why."""


class _Child(NamedTuple):
    number: int
    process: subprocess.Popen[bytes]
    lifeline: socket.socket


class GatewayProcesses(StartStop):
    """Starts all processes, and stops all of them.

    url   base URL, once they are ready
    """

    def __init__(self, settings: Settings) -> None:
        self.url = ""
        self._settings = settings
        self._parts = contextlib.ExitStack()
        self._children: list[_Child] = []

    @property
    def pids(self) -> list[int]:
        """Of the processes, by number."""
        return [child.process.pid for child in self._children]

    def watch(self) -> None:
        """Return never. Raises GatewayProcessError when a process has ended."""
        with self._lifelines() as lifelines:
            lifelines.select()
            self._blame()

    def stop(self) -> None:
        """Let all drain and end; kill what is left `STOP_S` later, or at a second signal."""
        for child in self._children:
            child.lifeline.close()
        deadline = time.monotonic() + self._settings.gateway.shutdown_s + STOP_S
        try:
            for child in self._children:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.process.wait(max(0.0, deadline - time.monotonic()))
        finally:
            for child in self._children:
                child.process.kill()
                child.process.wait()
            self._children.clear()
            self._parts.close()

    def start(self) -> None:
        """Returns when all processes are ready. Raises OSError for a port that is taken, and
        GatewayProcessError where a process does not start."""
        gateway = self._settings.gateway
        reserved = self._parts.enter_context(_reserve(gateway.host, gateway.port))
        host, port = reserved.getsockname()[:2]
        directory = self._parts.enter_context(
            # a process that outlives this one removes it
            tempfile.TemporaryDirectory(prefix="stemroute_gateway_", ignore_cleanup_errors=True)
        )
        settings = msgspec.structs.replace(
            self._settings, gateway=msgspec.structs.replace(gateway, port=port)
        )
        for number in range(gateway.processes):
            self._children.append(_spawn(settings, directory, number))
        self._await_ready()
        self.url = listen_url(host, port)

    def _await_ready(self) -> None:
        deadline = time.monotonic() + START_S
        with self._lifelines() as lifelines:
            while lifelines.get_map():
                ready = lifelines.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    raise GatewayProcessError(
                        f"the gateway's processes are not ready after {START_S:g} s"
                    )
                for key, _ in ready:
                    if not key.fileobj.recv(1):  # type: ignore[union-attr]
                        self._blame()
                    lifelines.unregister(key.fileobj)

    @contextlib.contextmanager
    def _lifelines(self) -> Iterator[selectors.BaseSelector]:
        with selectors.DefaultSelector() as selector:
            for child in self._children:
                selector.register(child.lifeline, selectors.EVENT_READ)
            yield selector

    def _blame(self) -> None:
        """A lifeline was closed by its process: say which has ended."""
        deadline = time.monotonic() + STOP_S
        while time.monotonic() < deadline:
            for child in self._children:
                if child.process.poll() is not None:
                    code = child.process.returncode
                    how = f"signal {-code}" if code < 0 else f"exit code {code}"
                    raise GatewayProcessError(
                        f"process {child.number} of the gateway (pid {child.process.pid}) has "
                        f"ended with {how}; the others are stopped"
                    )
            time.sleep(0.01)  # it has closed its files, and is about to end
        raise GatewayProcessError("a process of the gateway has closed its lifeline")


@contextlib.contextmanager
def _reserve(host: str, port: int) -> Iterator[socket.socket]:
    """Hold a port for processes of this user that share it. Raises OSError for a taken one.

    The socket does not listen, so it gets no connections.
    """
    family, address = listen_address(host, port)
    socket.create_server(address, family=family).close()  # fails where anybody listens or reserves
    with socket.socket(family) as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind(address)
        # that was for connections of a former gateway; from here on, no second one gets the port
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        yield reserved


def _spawn(settings: Settings, directory: str, number: int) -> _Child:
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "ops.gateway_processes", directory, str(number)],
            env={**os.environ, **settings_environment(settings)},
            stdin=theirs.fileno(),
            start_new_session=True,  # Ctrl-C is for the parent, which stops all
        )
    return _Child(number, process, ours)


async def _serve(directory: Path, number: int, lifeline: socket.socket) -> None:
    """One process of a gateway, until its lifeline is closed."""
    from router.gateway import serve_gateway
    from router.siblings import Siblings

    settings = load_settings()
    siblings = Siblings(directory, number, settings.gateway.processes)
    lifeline.setblocking(False)
    loop = asyncio.get_running_loop()
    serving = asyncio.create_task(
        serve_gateway(settings, ready=lambda _: lifeline.sendall(b"r"), siblings=siblings)
    )
    parent = asyncio.create_task(loop.sock_recv(lifeline, 1))
    try:
        await asyncio.wait([serving, parent], return_when=asyncio.FIRST_COMPLETED)
    finally:
        parent.cancel()
        serving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await serving


def main() -> None:
    """`python -m ops.gateway_processes DIRECTORY NUMBER`, started by GatewayProcesses."""
    import uvloop

    from ops.console import fail

    directory, number = Path(sys.argv[1]), int(sys.argv[2])
    logging.basicConfig(level=logging.INFO, format=f"[process {number}] {LOG_FORMAT}")
    lifeline = socket.socket(fileno=os.dup(0))
    try:
        uvloop.run(until_signal(_serve(directory, number, lifeline)))
    except (OSError, ValueError) as error:
        fail(f"process {number} of the gateway: {error}")


if __name__ == "__main__":
    main()
