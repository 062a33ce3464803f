"""One KV block as a file with its own verification: header, body, digest.

    magic (8) | version u32 | header bytes u32 | header (msgpack) | body | BLAKE2b-256 of all before

A reader states what it expects. A file that differs in any way (another namespace, dtype or shape,
other tokens, truncated, a flipped bit) is a `BadBlockFile`, never a hit. A file is written under a
temporary name, synced and renamed, so that no name refers to a partial file.
"""

from __future__ import annotations

import hashlib
import os
import struct
from pathlib import Path

import msgspec

MAGIC = b"stem-kv\n"
VERSION = 1
DIGEST_BYTES = 32
PREFIX = struct.Struct("<8sII")
MAX_HEADER_BYTES = 1 << 20
TEMPORARY = ".tmp"
SUFFIX = ".kv"


class BadBlockFile(ValueError):
    """A file without the expected contents. The message says what differs."""


class Header(msgspec.Struct, frozen=True, array_like=True):
    """Description of a file's block.

    namespace   `Namespace.check()` of the worker, without its pool's secret
    kv_dtype    such as "bfloat16"
    shape       of the body: [2 × layers, block_size, kv_heads, head_dim]
    parent      hash of the block before it, b"" at depth 0
    content     its packed tokens, at depth 0 after the namespace root
    """

    namespace: str
    kv_dtype: str
    shape: list[int]
    block_hash: bytes
    parent: bytes
    content: bytes


def name_of(block_hash: bytes) -> str:
    """File name of a block."""
    return block_hash.hex() + SUFFIX


def write_block_file(path: Path, header: Header, body: bytes | memoryview) -> None:
    """Write a file under its name atomically. Raises OSError."""
    encoded = msgspec.msgpack.encode(header)
    front = PREFIX.pack(MAGIC, VERSION, len(encoded)) + encoded
    digest = hashlib.blake2b(front, digest_size=DIGEST_BYTES)
    digest.update(body)
    temporary = path.with_name(path.name + TEMPORARY)
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            for part in (front, body, digest.digest()):
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def read_header(path: Path, body_bytes: int | None = None) -> Header:
    """Read the header only, and check the size of the rest if `body_bytes` is given. Raises
    BadBlockFile, OSError."""
    with path.open("rb") as file:
        front = file.read(PREFIX.size)
        encoded = file.read(_header_bytes(front))
        size = os.fstat(file.fileno()).st_size
    front_bytes = PREFIX.size + len(encoded)
    if body_bytes is not None and size != front_bytes + body_bytes + DIGEST_BYTES:
        raise BadBlockFile(f"it has the wrong size, {size} bytes")
    return _decoded(encoded)


def read_block_file(path: Path, expected: Header, body_bytes: int) -> bytes:
    """Read the body of a file and verify all of it. Raises BadBlockFile, OSError."""
    data = path.read_bytes()
    start = PREFIX.size + _header_bytes(data[: PREFIX.size])
    end = start + body_bytes
    if len(data) != end + DIGEST_BYTES:
        raise BadBlockFile(f"it has {len(data)} bytes instead of {end + DIGEST_BYTES}")
    if hashlib.blake2b(memoryview(data)[:end], digest_size=DIGEST_BYTES).digest() != data[end:]:
        raise BadBlockFile("its digest does not match")
    header = _decoded(data[PREFIX.size : start])
    if header != expected:
        raise BadBlockFile(f"it holds {header}, expected {expected}")
    return data[start:end]


def file_bytes(header: Header, body_bytes: int) -> int:
    """Size of a block's file."""
    return PREFIX.size + len(msgspec.msgpack.encode(header)) + body_bytes + DIGEST_BYTES


def _header_bytes(front: bytes) -> int:
    if len(front) < PREFIX.size:
        raise BadBlockFile(f"it ends after {len(front)} bytes")
    magic, version, length = PREFIX.unpack(front)
    if magic != MAGIC or version != VERSION or length > MAX_HEADER_BYTES:
        raise BadBlockFile(f"it begins with {front!r}, so it is no KV block of version {VERSION}")
    return int(length)


def _decoded(encoded: bytes) -> Header:
    try:
        return msgspec.msgpack.decode(encoded, type=Header)
    except msgspec.DecodeError as error:
        raise BadBlockFile(f"its header cannot be read: {error}") from error
