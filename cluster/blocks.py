"""Identity of KV blocks: namespaces and chained block hashes.

A block hash names a block *and everything before it*. Two workers, two routers and two
processes must derive the same bytes from the same tokens, so nothing here depends on the
process (no `hash()`), and every field of a namespace is tagged and length-prefixed: an
adapter that is named like a tenant never collides with it.

    h[i] = SHA-256(h[i-1] or root, tokens[i] as little-endian u32)[:14], then i as little-endian u16

A hash shows its depth in the chain, so that a bounded index can drop the deepest blocks without
extra bytes in messages or memory. 112 bits of SHA-256 are left, and only blocks of one
depth can collide.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache

import msgspec
import numpy as np
from numpy.typing import NDArray

HASH_BYTES = 16
"""Size of a block hash in bytes."""

DIGEST_BYTES = 14
"""Of them, those of the digest. The others are the depth."""

MAX_DEPTH = 65_535
"""Blocks beyond it are told to be as deep as this."""

KEPT_SPLITTERS = 512
"""Most pieces for which their splitter is kept: those of reports and prompts, not of whole sets.
Also the number of splitters that are kept."""

KEPT_DEPTHS = [depth.to_bytes(2, "little") for depth in range(8192)]
"""Packed depths of all but very long prompts: half a megabyte."""

DOMAIN = b"stemroute/block-chain/2"


class Namespace(msgspec.Struct, frozen=True, kw_only=True):
    """All that makes KV incompatible. Changing any field separates the caches.

    weights      digest of the model's weights (hex)
    tokenizer    digest of the tokenizer and its chat template (hex)
    kv_dtype     dtype of the stored keys and values, such as "bfloat16"
    block_size   tokens in a block
    positions    position scheme, such as "rope:100000.0"
    adapter      name of the adapter of a request, "" for none
    tenant       `cache_salt` of a request, "" for none
    """

    weights: str
    tokenizer: str
    kv_dtype: str
    block_size: int
    positions: str
    adapter: str = ""
    tenant: str = ""

    def root(self, secret: bytes = b"") -> bytes:
        """SHA-256 (32 bytes) over the tagged, length-prefixed fields and the pool's secret.

        The secret prevents readers of the published hashes from testing guesses of prompts.
        """
        digest = hashlib.sha256()
        _feed(digest, b"domain", DOMAIN)
        for name in self.__struct_fields__:
            _feed(digest, name.encode(), str(getattr(self, name)).encode())
        _feed(digest, b"secret", secret)
        return digest.digest()

    def check(self, secret: bytes = b"") -> str:
        """Short digest (hex) that is equal exactly where root and secret are equal.

        It is published, so it is derived one way from the root and reveals nothing of it.
        """
        return hashlib.sha256(b"stemroute/namespace-check/1" + self.root(secret)).hexdigest()[:16]

    def for_request(self, adapter: str = "", tenant: str = "") -> Namespace:
        """The namespace of one request: this one with the request's adapter and tenant."""
        if not adapter and not tenant:
            return self
        return msgspec.structs.replace(self, adapter=adapter, tenant=tenant)


def _feed(digest: hashlib._Hash, tag: bytes, value: bytes) -> None:
    for part in (tag, value):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """Token ids as little-endian u32, 4 bytes a token."""
    return np.asarray(tokens, dtype="<u4").tobytes()


def unpack_tokens(packed: bytes) -> list[int]:
    """Inverse of `pack_tokens`. Raises ValueError where the size is no multiple of 4."""
    if len(packed) % 4:
        raise ValueError(f"packed tokens must be a multiple of 4 bytes, got {len(packed)}")
    ids: list[int] = np.frombuffer(packed, dtype="<u4").tolist()
    return ids


def depth_of(block: bytes) -> int:
    """Blocks before this one in its chain, at most `MAX_DEPTH`."""
    return int.from_bytes(block[DIGEST_BYTES:], "little")


def depths_of(joined: bytes) -> NDArray[np.uint16]:
    """`[n]`: `depth_of` each of `n` joined hashes."""
    return np.frombuffer(joined, dtype="<u2")[DIGEST_BYTES // 2 :: HASH_BYTES // 2]


def hash_block(parent: bytes, packed: bytes) -> bytes:
    """Hash of one full block.

    `parent` is the previous block's hash, or the namespace root for the first block.
    """
    depth = min(_depth_after(parent), MAX_DEPTH)
    return hashlib.sha256(parent + packed).digest()[:DIGEST_BYTES] + depth.to_bytes(2, "little")


def hash_blocks(parent: bytes, packed: bytes, block_size: int) -> list[bytes]:
    """Chained hashes of all full blocks of a prompt, or of what continues the block `parent`.

    `packed` holds tokens (`pack_tokens`); a partial last block is left out.
    """
    sha256 = hashlib.sha256
    step = 4 * block_size
    first, count = _depth_after(parent), len(packed) // step
    blocks = _pieces(packed, step, count)
    return [
        parent := sha256(parent + block).digest()[:DIGEST_BYTES] + depth
        for block, depth in zip(blocks, _packed_depths(first, count), strict=True)
    ]


def _packed_depths(first: int, count: int) -> Sequence[bytes]:
    """The ends of `count` hashes from depth `first` on."""
    if first + count <= len(KEPT_DEPTHS):
        return KEPT_DEPTHS[first : first + count]
    return [min(depth, MAX_DEPTH).to_bytes(2, "little") for depth in range(first, first + count)]


def _depth_after(parent: bytes) -> int:
    return depth_of(parent) + 1 if len(parent) == HASH_BYTES else 0  # the root is longer


def join_hashes(hashes: Iterable[bytes]) -> bytes:
    """Hashes as one byte string, 16 bytes each: their form in messages."""
    return b"".join(hashes)


def split_hashes(joined: bytes) -> list[bytes]:
    """Inverse of `join_hashes`. Raises ValueError where the size is no multiple of 16."""
    if len(joined) % HASH_BYTES:
        raise ValueError(f"joined hashes must be a multiple of {HASH_BYTES}, got {len(joined)}")
    return list(_pieces(joined, HASH_BYTES, len(joined) // HASH_BYTES))


def _pieces(joined: bytes, size: int, count: int) -> tuple[bytes, ...]:
    """The first `count` pieces of `size` bytes, several times as fast as by slicing."""
    return (_kept_splitter if count <= KEPT_SPLITTERS else _splitter)(size, count)(joined)


def _splitter(size: int, count: int) -> Callable[[bytes], tuple[bytes, ...]]:
    return struct.Struct(f"{size}s" * count).unpack_from


_kept_splitter = lru_cache(maxsize=KEPT_SPLITTERS)(_splitter)
