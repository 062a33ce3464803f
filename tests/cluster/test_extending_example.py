"""docs/extending.md tells the truth: its hashes, its messages, its policy, and how to publish.

The worker here is written from the page alone: messages are plain dictionaries, and Redis is
reached with the two scripts and nothing else of `cluster.bus`.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
import struct
from pathlib import Path

import msgspec
import numpy as np
import pytest
import redis.asyncio as aioredis

from cluster.blocks import Namespace, hash_blocks, pack_tokens
from cluster.bus_scripts import LEAVE, PUBLISH
from cluster.protocol import (
    BlockList,
    ColdReport,
    GenerateRequest,
    Load,
    ModelInfo,
    Report,
    Sampling,
    WorkerCard,
    pool_token,
)
from router.policies import Decision
from tests.cluster.bus_bench import NAMESPACE, SECRET, Bench
from tests.router.candidates import candidates

PAGE = (Path(__file__).parents[2] / "docs" / "extending.md").read_text(encoding="utf-8")

EXAMPLE = Namespace(
    weights="w", tokenizer="t", kv_dtype="bfloat16", block_size=4, positions="rope:10000.0"
)
MESSAGES = (
    *(WorkerCard, Namespace, Report, Load, ColdReport, GenerateRequest, Sampling),
    *(ModelInfo, BlockList),
)


def documented_hex(value: str) -> bytes:
    """The hex in the row of the worked example that begins with `value`."""
    row = next(line for line in PAGE.splitlines() if line.startswith(f"| {value} |"))
    return bytes.fromhex("".join(re.findall(r"`([0-9a-f]+)`", row.split("|")[2])))


def feed(tag: str, value: str) -> bytes:
    """As the page defines it."""
    parts = (part.encode() for part in (tag, value))
    return b"".join(struct.pack("<Q", len(part)) + part for part in parts)


def test_the_worked_example_is_what_the_code_computes() -> None:
    chain = hash_blocks(EXAMPLE.root(), pack_tokens(range(1, 11)), EXAMPLE.block_size)
    assert documented_hex("root") == EXAMPLE.root()
    assert documented_hex("`namespace_check`").hex() == EXAMPLE.check()
    assert [documented_hex("`h[0]`"), documented_hex("`h[1]`")] == chain
    assert documented_hex('root with `tenant="acme"`') == EXAMPLE.for_request(tenant="acme").root()
    assert documented_hex("pool token of the secret `s3cret`").hex() == pool_token("s3cret")


def test_the_worked_example_follows_from_the_formulas_of_the_page() -> None:
    fields = [
        ("domain", "stemroute/block-chain/2"),
        *((name, str(getattr(EXAMPLE, name))) for name in EXAMPLE.__struct_fields__),
        ("secret", ""),
    ]
    joined = b"".join(feed(tag, value) for tag, value in fields)
    assert documented_hex('`feed("weights", "w")`') == feed("weights", "w")
    assert f"| all fields together | {len(joined)} bytes |" in PAGE
    root = hashlib.sha256(joined).digest()
    assert documented_hex("root") == root
    check = hashlib.sha256(b"stemroute/namespace-check/1" + root).hexdigest()
    assert documented_hex("`namespace_check`").hex() == check[:16]
    parent = root
    for depth, tokens in enumerate(((1, 2, 3, 4), (5, 6, 7, 8))):
        packed = struct.pack("<4I", *tokens)
        assert documented_hex(f"tokens of block {depth}") == packed
        parent = hashlib.sha256(parent + packed).digest()[:14] + struct.pack("<H", depth)
        assert documented_hex(f"`h[{depth}]`") == parent


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message.__name__)
def test_a_table_lists_exactly_the_fields_of_its_message(message: type[msgspec.Struct]) -> None:
    table = PAGE.split(f"\n**{message.__name__}**\n\n")[1].split("\n\n")[0]
    rows = [[cell.strip(" `") for cell in row.split("|")[1:4]] for row in table.splitlines()[2:]]
    expected = []
    for field in msgspec.structs.fields(message):
        default = "" if field.required else repr(field.default).replace("'", '"')
        if field.default_factory is not msgspec.NODEFAULT:
            default = repr(field.default_factory())
        default = {'b""': 'b""', "UNSET": "absent"}.get(default, default)
        expected.append((field.name, default))
    assert [(name, default) for name, _, default in rows] == expected


def test_the_policy_of_the_page_works() -> None:
    source = PAGE.split("## A routing policy")[1].split("```python\n")[1].split("```")[0]
    names: dict = {"__name__": "extending_example"}
    exec(compile(source, "docs/extending.md", "exec"), names)
    parameters = names["QueueParameters"](tokens_per_request=10)
    decision = names["shortest_queue"](
        candidates(prompt=100, hit=[0, 80], waiting=[1, 3]),
        parameters,
        None,
        random.Random(1),
    )
    assert isinstance(decision, Decision)
    assert np.asarray(decision.costs).tolist() == [11.0, 5.0]
    assert decision.chosen == 1


class ForeignWorker:
    """A worker by the page: it knows key names, the scripts and the messages' fields."""

    def __init__(self, redis: aioredis.Redis, pool: str, worker: str) -> None:
        self.redis, self.worker, self.epoch, self.sequence = redis, worker, 7, 0
        prefix = f"stem:{{{pool}}}:"
        self.card_key = f"{prefix}worker:{worker}"
        self.blocks_key = f"{prefix}blocks:{worker}:{self.epoch:020d}"
        self.events_key, self.workers_key = f"{prefix}events", f"{prefix}workers"

    def card(self) -> bytes:
        namespace = {
            name: getattr(NAMESPACE, name)
            for name in ("weights", "tokenizer", "kv_dtype", "block_size", "positions")
        }
        card = {"worker": self.worker, "epoch": self.epoch, "address": "http://127.0.0.1:1"}
        card |= {"model": "m", "namespace": namespace, "namespace_check": NAMESPACE.check(SECRET)}
        card |= {"capacity_blocks": 100, "context_tokens": 1000, "max_batch_size": 8}
        return json.dumps(card | {"token_budget": 64, "device": "x", "state": "ready"}).encode()

    def report(self, cached: int, **fields: object) -> bytes:
        report = {"worker": self.worker, "epoch": self.epoch, "sequence": self.sequence + 1}
        return msgspec.msgpack.encode(report | {"load": {"cached_blocks": cached}} | fields)

    async def publish(self, mode: str, stored: bytes, evicted: bytes, cached: int) -> bytes:
        whole = mode == "whole"
        changes = {"stored": stored, "evicted": evicted, "resync": whole, "received": ["r1"]}
        answer: bytes = await self.redis.eval(
            *(PUBLISH, 5, self.card_key, self.blocks_key, self.events_key, self.workers_key),
            *(self.blocks_key + ":new", mode, self.worker, f"{self.epoch:020d}"),
            *(str(self.sequence), str(self.sequence + 1), self.card() if whole else b""),
            *(stored, evicted, str(cached), "3000", "60000", "20000"),
            self.report(cached, **changes),
        )
        self.sequence += answer == b"ok"
        return answer

    async def leave(self) -> bytes:
        answer: bytes = await self.redis.eval(
            *(LEAVE, 6, self.card_key, self.blocks_key, self.events_key, self.workers_key),
            *(self.blocks_key + ":cpu", self.blocks_key + ":disk"),
            *(self.worker, f"{self.epoch:020d}", "20000", self.report(0, state="gone")),
        )
        return answer


async def test_a_worker_written_by_the_page_is_followed(redis_url: str, pool: str) -> None:
    bench, redis = Bench(redis_url, pool), aioredis.Redis.from_url(redis_url)
    worker = ForeignWorker(redis, pool, "foreign")
    first, second, third = hash_blocks(NAMESPACE.root(SECRET), pack_tokens(range(48)), 16)
    follower, picture = bench.follower()
    try:
        await redis.sadd(worker.blocks_key + ":new", first)
        assert await worker.publish("whole", b"", b"", 1) == b"ok"
        await picture.until(lambda: picture.sets.get("foreign") == {first})
        assert await worker.publish("delta", second + third, b"", 3) == b"ok"
        assert await worker.publish("delta", b"", third, 2) == b"ok"
        await picture.until(lambda: picture.sets["foreign"] == {first, second})
        assert picture.received[-1] == "r1"
        assert await worker.publish("delta", b"", b"", 5) == b"lost"  # it counts wrongly
        assert await worker.leave() == b"ok"
        await picture.until(lambda: "foreign" in picture.gone)
        assert not follower.following.refused
    finally:
        await bench.stop(follower)
        await redis.aclose()
