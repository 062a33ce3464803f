"""Greedy output with the prefix cache equals greedy output without it, token for token.

The real engine on a tiny random model in fp32. Every test also asserts that the situation it is
about has really occurred.
"""

import functools
import random

import pytest
import torch

from cluster.blocks import pack_tokens
from cluster.protocol import Sampling
from tests.worker.tiny_models import tiny_model
from worker.engine import EngineCore
from worker.engine_config import EngineConfig
from worker.messages import EngineRequest
from worker.runner import TorchRunner

BLOCK = 16
CHUNKS = [1, 7, 16, 64, 0]
MODEL = tiny_model(seed=5)


def tokens_of(seed, length):
    generator = random.Random(seed)
    return [generator.randrange(MODEL.config.vocab_size) for _ in range(length)]


class Engine:
    """An engine with its runner, and what came out of it for each request."""

    def __init__(self, *, blocks=64, chunk_tokens=0, caching=True, max_batch_size=8):
        config = EngineConfig(
            block_size=BLOCK,
            capacity_blocks=blocks,
            context_tokens=MODEL.config.context_tokens,
            max_batch_size=max_batch_size,
            token_budget=256,
            chunk_tokens=chunk_tokens,
            prefix_caching=caching,
        )
        self.core = EngineCore(config, TorchRunner(MODEL, blocks, BLOCK))
        self.tokens: dict[str, list[int]] = {}
        self.hits: dict[str, int] = {}
        self.ended: list[str] = []

    def add(self, name, prompt, max_tokens=24, temperature=0.0):
        self.core.add(
            EngineRequest(
                request_id=name,
                token_ids=pack_tokens(prompt),
                namespace_root=bytes(32),
                sampling=Sampling(max_tokens=max_tokens, temperature=temperature, seed=3),
            )
        )
        self.tokens[name] = []

    def step(self):
        for output in self.core.step():
            assert not output.error, output.error
            self.tokens[output.request_id] += output.token_ids
            self.hits.setdefault(output.request_id, output.hit_tokens)
            if output.finish_reason:
                self.ended.append(output.request_id)
        self.core.check()

    def drain(self):
        while self.core.has_work():
            self.step()
        return self

    def run(self, name, prompt, **fields):
        self.add(name, prompt, **fields)
        self.drain()
        return self.tokens[name]


def uncached(prompt, max_tokens=24, temperature=0.0):
    """The answer of an engine without a cache that serves this request alone, in one chunk."""
    return list(_uncached(tuple(prompt), max_tokens, temperature))


@functools.cache
def _uncached(prompt, max_tokens, temperature):
    engine = Engine(caching=False)
    answer = engine.run("r", prompt, max_tokens=max_tokens, temperature=temperature)
    assert engine.hits == {"r": 0}
    assert len(answer) == max_tokens
    return tuple(answer)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    torch.set_num_threads(1)


def test_answers_wander_and_depend_on_the_prefix():
    """Else the comparisons below would prove little: a wrong prefix must show in the answer."""
    prompt = tokens_of(1, 40)
    answer = uncached(prompt)
    assert len(set(answer)) > 8
    for position in (0, 15, 16, 31):
        changed = list(prompt)
        changed[position] = (changed[position] + 1) % MODEL.config.vocab_size
        assert uncached(changed) != answer


@pytest.mark.parametrize("chunk_tokens", CHUNKS)
def test_a_full_block_hit(chunk_tokens):
    stem = tokens_of(1, 48)
    engine = Engine(chunk_tokens=chunk_tokens)
    assert engine.run("first", [*stem, *tokens_of(2, 20)]) == uncached([*stem, *tokens_of(2, 20)])
    prompt = [*stem, *tokens_of(3, 30)]
    assert engine.run("second", prompt) == uncached(prompt)
    assert engine.hits == {"first": 0, "second": 48}
    assert engine.core.stats().partial_hits == 1


@pytest.mark.parametrize("chunk_tokens", CHUNKS)
def test_a_prompt_that_is_no_multiple_of_the_block_size(chunk_tokens):
    prompt = tokens_of(4, 37)
    engine = Engine(chunk_tokens=chunk_tokens)
    expected = uncached(prompt)
    assert engine.run("first", prompt) == expected
    assert engine.run("second", prompt) == expected
    assert engine.hits == {"first": 0, "second": 32}


@pytest.mark.parametrize("chunk_tokens", CHUNKS)
@pytest.mark.parametrize("length", [32, 33, 48, 16])
def test_a_full_prompt_hit(chunk_tokens, length):
    """Something is left to compute, or there would be no logits to sample from."""
    prompt = tokens_of(5, length)
    engine = Engine(chunk_tokens=chunk_tokens)
    expected = uncached(prompt)
    assert engine.run("first", prompt) == expected
    assert engine.run("second", prompt) == expected
    assert engine.hits["second"] == (length - 1) // BLOCK * BLOCK
    assert engine.core.stats().hits == (1 if length > BLOCK else 0)


