"""Hundreds of random schedules on a real model: every answer equals a plain reference's.

The whole engine (core, torch runner, paged attention, sampler) and the server's `Transcript`, on
a tiny model in fp32. Pools are so small that sequences preempt and evict one another, prompts
share prefixes and continue earlier answers, requests are cancelled at every stage, caches are
flushed and steps fail. Before every step all blocks that hold no computed token are filled with
NaN, the padding block too: what a former owner left there must change nothing. The reference
(`plain_llama`) serves one sequence, without cache or blocks.
That every situation was reached is asserted, so that the test cannot become harmless unnoticed.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable

import pytest
import torch

from cluster.blocks import hash_block, pack_tokens
from cluster.protocol import GenerateRequest, RequestError, Sampling
from tests.tiny_model import byte_tokenizer
from tests.worker.plain_llama import all_logits, first_difference
from tests.worker.tiny_models import random_tensors, tiny_config
from worker.answers import Transcript
from worker.batch import NOT_FINITE
from worker.decode_graphs import eager
from worker.engine import EngineCore
from worker.engine_config import EngineConfig
from worker.eviction.registry import parse_eviction
from worker.messages import EngineRequest
from worker.models import LlamaModel
from worker.runner import TorchRunner
from worker.sequence import Status

SCHEDULES = 200
TRITON_SCHEDULES = 2
TOKENIZER = byte_tokenizer()
VOCABULARY = TOKENIZER.get_vocab_size()
MODEL_CONFIG = tiny_config(vocab_size=VOCABULARY, context_tokens=160)
TENSORS = random_tensors(MODEL_CONFIG, seed=11)
MODEL = LlamaModel(MODEL_CONFIG, TENSORS, torch.float32)
END_TOKENS = [257, *range(31, 120, 9)]
EVICTION = ["lru", "lfu", "ttl:ttl_s=20", "workload_aware"]
STAGES = [
    "in a recomputation",
    "preempted",
    "held",
    "in a prefill",
    "decoding",
    "queued",
    "ended",
]
"""Where a cancel may find a request, the rarest first."""
ROOTS = [b"a" * 32, b"b" * 32]


def weak_hash(parent: bytes, packed: bytes) -> bytes:
    """Only 13 values: collides all the time."""
    return bytes([hash_block(parent, packed)[0] % 13]) * 16


def differs_at(prompt: list[int], answer: list[int], sampling: Sampling) -> int | None:
    return first_difference(MODEL_CONFIG, TENSORS, prompt, answer, sampling)


class HostileRunner:
    """The real runner in a pool full of NaN. It fails on demand, after it has computed.

    broken      it fails on every batch
    bad         it fails on batches with this request
    not_finite  rows of logits that were not finite
    """

    def __init__(self, runner: TorchRunner) -> None:
        self.runner = runner
        self.broken = False
        self.bad = ""
        self.not_finite = 0

    def execute(self, batch):
        sampled = self.runner.execute(batch)
        self.not_finite += sampled.count(NOT_FINITE)
        if self.broken or self.bad in [item.request_id for item in batch]:
            raise RuntimeError("the accelerator fell over")
        return sampled

    def poison(self, core: EngineCore) -> None:
        """Fill all blocks with NaN that hold no computed token."""
        held = set(core._cache._hashes)
        for sequence in core._scheduler.running.values():
            computed = -(-sequence.computed_tokens // self.runner.block_size)
            held.update(sequence.block_table[:computed])
        free = torch.tensor(sorted({*range(len(self.runner.pools[0][0]))} - held))
        for pair in self.runner.pools:
            for pool in pair:
                pool[free] = float("nan")


class Client:
    """One request as the server sees it."""

    def __init__(self, prompt: list[int], root: bytes, wanted: GenerateRequest) -> None:
        self.prompt = prompt
        self.root = root
        self.wanted = wanted
        self.transcript = Transcript(wanted, TOKENIZER)
        self.text = ""
        self.tokens: list[int] = []
        self.outcome = ""


class Schedule:
    """One engine, and a random history of what is asked of it."""

    def __init__(self, seed: int, attention: str = "sdpa", graphs: bool = False) -> None:
        self.rng = rng = random.Random(seed)
        self.seen: Counter[str] = Counter()
        size = rng.choice([4, 8, 8, 16])
        self.config = EngineConfig(
            block_size=size,
            capacity_blocks=rng.choice([48, 64, 80, 128]) // size,
            context_tokens=MODEL_CONFIG.context_tokens,
            max_batch_size=rng.randint(2, 6),
            token_budget=rng.choice([8, 24, 64, 200]),
            chunk_tokens=rng.choice([0, 0, 1, 5, 8, 16, 33]),
            max_waiting=rng.choice([3, 50, 50]),
            eos_token_ids=END_TOKENS,
            cache_share=rng.choice([1.0, 1.0, 0.5]),
        )
        blocks = self.config.capacity_blocks
        runner = TorchRunner(MODEL, blocks, size, attention)
        if graphs:
            runner.capture_decodes(self.config.max_batch_size, self.config.sequence_limit, eager)
        self.runner = HostileRunner(runner)
        weak = seed % 10 == 9
        self.core = EngineCore(
            self.config,
            self.runner,
            hash_block=weak_hash if weak else hash_block,
            make_policy=parse_eviction(EVICTION[seed % len(EVICTION)]),
        )
        self.now = 0.0
        stem = [rng.randrange(256) for _ in range(40)]
        self.stems = [stem, stem[:17] + [rng.randrange(256) for _ in range(23)], stem[::-1]]
        self.clients: dict[str, Client] = {}
        self.live: list[str] = []
        self.ended: list[str] = []

    def play(self, operations: int) -> None:
        for _ in range(operations):
            chance = self.rng.random()
            if chance < 0.4 and len(self.live) < 10:
                self.arrive()
            elif self.clients and 0.4 <= chance < self.wish_to_cancel():
                self.cancel_somebody()
            elif chance < 0.465:
                self.flush()
            elif chance < 0.475 and self.core.has_work():
                self.fail()
            else:
                self.step()
        while self.core.has_work():
            self.step()
        self.core.check()
        load = self.core.load()
        assert (load.running, load.waiting, load.pending_prefill_tokens) == (0, 0, 0)
        assert load.free_blocks == self.config.capacity_blocks
        assert not self.live
        assert not self.runner.not_finite

    def arrive(self) -> None:
        rng = self.rng
        earlier = self.clients[rng.choice(self.ended)] if self.ended else None
        chance = rng.random()
        stop: list[str] = []
        root = rng.choice([ROOTS[0], ROOTS[0], ROOTS[1]])
        if earlier is not None and chance < 0.25:  # the next turn of a conversation
            root = earlier.root
            prompt = [*earlier.prompt, *earlier.tokens, *self.tail(1)]
        elif earlier is not None and chance < 0.5:  # the same again, up to a string of its answer
            root, prompt = earlier.root, list(earlier.prompt)
            if len(earlier.text) > 2:
                cut = rng.randrange(1, len(earlier.text))
                # A replacement character may yet become another: no string of the reference.
                stop = [earlier.text[cut : cut + rng.randint(1, 3)].strip("\ufffd")]
                stop = [string for string in stop if string and "\ufffd" not in string]
        else:
            stem = rng.choice(self.stems)
            prompt = stem[: rng.choice([1, 8, 16, 17, 24, 32, 40])] + self.tail(0)
        greedy = bool(stop) or rng.random() < 0.7
        sampling = Sampling(
            max_tokens=rng.choice([1, 5, 12, 20, 32]),
            temperature=0.0 if greedy else 0.8,
            seed=rng.randrange(5),
            stop=stop or rng.choice([[], [*"aeiouxyzQ"]]),
            ignore_eos=rng.random() < 0.5,
        )
        request_id = f"r{len(self.clients)}"
        wanted = GenerateRequest(
            request_id=request_id,
            model="tiny",
            kind="completion",
            token_ids=pack_tokens(prompt),
            sampling=sampling,
        )
        request = EngineRequest(
            request_id=request_id,
            token_ids=wanted.token_ids,
            namespace_root=root,
            sampling=sampling,
        )
        try:
            self.core.add(request)
        except RequestError as error:
            self.seen[f"refused {error.status}"] += 1
            return
        self.clients[request_id] = Client(prompt, root, wanted)
        self.live.append(request_id)

    def tail(self, least: int) -> list[int]:
        length = max(least, self.rng.choice([0, 0, 1, 3, 9, 20]))
        return [self.rng.randrange(256) for _ in range(length)]

    def step(self) -> None:
        self.now += 1.0
        self.runner.poison(self.core)
        for output in self.core.step(self.now):
            client = self.clients[output.request_id]
            assert not client.outcome, "an output after the end"
            if output.finish_reason == "error":
                assert "fell over" in output.error
                self.end(output.request_id, "error")
                continue
            client.tokens += output.token_ids
            client.text += client.transcript.push(output.token_ids, output.finish_reason)
            if client.transcript.finish_reason:
                self.end(output.request_id, client.transcript.finish_reason)
                # The server leaves the stream at a stop string, which cancels the request.
                assert self.core.cancel(output.request_id) == (not output.finish_reason)
                if not output.finish_reason:
                    self.seen["stopped by a string"] += 1
        if self.rng.random() < 0.25:
            self.core.check()

    def fail(self) -> None:
        """A step in which one request fails, or all of them."""
        before = len(self.live)
        if self.live and self.rng.random() < 0.5:
            self.runner.bad = self.rng.choice(self.live)
        else:
            self.runner.broken = True
        self.step()
        self.seen["failed alone"] += bool(self.runner.bad and len(self.live) == before - 1)
        self.runner.bad, self.runner.broken = "", False

    def end(self, request_id: str, outcome: str) -> None:
        self.clients[request_id].outcome = outcome
        self.live.remove(request_id)
        if outcome != "error":
            self.ended.append(request_id)

    def wish_to_cancel(self) -> float:
        """More often while somebody is in a stage that is rare and short."""
        stages = {self.stage(request_id) for request_id in self.live}
        return 0.95 if STAGES[0] in stages else 0.6 if STAGES[1] in stages else 0.45

    def cancel_somebody(self) -> None:
        """Somebody in the rarest stage that anybody is in, most of the time."""
        stages: dict[str, list[str]] = {}
        for request_id in self.clients:
            stages.setdefault(self.stage(request_id), []).append(request_id)
        rarest_first = [stage for stage in STAGES if stage in stages]
        stage = self.rng.choice([rarest_first[0], *rarest_first])
        request_id = self.rng.choice(stages[stage])
        self.seen[f"cancelled {stage}"] += 1
        assert self.core.cancel(request_id) == (stage != "ended")
        if stage != "ended":
            self.end(request_id, "cancelled")
        self.core.check()

    def stage(self, request_id: str) -> str:
        sequence = self.core._sequences.get(request_id)
        if sequence is None:
            return "ended"
        if sequence.status is Status.WAITING:
            if sequence.hit_tokens is not None:
                return "preempted"
            return "held" if sequence.held_for else "queued"
        if not sequence.pending_tokens:
            return "decoding"
        return "in a prefill" if sequence.output_tokens == 0 else "in a recomputation"

    def flush(self) -> None:
        load = self.core.load()
        if load.running and load.cached_blocks:
            self.seen["flushed in use"] += 1
        self.core.flush()
        assert self.core.cached_blocks() == []
        self.core.check()

    def compare(self) -> None:
        """Every answer, whole or as far as it came, against the reference's."""
        for client in self.clients.values():
            sampling, tokens = client.wanted.sampling, client.tokens
            if tokens:
                assert differs_at(client.prompt, tokens, sampling) is None
            self.seen[f"compared {client.outcome}"] += 1
            self.seen["tokens compared"] += len(tokens)
            if client.outcome in ("stop", "length"):
                assert (client.text, client.outcome) == self.expected_end(client)

    def expected_end(self, client: Client) -> tuple[str, str]:
        """Text and finish reason, decided on the whole answer instead of token by token."""
        sampling = client.wanted.sampling
        for count in range(1, len(client.tokens) + 1):
            text = TOKENIZER.decode(client.tokens[:count])
            found = [text.index(stop) for stop in sampling.stop if stop in text]
            if found:
                assert count == len(client.tokens), "it went on after a stop string"
                return text[: min(found)], "stop"
        ends = [token in END_TOKENS and not sampling.ignore_eos for token in client.tokens]
        assert not any(ends[:-1]), "it went on after an end token"
        if ends[-1]:
            return text, "stop"
        whole = len(client.prompt) + len(client.tokens)
        limits = (sampling.max_tokens, self.config.sequence_limit)
        assert len(client.tokens) == limits[0] or whole == limits[1]
        return text, "length"


