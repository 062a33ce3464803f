"""What separates caches, through the engine and with the roots that a worker really uses."""

import msgspec
import pytest
import torch

from cluster.blocks import Namespace, hash_block, hash_blocks, pack_tokens
from tests.worker.small_engine import BLOCK, ROOT, SmallEngine, tokens_of

NAMESPACE = Namespace(
    weights="w" * 64, tokenizer="t" * 64, kv_dtype="float32", block_size=BLOCK, positions="rope:1e4"
)
SECRET = b"of this pool"
PROMPT = tokens_of(1, 5 * BLOCK + 3)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    torch.set_num_threads(1)


def root_of(adapter="", salt="", secret=SECRET, **changes):
    return (
        msgspec.structs.replace(NAMESPACE, **changes)
        .for_request(adapter=adapter, tenant=salt)
        .root(secret)
    )


@pytest.mark.parametrize(
    "other",
    [
        root_of(salt="tenant"),
        root_of(adapter="lora"),
        root_of(weights="v" * 64),
        root_of(kv_dtype="bfloat16"),
        root_of(tokenizer="u" * 64),
        root_of(positions="rope:5e5"),
        root_of(secret=b"of another pool"),
    ],
    ids=["cache_salt", "adapter", "weights", "kv_dtype", "tokenizer", "positions", "secret"],
)
def test_any_one_difference_separates_the_caches(other):
    engine = SmallEngine()
    assert engine.run("first", PROMPT, root=root_of()) == 0
    assert engine.run("other", PROMPT, root=other) == 0
    assert engine.run("other again", PROMPT, root=other) == 5 * BLOCK
    assert engine.run("first again", PROMPT, root=root_of()) == 5 * BLOCK
    assert len(set(engine.core.cached_blocks())) == engine.core.load().cached_blocks
    stats = engine.core.stats()
    assert (stats.hits, stats.misses, stats.collisions) == (2, 2, 0)


def test_an_adapter_named_like_a_tenant_is_neither():
    engine = SmallEngine()
    roots = [root_of(adapter="x"), root_of(salt="x"), root_of(adapter="x", salt="x")]
    assert [engine.run(str(n), PROMPT, root=root) for n, root in enumerate(roots)] == [0, 0, 0]


def test_namespaces_that_run_side_by_side_do_not_wait_for_one_another():
    """Held-back requests share by hash as well: another tenant's prefix is none of theirs."""
    engine = SmallEngine(chunk_tokens=BLOCK)
    for salt in ("a", "b", "a", "b"):
        engine.add(f"{salt}{len(engine.prompts)}", PROMPT, root=root_of(salt=salt))
    engine.drain()
    hits = {name: output.hit_tokens for name, output in engine.final.items()}
    assert hits == {"a0": 0, "b1": 0, "a2": 5 * BLOCK, "b3": 5 * BLOCK}


class TestCollisions:
    """A hash that knows only the number of the block collides at every depth."""

    @staticmethod
    def colliding(parent: bytes, packed: bytes) -> bytes:
        depth = 0 if len(parent) == 32 else parent[0] + 1
        return bytes([depth]) * 16

    def test_a_collision_is_a_counted_miss_and_the_answer_is_right(self):
        engine = SmallEngine(hash_block=self.colliding)
        assert engine.run("first", PROMPT) == 0
        assert engine.core.stats().collisions == 0
        assert engine.run("other", tokens_of(2, len(PROMPT))) == 0
        looked_up_and_committed = 2
        assert engine.core.stats().collisions == looked_up_and_committed
        assert engine.run("first again", PROMPT) == 5 * BLOCK

    def test_a_collision_across_namespaces_is_a_miss_too(self):
        engine = SmallEngine(hash_block=self.colliding)
        assert engine.run("first", PROMPT, root=root_of()) == 0
        assert engine.run("tenant", PROMPT, root=root_of(salt="tenant")) == 0
        assert engine.core.stats().collisions > 0

    def test_a_collision_in_the_middle_keeps_what_is_before_it(self):
        stem = tokens_of(3, 2 * BLOCK)
        end_of_stem = hash_blocks(ROOT, pack_tokens(stem), BLOCK)[-1]

        def weak_below_the_stem(parent: bytes, packed: bytes) -> bytes:
            return b"c" * 16 if parent == end_of_stem else hash_block(parent, packed)

        engine = SmallEngine(hash_block=weak_below_the_stem)
        engine.run("first", [*stem, *tokens_of(4, BLOCK + 1)], max_tokens=1)
        assert engine.core.load().cached_blocks == 3
        assert engine.run("second", [*stem, *tokens_of(5, BLOCK + 1)], max_tokens=1) == 2 * BLOCK
        assert engine.core.stats().collisions == 2  # on the look-up, and on the commit
