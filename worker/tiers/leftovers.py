"""Leftovers: files of other namespaces on the disk tier, and how they are removed.

A worker has the same number in every namespace's folder, and its limit applies to all of them
together: its writes displace files in `<dir>/<other namespace>/<its number>`, the least recently
used namespace first. A folder that another worker has locked belongs to that worker.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from worker.tiers.block_file import SUFFIX, BadBlockFile, name_of, read_header

LOCK = "lock"


class _File(NamedTuple):
    used_ns: int
    path: Path
    bytes: int


class Leftovers:
    """Files in the folders of one number, except its own folder. Not thread-safe.

    bytes  total size of the files
    """

    def __init__(self, root: Path, own: Path) -> None:
        """`own` is `root/<namespace>/<number>`."""
        folders = [_files_of(p / own.name) for p in root.iterdir() if p != own.parent]
        # The last one to remove is first.
        self._folders = sorted(filter(None, folders), key=lambda files: -max(files).used_ns)
        self._in_order: list[_File] | None = None
        self.bytes = sum(map(_bytes_of, self._folders))

    def shrink(self, limit_bytes: int) -> None:
        """Remove files until they take at most this many bytes, except in locked folders."""
        while self._folders and self.bytes > limit_bytes:
            files = self._folders[-1]
            with _lock_of(files[0].path.parent) as free:
                if free:
                    self._shrink(files, limit_bytes)
            if not (free and files):  # it is empty or in use again
                self._folders.pop()
                self.bytes = sum(map(_bytes_of, self._folders))

    def _shrink(self, files: list[_File], limit_bytes: int) -> None:
        if files is not self._in_order:
            files[:] = _beginnings_first(files)
            self._in_order = files
        while files and self.bytes > limit_bytes:
            last = files.pop()
            last.path.unlink(missing_ok=True)
            self.bytes -= last.bytes


@contextlib.contextmanager
def _lock_of(folder: Path) -> Iterator[bool]:
    """Hold the folder's lock, if it is free; yields whether it is held."""
    try:
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:  # the folder is gone, or of another user
        yield False
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        yield False
    else:
        yield True
    finally:
        os.close(lock)


def _bytes_of(files: list[_File]) -> int:
    return sum(file.bytes for file in files)


def _files_of(folder: Path) -> list[_File]:
    """The block files of a folder; none if it is missing or belongs to another user."""
    files = []
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.endswith(SUFFIX):
                with contextlib.suppress(FileNotFoundError):  # its worker may be running
                    stat = entry.stat()
                    files.append(_File(stat.st_mtime_ns, Path(entry.path), stat.st_blocks * 512))
    return files


def _beginnings_first(files: list[_File]) -> list[_File]:
    """Files in reverse order of removal: by the latest use of a block or its continuations, each
    after the block that it continues, so that no file outlives those before it in its chain."""
    names = {file.path.name for file in files}
    below: defaultdict[str, list[_File]] = defaultdict(list)
    for file in files:
        above = _above(file.path)
        below[above if above in names else ""].append(file)
    order: list[_File] = []
    rest = below[""].copy()
    while rest:
        order.append(rest.pop())
        rest += below.get(order[-1].path.name, ())
    used_ns: dict[str, int] = {}
    for file in reversed(order):
        continued = [used_ns[each.path.name] for each in below.get(file.path.name, ())]
        used_ns[file.path.name] = max([file.used_ns, *continued])
    return sorted(order, key=lambda file: -used_ns[file.path.name])


def _above(path: Path) -> str:
    """The name of the file of the block before it; "" if there is none or it is unknown."""
    try:
        return name_of(read_header(path).parent)
    except (OSError, BadBlockFile):
        return ""
