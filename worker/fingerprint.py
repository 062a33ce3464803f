"""Digests of files. The contents are read again only if the file changed."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

READERS = 4
"""Files hashed at once; hashing releases the interpreter lock."""

SETTLED_S = 2.0
"""A file that changed more recently than this may change again with the same timestamp, so its
digest is not cached."""


class _Remembered(msgspec.Struct, frozen=True):
    identity: list[int]
    digest: str


def digest_files(files: list[Path], cache_dir: Path) -> list[str]:
    """SHA-256 (hex) of each file's contents.

    A digest is cached in `cache_dir` with the file's device, inode, size, mtime and ctime (which no
    program can set back), and used while all of them are equal.
    """
    with ThreadPoolExecutor(READERS) as readers:
        return list(readers.map(lambda file: _digest_file(file, cache_dir), files))


def digest_fields(domain: str, fields: Iterable[str]) -> str:
    """SHA-256 (hex) of the fields, each prefixed with its length."""
    digest = hashlib.sha256()
    for field in (domain, *fields):
        encoded = field.encode()
        digest.update(len(encoded).to_bytes(8, "little"))
        digest.update(encoded)
    return digest.hexdigest()


def write_atomically(path: Path, content: bytes) -> None:
    """Replace a file atomically: every reader sees the old or the new contents."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}.{time.monotonic_ns()}")
    draft.write_bytes(content)
    draft.replace(path)


def _digest_file(file: Path, cache_dir: Path) -> str:
    file = file.resolve()
    memory = cache_dir / "fingerprints" / (digest_fields("path", [str(file)])[:32] + ".json")
    identity = _identity(file)
    try:
        remembered = msgspec.json.decode(memory.read_bytes(), type=_Remembered)
        if remembered.identity == identity:
            return remembered.digest
    except (OSError, msgspec.DecodeError):
        pass  # not known yet, or unreadable: compute it
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    settled = time.time() - file.stat().st_ctime > SETTLED_S
    if settled and _identity(file) == identity:
        write_atomically(memory, msgspec.json.encode(_Remembered(identity, digest)))
    return digest


def _identity(file: Path) -> list[int]:
    status = file.stat()
    return [
        status.st_dev,
        status.st_ino,
        status.st_size,
        status.st_mtime_ns,
        status.st_ctime_ns,
    ]
