"""A stand-in for a model: it computes no attention, but remembers what every KV slot holds.

The value written for a position is a function of the whole prefix, as real KV is, and is made
from the value *read* at the position before. Every step it reads the complete history through the
block table and asserts that each slot holds the right value, so a wrong table, a block used before
it was written, or one written while another reads it, cannot go unseen.
"""

from __future__ import annotations

from dataclasses import replace

from cluster.blocks import pack_tokens
from cluster.protocol import Sampling
from worker.batch import NOT_FINITE, BatchItem
from worker.engine import EngineCore
from worker.engine_config import EngineConfig
from worker.eviction.registry import parse_eviction
from worker.messages import EngineRequest, Output
from worker.tiers.cold_tiers import ColdTiers

ROOT = b"r" * 32
VOCABULARY = 7


def kv_value(before: int, token: int) -> int:
    return (before * 1_000_003 + token + 1) % ((1 << 61) - 1)


def sample(value: int, seed: int, index: int) -> int:
    return (value ^ (seed * 7919 + index * 104_729)) % 1_000_003 % VOCABULARY


def root_value(root: bytes) -> int:
    return int.from_bytes(root[:7], "little")


def reference(request: EngineRequest, prompt: list[int], config: EngineConfig):
    """Output tokens and finish reason of the request when it is alone, without any cache."""
    value = root_value(request.namespace_root)
    for token in prompt:
        value = kv_value(value, token)
    outputs: list[int] = []
    sampling = request.sampling
    while True:
        token = sample(value, sampling.seed or 0, len(outputs))
        outputs.append(token)
        value = kv_value(value, token)
        if token in config.eos_token_ids and not sampling.ignore_eos:
            return outputs, "stop"
        at_limit = len(prompt) + len(outputs) >= config.sequence_limit
        if len(outputs) >= sampling.max_tokens or at_limit:
            return outputs, "length"


class RecordingRunner:
    """`core` is set once it exists. `batches` records what was computed.

    broken      raised for every batch
    bad         request id -> what is raised for every batch with that request
    room        MemoryError is raised for batches of more tokens
    not_finite  ids of requests whose logits are NaN
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.core: EngineCore | None = None
        self.truth: dict[str, tuple[bytes, list[int]]] = {}
        self.prompts: dict[str, int] = {}
        self.kv: dict[tuple[int, int], int] = {}
        self.batches: list[list[BatchItem]] = []
        self.broken: Exception | None = None
        self.bad: dict[str, Exception] = {}
        self.room = 1 << 30
        self.not_finite: set[str] = set()

    def expect(self, request: EngineRequest, prompt: list[int]) -> None:
        self.truth[request.request_id] = (request.namespace_root, list(prompt))
        self.prompts[request.request_id] = len(prompt)

    def slot(self, item: BatchItem, position: int) -> tuple[int, int]:
        return item.block_table[position // self.block_size], position % self.block_size

    def execute(self, batch: list[BatchItem]) -> list[int | None]:
        assert self.core is not None
        config = self.core.config
        assert 0 < len(batch) <= config.max_batch_size
        assert len({item.request_id for item in batch}) == len(batch)
        assert sum(len(item.token_ids) for item in batch) <= config.token_budget
        cache = self.core._cache
        writer: dict[tuple[int, int], str] = {}
        users: dict[int, set[str]] = {}
        for block in self.core._scheduler.pins.blocks:
            users.setdefault(block, set()).add("a pin")
        for sequence in self.core._scheduler.running.values():
            for block in sequence.block_table:
                users.setdefault(block, set()).add(sequence.request_id)
        if batch[0].request_id == "":
            return self.probe(batch[0])
        for item in batch:
            _, tokens = self.truth[item.request_id]
            end = item.start + len(item.token_ids)
            assert item.token_ids, "nothing to compute"
            assert item.token_ids == tokens[item.start : end]
            assert item.sample == (end == len(tokens))
            assert item.output_index == len(tokens) - self.prompts[item.request_id]
            assert len(item.block_table) * self.block_size >= end
            assert 0 not in item.block_table
            for position in range(item.start, end):
                block, _ = slot = self.slot(item, position)
                assert slot not in writer, "two sequences write one slot"
                writer[slot] = item.request_id
                assert not cache.holds(block), "a cached block is written"
                assert users[block] == {item.request_id}, "a shared block is written"
        sampled: list[int | None] = []
        written: dict[tuple[int, int], int] = {}
        for item in batch:
            root, tokens = self.truth[item.request_id]
            value = root_value(root)
            for position in range(item.start):
                slot = self.slot(item, position)
                value = kv_value(value, tokens[position])
                assert slot not in writer, "a slot is read and written in one step"
                assert self.kv.get(slot) == value, f"{item.request_id}: wrong KV at {position}"
            for offset, token in enumerate(item.token_ids):
                value = kv_value(value, token)
                written[self.slot(item, item.start + offset)] = value
            if item.sample and item.request_id in self.not_finite:
                sampled.append(NOT_FINITE)
            elif item.sample:
                sampled.append(sample(value, item.sampling.seed or 0, item.output_index))
            else:
                sampled.append(None)
        if error := self.failure(batch):
            self.kv.update(dict.fromkeys(written, -1))
            raise error
        self.batches.append([replace(item, block_table=list(item.block_table)) for item in batch])
        self.kv.update(written)
        for item, token in zip(batch, sampled, strict=True):
            if token is not None and token != NOT_FINITE:
                self.truth[item.request_id][1].append(token)
        return sampled

    def failure(self, batch: list[BatchItem]) -> Exception | None:
        """What this batch raises."""
        if sum(len(item.token_ids) for item in batch) > self.room:
            return MemoryError("no room")
        bad = [self.bad[item.request_id] for item in batch if item.request_id in self.bad]
        return self.broken or next(iter(bad), None)

    def probe(self, item: BatchItem) -> list[int | None]:
        """A token of nobody's, to see whether anything can be computed."""
        (block,) = item.block_table
        assert self.core is not None
        assert not self.core._cache.holds(block)
        tables = [s.block_table for s in self.core._scheduler.running.values()]
        assert block not in {block for table in tables for block in table}
        if self.broken is not None:
            raise self.broken
        return [0]


