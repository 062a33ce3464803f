"""Several steady steps taken as one leave the engine as single steps leave it."""

import random
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.blocks import pack_tokens
from cluster.protocol import RequestError, Sampling
from worker.engine import EngineCore
from worker.engine_config import EngineConfig
from worker.eviction.registry import parse_eviction
from worker.messages import EngineRequest

ROOT = b"r" * 32


def token_after(request_id, length):
    return (hash_of(request_id) + length * 7) % 5


def hash_of(text):
    return sum(text.encode())


class Runner:
    def __init__(self):
        self.contexts = []

    def execute(self, batch):
        self.contexts.append([(item.request_id, item.start, len(item.token_ids)) for item in batch])
        return [
            token_after(item.request_id, item.start + len(item.token_ids)) if item.sample else None
            for item in batch
        ]


class Engine:
    """Steps one by one, or by leaps where `leaps` is set. Every step takes a second."""

    def __init__(self, leaps, eviction="lru", **sizes):
        self.leaps = leaps
        self.core = EngineCore(
            EngineConfig(context_tokens=400, **sizes),
            Runner(),
            make_policy=parse_eviction(eviction),
        )
        self.now = 0.0
        self.answers = {}
        self.leapt = 0

    def add(self, name, prompt, max_tokens):
        self.core.add(
            EngineRequest(
                request_id=name,
                token_ids=pack_tokens(prompt),
                namespace_root=ROOT,
                sampling=Sampling(max_tokens=max_tokens, ignore_eos=True),
            )
        )

    def offer(self, name, prompt, max_tokens):
        """The status of a refusal, 0 where it is taken."""
        try:
            self.add(name, prompt, max_tokens)
        except RequestError as error:
            return error.status
        return 0

    def work(self, until):
        while self.core.has_work() and self.now < until:
            steps = min(self.core.steady_steps(), int(until - self.now)) if self.leaps else 0
            if steps:
                self.leap(steps)
            else:
                self.now += 1
                for output in self.core.step(self.now):
                    self.answers.setdefault(output.request_id, []).extend(output.token_ids)
        self.core.check()
        self.now = until

    def leap(self, steps):
        self.now += steps
        self.leapt += steps
        sampled = []
        for name, computed in self.core.decoding():
            tokens = [token_after(name, computed + 1 + i) for i in range(steps)]
            self.answers.setdefault(name, []).extend(tokens)
            sampled.append(array("I", tokens))
        self.core.advance(steps, sampled, self.now)

    def state(self):
        changes = self.core.take_changes()
        return (
            self.core.load(),
            self.core.stats(),
            self.core.eviction_ages(),
            self.core.decoding(),
            self.core.cached_blocks(),
            (changes.stored, changes.evicted, changes.received),
            self.answers,
        )


@given(
    seed=st.integers(0, 1 << 30),
    block_size=st.sampled_from([1, 3, 8, 32]),
    capacity_tokens=st.sampled_from([160, 320, 2000]),
    max_batch_size=st.sampled_from([1, 3, 16]),
    token_budget=st.sampled_from([2, 5, 64]),
    eviction=st.sampled_from(["lru", "lfu", "workload_aware"]),
)
@settings(max_examples=80, deadline=None)
def test_leaps_have_the_effect_of_single_steps(
    seed, block_size, capacity_tokens, max_batch_size, token_budget, eviction
):
    sizes = {
        "block_size": block_size,
        "capacity_blocks": capacity_tokens // block_size,
        "max_batch_size": max_batch_size,
        "token_budget": token_budget,
    }
    one, leaping = Engine(False, eviction, **sizes), Engine(True, eviction, **sizes)
    rng = random.Random(seed)
    stems = [[rng.randrange(9) for _ in range(60)] for _ in range(3)]
    for number in range(25):
        prompt = rng.choice(stems)[: rng.randrange(1, 60)] + [rng.randrange(9)] * rng.randrange(20)
        if not prompt:
            continue
        max_tokens, until = rng.randrange(1, 70), one.now + rng.randrange(0, 40)
        one.work(until)
        leaping.work(until)
        assert one.offer(f"r{number}", prompt, max_tokens) == leaping.offer(
            f"r{number}", prompt, max_tokens
        )
        assert one.state() == leaping.state()
    for engine in (one, leaping):
        engine.work(one.now + 100_000)
    assert one.state() == leaping.state()


def engine(**sizes):
    defaults = {"block_size": 8, "capacity_blocks": 20, "max_batch_size": 4, "token_budget": 64}
    return Engine(True, **(defaults | sizes))


def test_an_engine_that_decodes_alone_is_steady_up_to_its_block_s_end():
    alone = engine()
    alone.add("a", [1] * 10, 30)
    assert alone.core.steady_steps() == 0  # it waits
    alone.work(1)
    assert alone.core.steady_steps() == 5  # tokens 10 to 14; the 16th fills the block


def test_no_answer_ends_in_a_steady_step():
    alone = engine()
    alone.add("a", [1] * 9, 4)
    alone.work(1)
    assert alone.core.steady_steps() == 2  # the fourth token is its last


def test_a_prefill_is_not_steady():
    busy = engine(token_budget=8)
    busy.add("a", [1] * 4, 30)
    busy.work(1)
    busy.add("b", [2] * 40, 30)
    busy.work(2)
    assert busy.core.steady_steps() == 0


@pytest.mark.parametrize(("blocks", "steady"), [(20, 0), (4, 5)])
def test_who_waits_ends_the_run_only_where_there_is_room(blocks, steady):
    crowded = engine(capacity_blocks=blocks)
    crowded.add("a", [1] * 10, 22)
    crowded.work(1)
    crowded.add("b", [2] * 20, 8)
    assert crowded.core.steady_steps() == steady


def test_most_steps_of_long_answers_are_steady():
    long = Engine(True, block_size=128, capacity_blocks=10, max_batch_size=4, token_budget=64)
    long.add("a", [1] * 10, 300)
    long.work(1000)
    assert long.leapt > 290
