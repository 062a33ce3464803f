"""Block hashes: the same everywhere, and different for everything that differs."""

from __future__ import annotations

import hashlib
import subprocess
import sys

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.blocks import (
    HASH_BYTES,
    MAX_DEPTH,
    Namespace,
    depth_of,
    depths_of,
    hash_block,
    hash_blocks,
    join_hashes,
    pack_tokens,
    split_hashes,
    unpack_tokens,
)

BASE = Namespace(
    weights="w1", tokenizer="t1", kv_dtype="bfloat16", block_size=16, positions="rope:10000.0"
)
tokens_lists = st.lists(st.integers(0, 2**32 - 1), max_size=80)


def test_hashes_are_the_documented_chain() -> None:
    root = BASE.root(b"secret")
    tokens = list(range(40))
    blocks = [b"".join(t.to_bytes(4, "little") for t in range(at, at + 16)) for at in (0, 16)]
    first = hashlib.sha256(root + blocks[0]).digest()[:14] + b"\0\0"
    second = hashlib.sha256(first + blocks[1]).digest()[:14] + b"\1\0"
    assert hash_blocks(root, pack_tokens(tokens), 16) == [first, second]


@given(tokens_lists, st.integers(0, 3))
def test_a_hash_tells_how_deep_it_is(tokens: list[int], cut: int) -> None:
    packed = pack_tokens(tokens)
    chain = hash_blocks(BASE.root(), packed, 2)
    assert [depth_of(block) for block in chain] == list(range(len(chain)))
    assert depths_of(join_hashes(chain)).tolist() == list(range(len(chain)))
    if len(chain) > cut:  # a chain that goes on is the same as one in one piece
        rest = hash_blocks(chain[cut], packed[8 * (cut + 1) :], 2)
        assert chain[: cut + 1] + rest == chain


def test_blocks_beyond_the_deepest_that_can_be_told_stay_different() -> None:
    packed = pack_tokens([7] * (MAX_DEPTH + 5))
    chain = hash_blocks(BASE.root(), packed, 1)
    assert [depth_of(block) for block in chain[-6:]] == [MAX_DEPTH - 1] + [MAX_DEPTH] * 5
    assert len(set(chain)) == len(chain)
    assert hash_block(chain[-2], pack_tokens([7])) == chain[-1]


def test_hashes_do_not_depend_on_the_process() -> None:
    code = (
        "from cluster.blocks import *;"
        "n = Namespace(weights='w1', tokenizer='t1', kv_dtype='bfloat16', block_size=16,"
        " positions='rope:10000.0');"
        "print(hash_blocks(n.root(b's'), pack_tokens(range(64)), 16)[-1].hex())"
    )
    seen = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert seen == {hash_blocks(BASE.root(b"s"), pack_tokens(range(64)), 16)[-1].hex() + "\n"}


@pytest.mark.parametrize("field", BASE.__struct_fields__)
def test_every_field_separates_namespaces(field: str) -> None:
    value = 32 if field == "block_size" else "other"
    other = msgspec.structs.replace(BASE, **{field: value})
    assert other.root() != BASE.root()
    assert other.check() != BASE.check()


def test_a_field_cannot_pose_as_another() -> None:
    assert BASE.for_request(adapter="a").root() != BASE.for_request(tenant="a").root()
    assert (
        BASE.for_request(adapter="a", tenant="b").root()
        != BASE.for_request(adapter="ab", tenant="").root()
    )
    assert BASE.root(b"x") != BASE.root(b"y")


@given(tokens_lists, tokens_lists, st.sampled_from([1, 4, 16]))
def test_equal_hashes_exactly_where_prefixes_are_equal(
    left: list[int], right: list[int], block_size: int
) -> None:
    root = BASE.root()
    a = hash_blocks(root, pack_tokens(left), block_size)
    b = hash_blocks(root, pack_tokens(right), block_size)
    assert len(a) == len(left) // block_size
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        end = (i + 1) * block_size
        assert (x == y) == (left[:end] == right[:end])


@given(tokens_lists)
def test_packing_round_trips(tokens: list[int]) -> None:
    assert unpack_tokens(pack_tokens(tokens)) == tokens
    hashes = hash_blocks(b"root", pack_tokens(tokens), 4)
    assert split_hashes(join_hashes(hashes)) == hashes


def test_one_block_at_a_time_gives_the_same_chain() -> None:
    parent, chain = BASE.root(), []
    for i in range(5):
        parent = hash_block(parent, pack_tokens(range(16 * i, 16 * i + 16)))
        chain.append(parent)
    assert chain == hash_blocks(BASE.root(), pack_tokens(range(80)), 16)
    assert all(len(h) == HASH_BYTES for h in chain)


def test_torn_messages_are_refused() -> None:
    with pytest.raises(ValueError, match="multiple of 4"):
        unpack_tokens(b"abc")
    with pytest.raises(ValueError, match="multiple of 16"):
        split_hashes(b"abc")
