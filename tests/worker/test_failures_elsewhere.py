"""Failures that other engines had, each reproduced here on a real model with the right outcome.

`small_engine` compares every answer with a plain reference and the books with the pool, so each
test has to bring about its situation and to say what is special about it.
"""

import pytest
import torch

from cluster.blocks import Namespace, hash_blocks, pack_tokens
from tests.cluster.bus_bench import Bench
from tests.worker.small_engine import BLOCK, ROOT, SmallEngine, tokens_of

STEM = tokens_of(1, 4 * BLOCK)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    torch.set_num_threads(1)


def hashes_of(tokens, root=ROOT):
    return hash_blocks(root, pack_tokens(tokens), BLOCK)


def cached_of(engine, tokens=STEM):
    """Leading tokens of a prompt that are cached now."""
    return engine.core._cache.probe(hashes_of(tokens), len(tokens) // BLOCK).cached * BLOCK


def test_hash_registered_before_kv_is_written():
    """A second request with the same prefix comes while the first is in its prefill."""
    engine = SmallEngine(chunk_tokens=BLOCK)
    engine.add("writes", [*STEM, 1], max_tokens=4)
    engine.step()
    assert engine.core.cached_blocks() == hashes_of(STEM)[:1]
    execute, visible = engine.runner.execute, []

    def watching(batch):
        visible.append(len(engine.core.cached_blocks()))
        answers = execute(batch)
        assert len(engine.core.cached_blocks()) == visible[-1], "visible before its commit"
        return answers

    engine.runner.execute = watching
    engine.add("reads", [*STEM, 2], max_tokens=4)
    engine.drain()
    assert visible[:4] == [1, 2, 3, 4]
    assert engine.final["reads"].hit_tokens == len(STEM)


def test_a_failed_step_registers_nothing():
    engine = SmallEngine(chunk_tokens=2 * BLOCK)
    engine.add("fails", [*STEM, 1])
    execute = engine.runner.execute

    def failing(batch):
        execute(batch)
        raise RuntimeError("the accelerator fell over")

    engine.runner.execute = failing
    (output,) = engine.core.step()
    assert (output.finish_reason, engine.core.cached_blocks()) == ("error", [])
    engine.runner.execute = execute
    del engine.prompts["fails"], engine.tokens["fails"]
    assert engine.run("again", [*STEM, 1]) == 0


def test_block_evicted_between_match_and_use():
    """The match is the oldest thing in a full pool, and the rest of the prompt needs room."""
    engine = SmallEngine(blocks=8)
    engine.run("oldest", [*STEM, 1], max_tokens=1)
    engine.run("newer", tokens_of(2, 4 * BLOCK), max_tokens=1)
    assert engine.core.load().cached_blocks == 8
    assert engine.run("matches", [*STEM, *tokens_of(3, 3 * BLOCK)], max_tokens=2) == len(STEM)
    assert engine.core.stats().evictions >= 3


def test_stale_match_count_after_a_failed_admission():
    """What was matched at the first attempt is evicted before the second."""
    engine = SmallEngine(blocks=10)
    engine.run("stem", [*STEM, 1], max_tokens=1)
    engine.add("grows", tokens_of(2, 3 * BLOCK), max_tokens=4 * BLOCK)
    engine.step()
    engine.add("waits", [*STEM, *tokens_of(3, 4 * BLOCK)], max_tokens=2)
    assert engine.core.load().pending_prefill_tokens == 4 * BLOCK
    engine.step()
    assert engine.core.load().waiting == 1
    while cached_of(engine) == len(STEM):
        engine.step()
    assert engine.core.load().waiting == 1, "it was admitted before its match was lost"
    left = cached_of(engine)
    engine.drain()
    assert engine.final["waits"].hit_tokens <= left < len(STEM)


def test_full_prompt_hit_leaving_nothing_to_compute():
    engine = SmallEngine()
    for length in (4 * BLOCK, 4 * BLOCK - 1, 4 * BLOCK + 1, BLOCK, 1):
        prompt = tokens_of(length, length)
        assert engine.run(f"{length} cold", prompt) == 0
        assert engine.run(f"{length} warm", prompt) == (length - 1) // BLOCK * BLOCK


@pytest.mark.parametrize("steps", range(8))
def test_abort_leaking_blocks(steps):
    """At every stage: before admission, in the prefill, held, sharing, decoding."""
    engine = SmallEngine(chunk_tokens=BLOCK, max_batch_size=2)
    for number in range(3):
        engine.add(f"r{number}", [*STEM, number], max_tokens=3)
    for _ in range(steps):
        engine.step()
    for name in list(engine.prompts):
        assert engine.core.cancel(name) == (name not in engine.final)
        engine.core.check()
    load = engine.core.load()
    assert (load.running, load.waiting, load.pending_prefill_tokens) == (0, 0, 0)
    assert load.free_blocks == engine.config.capacity_blocks
    engine.run("after", [*STEM, 9])


def test_preempted_sequence_keeping_a_stale_cached_count():
    """It had a hit of 4 blocks; when it comes back these are gone."""
    engine = SmallEngine(blocks=12)
    engine.run("stem", [*STEM, 1], max_tokens=1)
    engine.add("early", tokens_of(2, 2 * BLOCK), max_tokens=8 * BLOCK)
    engine.step()
    engine.add("late", [*STEM, 7], max_tokens=4 * BLOCK)
    engine.step()
    assert engine.core.load().running == 2
    while not engine.core.stats().preemptions:
        engine.step()
    resumed = engine.core.stats().resumed_tokens
    while engine.core.load().waiting:
        engine.step()
    assert engine.core.stats().resumed_tokens - resumed < len(STEM)
    engine.drain()
    assert engine.final["late"].hit_tokens == len(STEM)  # what it reused when first admitted


def test_two_adapters_or_tenants_sharing_hashes():
    namespace = Namespace(
        weights="w", tokenizer="t", kv_dtype="float32", block_size=BLOCK, positions="rope"
    )
    engine = SmallEngine()
    for adapter, tenant in (("", ""), ("x", ""), ("", "x"), ("y", ""), ("xy", ""), ("x", "y")):
        root = namespace.for_request(adapter, tenant).root(b"secret")
        assert engine.run(f"{adapter}/{tenant}", STEM, root=root) == 0


def test_removed_event_while_a_duplicate_of_the_block_remains():
    """Two compute the same last block at once; then one ends, and the pool evicts."""
    engine = SmallEngine(blocks=12)
    engine.add("one", STEM, max_tokens=1)
    engine.add("two", STEM, max_tokens=BLOCK)
    published: set[bytes] = set()

    def publish():
        changes = engine.core.take_changes()
        assert not published & set(changes.stored)
        assert set(changes.evicted) <= published
        published.update(changes.stored)
        published.difference_update(changes.evicted)
        assert published == set(engine.core.cached_blocks())

    while engine.core.has_work():
        engine.step()
        publish()
    assert engine.core.stats().duplicates >= 1
    assert set(hashes_of(STEM)) <= published
    engine.run("fills", tokens_of(4, 9 * BLOCK), max_tokens=2)
    publish()
    assert engine.core.stats().evictions


async def test_same_name_restart_keeping_old_blocks(redis_url, pool):
    """A worker dies without a word, and another starts under its name with an empty cache."""
    bench = Bench(redis_url, pool)
    try:
        _, picture = bench.follower()
        lives = []
        for epoch, prompt in ((1, STEM), (2, tokens_of(5, 2 * BLOCK))):
            if lives:
                await bench.stop(lives.pop())
            engine = SmallEngine()
            publisher = bench.publisher("same name", epoch)
            lives.append(publisher)
            engine.run("r", [*prompt, 1], max_tokens=1)
            changes = engine.core.take_changes()
            publisher.update(
                load=engine.core.load(), stored=changes.stored, received=changes.received
            )
            held = set(engine.core.cached_blocks())
            assert held == set(hashes_of(prompt))
            await picture.until(lambda held=held: picture.sets.get("same name") == held)
        assert picture.cards["same name"].epoch == 2
    finally:
        for part in list(bench.tasks):
            await bench.stop(part)
