"""Processes are found by port and all are ended, orphans and stopped ones too."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos.processes import Processes, listener
from tests.system.processes import alive

ORPHAN = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
print(child.pid, flush=True)
"""


def test_orphans_and_stopped_processes_are_ended(tmp_path: Path) -> None:
    processes = Processes(tmp_path)
    parent = processes.start("orphan", [sys.executable, "-c", ORPHAN])
    parent.wait(30)
    orphan = int((tmp_path / "orphan.log").read_text())
    stopped = processes.start("stopped", ["sleep", "600"])
    os.kill(stopped.pid, signal.SIGSTOP)
    bystander = subprocess.Popen(["sleep", "600"])
    try:
        assert alive(orphan)
        processes.end()
        assert not alive(orphan)
        assert not alive(stopped.pid)
        assert alive(bystander.pid)
    finally:
        bystander.kill()
        bystander.wait()


def test_who_listens_on_a_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert listener(port) == os.getpid()
    with pytest.raises(LookupError):
        listener(port)