class Rig:
    """An engine core over a RecordingRunner, with what came out of it."""

    def __init__(self, **overrides) -> None:
        hash_block = overrides.pop("hash_block", None)
        eviction = overrides.pop("eviction", None)
        defaults = {
            "block_size": 4,
            "capacity_blocks": 32,
            "context_tokens": 200,
            "max_batch_size": 8,
            "token_budget": 64,
        }
        self.config = EngineConfig(**(defaults | overrides))
        self.runner = RecordingRunner(self.config.block_size)
        extra = {} if hash_block is None else {"hash_block": hash_block}
        if eviction is not None:
            extra["make_policy"] = parse_eviction(eviction)
        self.core = EngineCore(self.config, self.runner, tiers=self.make_tiers(), **extra)
        self.runner.core = self.core
        self.requests: dict[str, tuple[EngineRequest, list[int]]] = {}
        self.tokens: dict[str, list[int]] = {}
        self.final: dict[str, Output] = {}
        self.published: set[bytes] = set()
        self.received: list[str] = []
        self.strict = True
        self.now = 0.0
        """Seconds; every step takes one."""

    def make_tiers(self) -> ColdTiers | None:
        """Cold tiers of the cache: none here."""
        return None

    def settle(self) -> None:
        """Let end what runs beside the engine: nothing here."""

    def add(self, request_id: str, prompt: list[int], max_tokens: int = 3, **fields) -> None:
        sampling = Sampling(
            max_tokens=max_tokens,
            seed=fields.pop("seed", 0),
            ignore_eos=fields.pop("ignore_eos", False),
        )
        request = EngineRequest(
            request_id=request_id,
            token_ids=pack_tokens(prompt),
            namespace_root=fields.pop("root", ROOT),
            sampling=sampling,
            **fields,
        )
        self.core.add(request)
        self.requests[request_id] = (request, list(prompt))
        self.tokens[request_id] = []
        self.runner.expect(request, prompt)

    def cancel(self, request_id: str) -> bool:
        if not self.core.cancel(request_id):
            return False
        del self.requests[request_id]
        return True

    def step(self) -> list[Output]:
        self.now += 1.0
        outputs = self.core.step(self.now)
        # The core turns a failing runner into error outputs; what the runner asserts must not
        # end there.
        if self.strict and isinstance(self.core.last_failure, AssertionError):
            raise self.core.last_failure
        for output in outputs:
            assert output.request_id not in self.final, "an output after the final one"
            assert output.request_id in self.requests, "an output of a cancelled request"
            self.tokens[output.request_id] += output.token_ids
            if output.finish_reason:
                self.final[output.request_id] = output
        return outputs

    def fail(self) -> list[Output]:
        """A step in which nothing can be computed."""
        self.runner.broken = RuntimeError("the accelerator fell over")
        outputs = self.step()
        self.runner.broken = None
        return outputs

    def publish(self) -> set[bytes]:
        changes = self.core.take_changes()
        self.received += changes.received
        stored, evicted = set(changes.stored), set(changes.evicted)
        assert len(stored) == len(changes.stored)
        assert len(evicted) == len(changes.evicted)
        assert not stored & evicted
        assert not stored & self.published
        assert evicted <= self.published
        self.published = (self.published | stored) - evicted
        assert self.published == set(self.core.cached_blocks())
        return self.published

    def drain(self, steps: int = 3000) -> None:
        """Step until nothing is left; check everything that must then hold."""
        for _ in range(steps):
            if not self.core.has_work():
                break
            self.step()
            self.core.check()
            self.publish()
        assert not self.core.has_work(), "the engine does not come to an end"
        self.settle()
        assert self.core.step() == []
        load = self.core.load()
        assert (load.running, load.waiting, load.pending_prefill_tokens) == (0, 0, 0)
        pinned = self.core.stats().pinned_blocks
        assert load.free_blocks == self.config.capacity_blocks - pinned, "blocks leaked"
        self.verify()

    def verify(self) -> None:
        """Every request not cancelled has exactly its reference's outputs."""
        for request_id, (request, prompt) in self.requests.items():
            output = self.final[request_id]
            if output.finish_reason == "error":
                continue
            expected = reference(request, prompt, self.config)
            assert (self.tokens[request_id], output.finish_reason) == expected

    def hit_tokens(self, request_id: str) -> int:
        return self.final[request_id].hit_tokens
