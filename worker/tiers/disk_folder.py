"""The folder of one worker's disk tier: ownership, contents, reading and writing blocks.

    <worker.disk_tier_dir>/<namespace check>/<n>/<block hash>.kv

A folder belongs to one namespace and, while it runs, to one worker. Each worker takes the first
number whose lock is free, so that a restarted worker finds its folder again.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from cluster.blocks import HASH_BYTES, Namespace
from worker.tiers.block_file import (
    SUFFIX,
    TEMPORARY,
    BadBlockFile,
    Header,
    file_bytes,
    name_of,
    read_block_file,
    read_header,
    write_block_file,
)
from worker.tiers.leftovers import LOCK, Leftovers

log = logging.getLogger(__name__)

ALLOCATION_BYTES = 4096
"""Assumed block size of file systems, in bytes."""

MAX_WORKERS = 1024
ROOT_BYTES = 32


class Found(NamedTuple):
    """A file found in the folder when it was opened."""

    header: Header
    used_ns: int


class DiskFolder:
    """Files of one namespace. Its methods block: call them from an I/O thread.

    unusable   files found that are no block of this namespace, dtype and shape
    """

    def __init__(
        self,
        root: Path,
        namespace: Namespace,
        shape: Sequence[int],
        body_bytes: int,
        bound_bytes: int,
    ) -> None:
        """`bound_bytes` limits this folder and the leftovers of other namespaces together; the
        caller must not write more blocks than fit. Raises OSError if no folder can be created.
        """
        self.unusable = 0
        self.body_bytes = body_bytes
        self._namespace = namespace.check()
        self._kv_dtype = namespace.kv_dtype
        self._shape = list(shape)
        longest = self.header(b"0" * HASH_BYTES, b"", b"0" * (ROOT_BYTES + 4 * self._shape[1]))
        size = file_bytes(longest, body_bytes)
        self.block_bytes = -(-size // ALLOCATION_BYTES) * ALLOCATION_BYTES
        """Maximum of bytes that one block takes on disk."""
        self.path, self._lock = _own_folder(root / self._namespace)
        self._root = root
        self._bound_bytes = bound_bytes
        self._files = sum(entry.name.endswith(SUFFIX) for entry in os.scandir(self.path))
        self.find_leftovers()

    def find_leftovers(self) -> None:
        """Read the leftovers of other namespaces again and reduce them to the limit."""
        self._leftovers = Leftovers(self._root, self.path)
        self._leftovers.shrink(self._bound_bytes - self._files * self.block_bytes)

    def header(self, block_hash: bytes, parent: bytes, content: bytes) -> Header:
        """The header of a block's file here."""
        return Header(self._namespace, self._kv_dtype, self._shape, block_hash, parent, content)

    def scan(self) -> list[Found]:
        """All usable files, the least recently used first. Does not read bodies.

        Removes incomplete files of an earlier process; leaves other files alone.
        """
        found = []
        for entry in os.scandir(self.path):
            path = Path(entry.path)
            if entry.name.endswith(SUFFIX + TEMPORARY):
                self.unusable += 1
                path.unlink(missing_ok=True)
                continue
            if not entry.name.endswith(SUFFIX):
                continue
            try:
                header = read_header(path, self.body_bytes)
                expected = self.header(header.block_hash, header.parent, header.content)
                if header != expected or entry.name != name_of(header.block_hash):
                    raise BadBlockFile(f"its header or name does not match: {header}")
                found.append(Found(header, entry.stat().st_mtime_ns))
            except (OSError, BadBlockFile) as error:
                self.unusable += 1
                log.warning("ignoring %s: %s", path, error)
        found.sort(key=lambda file: file.used_ns)
        return found

    def write(self, header: Header, body: bytes | memoryview) -> None:
        """Write a block's file, after removing leftovers of other namespaces if needed. Raises
        OSError."""
        path = self.path / name_of(header.block_hash)
        files = self._files + (not path.exists())
        self._leftovers.shrink(self._bound_bytes - files * self.block_bytes)
        write_block_file(path, header, body)
        self._files = files

    def read(self, header: Header) -> bytes:
        """Read and verify the KV of a block. Raises OSError, BadBlockFile."""
        path = self.path / name_of(header.block_hash)
        body = read_block_file(path, header, self.body_bytes)
        self.note_use(header.block_hash)
        return body

    def note_use(self, block_hash: bytes) -> None:
        """Mark the block as just used; the order of use survives this process."""
        with contextlib.suppress(FileNotFoundError):
            os.utime(self.path / name_of(block_hash))

    def remove(self, block_hash: bytes) -> None:
        """Remove a block's file, if it exists."""
        with contextlib.suppress(FileNotFoundError):
            (self.path / name_of(block_hash)).unlink()
            self._files -= 1

    def close(self) -> None:
        """Release the folder to other workers. Idempotent."""
        lock, self._lock = self._lock, -1
        if lock >= 0:
            os.close(lock)


def _own_folder(parent: Path) -> tuple[Path, int]:
    for number in range(MAX_WORKERS):
        path = parent / str(number)
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            continue
        return path, lock
    raise OSError(f"all {MAX_WORKERS} folders of {parent} are used by other workers")
