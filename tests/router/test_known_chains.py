"""Hashes of known runs are those that hashing gives."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.blocks import hash_blocks, pack_tokens
from router import known_chains
from router.known_chains import RUN_TOKENS, KnownChains

ROOT = b"r" * 32


@given(
    st.lists(
        st.tuples(st.integers(0, 4), st.integers(0, 3 * RUN_TOKENS), st.integers(0, 300)),
        max_size=8,
    ),
    st.sampled_from([1, 4, 16, 48, 512]),
)
def test_prompts_that_share_beginnings_have_the_hashes_of_their_tokens(prompts, block_size):
    chains = KnownChains(kept_runs=4)
    for salt, shared, own in prompts:
        root = bytes([salt]) * 32
        packed = pack_tokens([*range(shared), *range(shared + salt, shared + salt + own)])
        assert chains.hash_blocks(root, packed, block_size) == hash_blocks(root, packed, block_size)


def test_only_what_is_new_is_hashed(monkeypatch):
    hashed = []

    def counting(parent, packed, block_size):
        hashed.append(len(packed) // 4)
        return hash_blocks(parent, packed, block_size)

    monkeypatch.setattr(known_chains, "hash_blocks", counting)
    chains, packed = KnownChains(), pack_tokens(range(4 * RUN_TOKENS))
    chains.hash_blocks(ROOT, packed[: 4 * 3 * RUN_TOKENS], 16)
    assert hashed == [RUN_TOKENS] * 3
    chains.hash_blocks(ROOT, packed, 16)
    assert hashed == [RUN_TOKENS] * 4


@pytest.mark.parametrize("kept", [2, 10])
def test_memory_is_bounded_and_what_is_used_stays(kept, monkeypatch):
    chains = KnownChains(kept_runs=kept)
    used = pack_tokens(range(RUN_TOKENS))
    chains.hash_blocks(ROOT, used, 16)
    for other in range(1, 50):
        chains.hash_blocks(ROOT, pack_tokens(range(other, other + RUN_TOKENS)), 16)
        assert len(chains._young) + len(chains._old) <= kept
        with monkeypatch.context() as patch:
            if kept > 2:
                patch.setattr(known_chains, "hash_blocks", None)  # known, so it is not called
            chains.hash_blocks(ROOT, used, 16)
