"""Processes of this machine, read from /proc: who descends from whom, and who still lives."""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any


def descendants(pid: int) -> dict[int, str]:
    """Process id -> command line of everything below `pid`, itself left out."""
    parents: dict[int, int] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                stat = (folder / "stat").read_text()
            except OSError:
                continue  # it has just ended
            parents[int(folder.name)] = int(stat.rpartition(")")[2].split()[1])
    below: dict[int, str] = {}
    frontier = {pid}
    while frontier:
        frontier = {child for child, parent in parents.items() if parent in frontier}
        below.update({child: command_line(child) for child in frontier})
    return below


def command_line(pid: int) -> str:
    """Command line of a process; "" for one that has ended."""
    try:
        raw = (Path("/proc") / str(pid) / "cmdline").read_bytes()
    except OSError:
        return ""
    return raw.replace(b"\0", b" ").decode(errors="replace").strip()


def alive(pid: int) -> bool:
    """Whether a process runs: neither ended nor a zombie."""
    try:
        stat = (Path("/proc") / str(pid) / "stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")


def end_all(process: subprocess.Popen[Any]) -> list[int]:
    """Kill `process` and all below it, where ending in order takes too long; tells which."""
    ended = [process.pid, *descendants(process.pid)]
    for pid in ended:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait(30)
    return ended


def run_whole(command: list[str], timeout_s: float) -> subprocess.CompletedProcess[str]:
    """`subprocess.run`, which on a time-out ends also what the command has started."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        end_all(process)
        raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)