@pytest.mark.parametrize("chunk_tokens", CHUNKS)
@pytest.mark.parametrize("warm", [True, False])
def test_several_requests_share_a_prefix_at_once(chunk_tokens, warm):
    stem = tokens_of(6, 48)
    prompts = {f"r{index}": [*stem, *tokens_of(10 + index, 5 + 9 * index)] for index in range(4)}
    engine = Engine(chunk_tokens=chunk_tokens)
    if warm:
        engine.run("warm", stem, max_tokens=1)
        engine.run("warmer", [*stem, 1], max_tokens=1)
    for name, prompt in prompts.items():
        engine.add(name, prompt)
    together = 0
    while engine.core.has_work():
        engine.step()
        together = max(together, engine.core.load().running)
    assert together == 4
    if warm:
        assert all(engine.hits[name] == 48 for name in prompts)
    for name, prompt in prompts.items():
        assert engine.tokens[name] == uncached(prompt), name


@pytest.mark.parametrize("chunk_tokens", CHUNKS)
def test_one_ends_while_others_with_its_prefix_run(chunk_tokens):
    stem = tokens_of(7, 32)
    prompts = {name: [*stem, *tokens_of(seed, 9)] for seed, name in enumerate("abc", start=20)}
    limits = {"a": 30, "b": 4, "c": 17}
    engine = Engine(chunk_tokens=chunk_tokens)
    engine.run("warm", [*stem, 1], max_tokens=1)
    for name, prompt in prompts.items():
        engine.add(name, prompt, max_tokens=limits[name])
    while "b" not in engine.ended:
        engine.step()
    assert engine.core.load().running == 2
    engine.core.cancel("c")
    part = list(engine.tokens["c"])
    engine.drain()
    assert engine.hits == {"warm": 0, "a": 32, "b": 32, "c": 32}
    assert engine.tokens["a"] == uncached(prompts["a"], 30)
    assert engine.tokens["b"] == uncached(prompts["b"], 4)
    assert part == uncached(prompts["c"], 17)[: len(part)] != []


@pytest.mark.parametrize("chunk_tokens", CHUNKS)
def test_entries_evicted_while_in_use_by_others(chunk_tokens):
    """The pool is so small that every newcomer evicts; what runs keeps its blocks."""
    stem = tokens_of(8, 32)
    long = [*stem, *tokens_of(30, 10)]
    engine = Engine(blocks=14, chunk_tokens=chunk_tokens)
    for seed in (31, 32, 33):
        engine.run(f"filler{seed}", tokens_of(seed, 64), max_tokens=1)
    engine.run("warm", [*stem, 1], max_tokens=1)
    engine.add("long", long, max_tokens=100)
    engine.step()
    evictions = engine.core.stats().evictions
    others = {}
    while "long" not in engine.ended:
        if engine.core.load().running + engine.core.load().waiting < 2:
            name = f"other{len(others)}"
            others[name] = tokens_of(100 + len(others), 40)
            engine.add(name, others[name], max_tokens=2)
        engine.step()
    engine.drain()
    assert engine.hits["long"] == 32
    assert engine.core.stats().evictions >= evictions + 3
    assert engine.tokens["long"] == uncached(long, 100)
    for name, prompt in others.items():
        assert engine.tokens[name] == uncached(prompt, 2)


@pytest.mark.parametrize("chunk_tokens", CHUNKS)
def test_a_cache_flushed_while_in_use(chunk_tokens):
    prompt = tokens_of(9, 40)
    engine = Engine(chunk_tokens=chunk_tokens)
    engine.run("warm", prompt, max_tokens=1)
    engine.add("runs", prompt)
    while not engine.tokens["runs"]:
        engine.step()
    assert engine.core.cached_blocks()
    engine.core.flush()
    assert engine.core.cached_blocks() == []
    engine.add("later", prompt)
    engine.drain()
    assert engine.hits == {"warm": 0, "runs": 32, "later": 0}
    assert engine.tokens["runs"] == engine.tokens["later"] == uncached(prompt)


@pytest.mark.parametrize("chunk_tokens", CHUNKS)
@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_a_preempted_request_resumes_as_if_nothing_had_happened(chunk_tokens, temperature):
    """Two answers outgrow the pool together; one is preempted and computed again."""
    prompts = {"a": tokens_of(40, 30), "b": tokens_of(41, 30)}
    engine = Engine(blocks=7, chunk_tokens=chunk_tokens)
    for name, prompt in prompts.items():
        engine.add(name, prompt, max_tokens=60, temperature=temperature)
    engine.drain()
    assert engine.core.stats().preemptions >= 1
    for name, prompt in prompts.items():
        assert engine.tokens[name] == uncached(prompt, 60, temperature), name


def test_a_preempted_request_that_finds_its_own_blocks_again():
    """Its blocks stay cached where nobody needs them: it resumes with a hit."""
    prompts = {name: tokens_of(seed, 33) for seed, name in enumerate("ab", start=50)}
    engine = Engine(blocks=9)
    for name, prompt in prompts.items():
        engine.add(name, prompt, max_tokens=40)
    engine.drain()
    stats = engine.core.stats()
    assert stats.preemptions >= 1
    assert stats.resumed_tokens >= BLOCK
    for name, prompt in prompts.items():
        assert engine.tokens[name] == uncached(prompt, 40), name


def test_a_following_turn_reuses_the_answer_before_it():
    """Blocks filled by decoding serve the conversation's next turn."""
    opening = tokens_of(60, 21)
    engine = Engine()
    answer = engine.run("turn1", opening, max_tokens=30)
    following = [*opening, *answer, *tokens_of(61, 12)]
    assert engine.run("turn2", following) == uncached(following)
    assert engine.hits["turn2"] == 48
