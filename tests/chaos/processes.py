"""The processes of one rig: started here, found by port, and ended by their process ids."""

from __future__ import annotations

import os
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from tests.system.processes import alive, descendants

MARK = "CHAOS_RIG"
"""Environment variable by which a rig knows its processes, orphans included."""

END_S = 20.0
LISTEN_STATE = "0A"
LOG_TAIL_LINES = 15


class PartFailed(RuntimeError):
    """A part did not start or ended by itself; the text holds the end of its log."""


class Processes:
    """Starts processes and ends them with all their descendants.

    folder   logs go there, one per process
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._mark = uuid.uuid4().hex
        self._started: list[subprocess.Popen[bytes]] = []

    def start(
        self, name: str, command: Sequence[str], env: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Start a process in a session of its own: a terminal's Ctrl-C does not reach it."""
        with (self._folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                command,
                env={**os.environ, **(env or {}), MARK: self._mark},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._started.append(process)
        return process

    def log_tail(self, name: str) -> str:
        """The end of a process's log."""
        return "\n".join(self.log(name).splitlines()[-LOG_TAIL_LINES:])

    def log(self, name: str) -> str:
        """A process's log; empty before it was started."""
        path = self._folder / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def wait(
        self,
        name: str,
        process: subprocess.Popen[bytes],
        ready: Callable[[], bool],
        timeout_s: float,
    ) -> None:
        """Return once `ready()` holds. Raises PartFailed where the process ends before."""
        deadline = time.monotonic() + timeout_s
        while not ready():
            if process.poll() is not None:
                raise PartFailed(
                    f"{name} has ended with exit code {process.returncode}:\n{self.log_tail(name)}"
                )
            if time.monotonic() > deadline:
                raise PartFailed(
                    f"{name} is not ready after {timeout_s:g} s:\n{self.log_tail(name)}"
                )
            time.sleep(0.1)  # another process: there is nothing here to wait on

    def end(self) -> None:
        """Kill everything that was started, whatever state it is in, and wait until it is gone."""
        deadline = time.monotonic() + END_S
        while left := self._all():
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            for process in self._started:
                process.poll()  # reaps it
            if time.monotonic() > deadline:
                raise RuntimeError(f"processes {sorted(left)} do not end")
            time.sleep(0.05)
        self._started.clear()

    def _all(self) -> set[int]:
        found = {process.pid for process in self._started if alive(process.pid)}
        for pid in list(found):
            found.update(descendants(pid))
        wanted = f"{MARK}={self._mark}".encode()
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit():
                with suppress(OSError):
                    if wanted in (folder / "environ").read_bytes().split(b"\0"):
                        found.add(int(folder.name))
        return {pid for pid in found if alive(pid) and pid != os.getpid()}


def kill_tree(pid: int) -> None:
    """SIGKILL to a process and everything below it."""
    for each in [pid, *descendants(pid)]:
        with suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)


def child_of(pid: int, words: str) -> int:
    """The descendant of `pid` whose command line holds `words`. Raises LookupError."""
    for child, command in descendants(pid).items():
        if words in command:
            return child
    raise LookupError(f"process {pid} has no descendant with {words!r} in its command line")


def listener(port: int) -> int:
    """Process id of who listens on `port` of this machine. Raises LookupError."""
    sockets = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == LISTEN_STATE and int(fields[1].rpartition(":")[2], 16) == port:
                    sockets.add(f"socket:[{fields[9]}]")
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError):
                for descriptor in (folder / "fd").iterdir():
                    if os.readlink(descriptor) in sockets:
                        return int(folder.name)
    raise LookupError(f"nobody listens on port {port}")


def memory_mib(pid: int) -> float:
    """Resident memory of a process; 0 where it has ended."""
    with suppress(OSError):
        pages = int((Path("/proc") / str(pid) / "statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20
    return 0.0


def open_descriptors(pid: int) -> int:
    """How many file descriptors a process has open; 0 where it has ended."""
    with suppress(OSError):
        return len(os.listdir(f"/proc/{pid}/fd"))
    return 0