def played(seeds: Iterable[int], **fields) -> Counter[str]:
    """What the schedules of these seeds reached; every answer was compared."""
    torch.set_num_threads(1)
    seen: Counter[str] = Counter()
    for seed in seeds:
        schedule = Schedule(seed, **fields)
        try:
            schedule.play(36)
            schedule.compare()
        except Exception as error:
            error.add_note(f"in the schedule of seed {seed}: {schedule.config}")
            raise
        seen += schedule.seen
        stats = schedule.core.stats()
        seen.update({name: getattr(stats, name) for name in stats.__struct_fields__})
    return seen


@pytest.mark.parametrize("graphs", [False, True])
def test_so_do_those_of_the_triton_kernels(graphs):
    """Interpreted, with decodes launch by launch and replayed."""
    backend = pytest.importorskip("worker.attention.triton", reason="triton is not installed")
    if not backend.triton.knobs.runtime.interpret:
        pytest.skip("TRITON_INTERPRET is not 1: the kernels would be compiled for a GPU")
    seen = played(range(TRITON_SCHEDULES), attention="triton", graphs=graphs)
    assert seen["tokens compared"] > 100
    assert seen["evictions_for_space"]


def test_every_answer_of_every_schedule_equals_the_reference():
    seen = played(range(SCHEDULES))
    least = {
        "hits": 200,
        "partial_hits": 150,
        "misses": 500,
        "evictions_for_space": 800,
        "evictions_over_share": 100,
        "evictions_expired": 40,
        "preemptions": 40,
        "resumed_tokens": 500,
        "held_requests": 100,
        "duplicates": 40,
        "collisions": 80,
        "failed_steps": 20,
        "failed alone": 5,
        "flushed in use": 30,
        "stopped by a string": 100,
        "refused 400": 20,
        "refused 429": 100,
        "cancelled queued": 20,
        "cancelled held": 5,
        "cancelled in a prefill": 20,
        "cancelled in a recomputation": 1,
        "cancelled preempted": 4,
        "cancelled decoding": 30,
        "cancelled ended": 30,
        "compared stop": 200,
        "compared length": 500,
        "compared cancelled": 150,
        "tokens compared": 10_000,
    }
    assert {name: seen[name] for name, count in least.items() if seen[name] < count} == {}


@pytest.mark.parametrize("position", [0, 15, 16, 31])
def test_the_reference_sees_a_wrong_prefix(position):
    """Else equal answers would prove little."""
    torch.set_num_threads(1)
    rng = random.Random(3)
    prompt = [rng.randrange(256) for _ in range(40)]
    sampling = Sampling(max_tokens=20, temperature=0.0)
    answer: list[int] = []
    while len(answer) < 20:
        logits = all_logits(MODEL_CONFIG, TENSORS, prompt + answer)[-1]
        answer.append(int(logits.argmax()))
    assert len(set(answer)) > 5
    assert differs_at(prompt, answer, sampling) is None
    other = list(prompt)
    other[position] ^= 1
    assert differs_at(other, answer, sampling) is not None
    assert differs_at(prompt, [*answer[:7], answer[7] ^ 1, *answer[8:]], sampling) == 7
