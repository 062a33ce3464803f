"""A whole worker (server, engine, bus) on a tiny model: warm-up, statistics, new weights."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator

import aiohttp
import msgspec
import pytest
import torch
from tokenizers import Tokenizer

from cluster.blocks import pack_tokens
from cluster.pool_record import PoolRecord
from cluster.protocol import HEADER_HIT_TOKENS, CacheView, GenerateRequest, Sampling, pool_token
from cluster.settings import Settings, WorkerSettings
from tests.exposed_metrics import check_defined, definitions_of
from tests.tiny_model import byte_tokenizer, write_tiny_llama
from tests.worker.plain_llama import all_logits
from worker.metrics import LABELS, SECTIONS
from worker.server import WorkerServer
from worker.warmup import WarmupError, read_prompts
from worker.weights import load_model

TOKENIZER: Tokenizer = byte_tokenizer()
STEM = "You are a helpful assistant who answers in one short sentence. "
WARM = "a prompt that everybody uses, of more than two blocks of tokens"
SECRET = "of the test"


def request_of(request_id: str, text: str, max_tokens: int, **fields) -> GenerateRequest:
    return GenerateRequest(
        request_id=request_id,
        model="tiny",
        kind="completion",
        token_ids=pack_tokens(TOKENIZER.encode(text).ids),
        sampling=Sampling(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
        **fields,
    )


def text_of_events(stream: bytes) -> str:
    events = [line[6:] for line in stream.decode().splitlines() if line.startswith("data: {")]
    return "".join(json.loads(event)["choices"][0]["text"] for event in events)


class Worker:
    """One worker and a client of it."""

    def __init__(self, server: WorkerServer, session: aiohttp.ClientSession) -> None:
        self.server = server
        self.session = session
        self.served = 0

    async def ask(self, text: str, max_tokens: int = 8, **fields):
        """Answer of one greedy request: status, hit in tokens, JSON body."""
        self.served += 1
        body = msgspec.msgpack.encode(request_of(f"r{self.served}", text, max_tokens, **fields))
        async with self.session.post(f"{self.server.url}/generate", data=body) as answer:
            hit = int(answer.headers.get(HEADER_HIT_TOKENS, -1))
            return answer.status, hit, await answer.json()

    async def begin(self, text: str, max_tokens: int) -> aiohttp.ClientResponse:
        """Stream a request; returns when its first token is there."""
        self.served += 1
        body = msgspec.msgpack.encode(request_of(f"r{self.served}", text, max_tokens, stream=True))
        answer = await self.session.post(f"{self.server.url}/generate", data=body)
        assert answer.status == 200
        return answer

    async def text_of(self, text: str, max_tokens: int = 8, **fields) -> tuple[int, str]:
        status, hit, body = await self.ask(text, max_tokens, **fields)
        assert status == 200, body
        return hit, body["choices"][0]["text"]

    async def change(self, model: str, **fields) -> tuple[int, dict]:
        url = f"{self.server.url}/admin/weights"
        async with self.session.post(url, json={"model": model} | fields) as answer:
            return answer.status, await answer.json()

    async def stats(self) -> CacheView:
        async with self.session.get(f"{self.server.url}/stats") as answer:
            assert answer.status == 200
            return msgspec.json.decode(await answer.read(), type=CacheView)

    async def metrics(self) -> str:
        async with self.session.get(f"{self.server.url}/metrics") as answer:
            return await answer.text()


@contextlib.asynccontextmanager
async def a_worker(redis_url: str, pool: str, model: str, **fields) -> AsyncIterator[Worker]:
    settings = Settings(
        pool=pool,
        redis_url=redis_url,
        secret=SECRET,
        worker=WorkerSettings(
            model=model,
            served_name="tiny",
            device="cpu",
            dtype="float32",
            drain_timeout_s=fields.pop("drain_timeout_s", 30.0),
            **fields,
        ),
    )
    server = WorkerServer(settings, "worker")
    await server.start()
    headers = {"Authorization": f"Bearer {pool_token(SECRET)}"}
    try:
        async with aiohttp.ClientSession(headers=headers) as session:
            yield Worker(server, session)
    finally:
        await server.stop()


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Two models of one architecture, and one of another."""
    folder = tmp_path_factory.mktemp("models")
    paths = [str(write_tiny_llama(folder / f"seed{seed}", seed)) for seed in (1, 2)]
    other = write_tiny_llama(folder / "other", 3)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"rope_theta": 5e5}))
    return [*paths, str(other)]


def answer_of(model: str, prompt: str, max_tokens: int = 8) -> str:
    """The greedy answer of a plain reference with that model's weights."""
    loaded = load_model(model, torch.float32, "")
    tokens = TOKENIZER.encode(prompt).ids
    start = len(tokens)
    while len(tokens) < start + max_tokens:
        logits = all_logits(loaded.config, loaded.tensors, tokens)[-1]
        tokens.append(int(logits.argmax()))
    return TOKENIZER.decode(tokens[start:])


async def test_warm_up_and_what_the_cache_tells(redis_url, pool, models, tmp_path):
    (tmp_path / "prompts.txt").write_text(f"{WARM}\n---\n{STEM}\n---\n")
    async with a_worker(
        redis_url,
        pool,
        models[0],
        kv_blocks=40,
        warmup_file=str(tmp_path / "prompts.txt"),
        pin_share=0.25,
        cache_share=0.5,
        eviction="workload_aware",
    ) as worker:
        before = await worker.stats()
        assert before.misses == 2
        warmed = (len(WARM) // 16) + (len(STEM.rstrip()) // 16)
        assert before.pinned_blocks == before.cached_blocks == warmed
        assert (await worker.text_of(WARM + " and more"))[0] == len(WARM) // 16 * 16
        for number in range(12):
            await worker.text_of(f"{number}" * 150)
        assert (await worker.text_of(WARM + " and more"))[0] >= len(WARM) // 16 * 16
        view = await worker.stats()
        assert (view.hits, view.partial_hits) != (0, 0)
        assert view.reused_tokens >= 2 * (len(WARM) // 16 * 16)
        assert view.evictions_for_space + view.evictions_over_share > 50
        assert view.evictions_over_share > 0
        assert view.mean_eviction_age_s is not None
        assert view.pool_use == view.pinned_blocks / view.capacity_blocks
        assert view.kv_bytes_a_token == 2 * 2 * 2 * 8 * 4  # k and v, layers, heads, width, fp32
        assert view.eviction == "workload_aware"
        metrics = await worker.metrics()
        labels = '{model="tiny",worker="worker"}'
        assert f"stemroute_worker_pinned_blocks{labels} {view.pinned_blocks}.0" in metrics
        evicted = view.evictions_for_space + view.evictions_over_share
        assert f"stemroute_worker_eviction_age_seconds_count{labels} {evicted}.0" in metrics
        assert f"stemroute_worker_kv_bytes_per_token{labels} 256.0" in metrics
        untiered = [section for section in SECTIONS if not section.title.startswith("Cold tiers")]
        check_defined(metrics, definitions_of(untiered), LABELS)


async def test_new_weights_without_a_restart(redis_url, pool, models):
    first, second, other = models
    prompt = STEM + "What is a prefix?"
    async with a_worker(redis_url, pool, first, kv_blocks=200) as worker:
        service = worker.server.service
        epoch, namespace = service.epoch, service.info.model.namespace
        hit, old = await worker.text_of(prompt)
        assert (hit, old) == (0, answer_of(first, prompt))
        assert (await worker.text_of(prompt))[0] > 0
        held = set(await service.engine.blocks())

        states: list[str] = []
        set_state = service.publisher.set_state
        service.publisher.set_state = lambda state: states.append(state) or set_state(state)
        for path, says in ((other, "rope"), ("/nowhere/at/all", "/nowhere/at/all")):
            status, body = await worker.change(path)
            assert status == 400
            assert says in body["error"]["message"]
        assert (service.epoch, service.problem()) == (epoch, "")
        assert states == [], "it drained for weights that cannot be used"
        assert (await worker.text_of(prompt))[1] == old

        running = await worker.begin(STEM + "Go on.", max_tokens=60)
        status, body = await worker.change(second)
        assert status == 200, body
        # It ended, with the weights that it began with.
        assert text_of_events(await running.read()) == answer_of(first, STEM + "Go on.", 60)
        assert body["epoch"] == service.epoch > epoch
        now = service.info.model.namespace
        assert now.weights == body["weights"] != namespace.weights
        assert service.publisher.card.namespace == now
        assert service.publisher.card.state == "ready"
        assert service.problem() == ""

        assert await service.engine.blocks() == []
        hit, new = await worker.text_of(prompt)
        assert (hit, new) == (0, answer_of(second, prompt))
        assert new != old
        assert not held & set(await service.engine.blocks())
        assert (await worker.text_of(prompt)) == ((len(prompt) - 1) // 16 * 16, new)


async def test_what_does_not_end_in_time_fails_clearly(redis_url, pool, models):
    async with a_worker(redis_url, pool, models[0], kv_blocks=200, drain_timeout_s=0.05) as worker:
        service = worker.server.service
        begun, idle = asyncio.Event(), service._until_idle

        async def until_idle():
            begun.set()
            await idle()

        service._until_idle = until_idle
        long = asyncio.create_task(worker.ask(STEM + "!", max_tokens=1900))
        cut = await worker.begin(STEM, max_tokens=1900)
        changing = asyncio.create_task(worker.change(models[1]))
        await begun.wait()
        assert service.failure() == "", "its health check would have it killed"
        turned_away, _, body = await worker.ask("now?")
        assert turned_away == 503
        assert "loading new weights" in body["error"]["message"]
        again, _ = await worker.change(models[1])
        assert again == 409
        status, _, body = await long
        assert status == 500
        assert "weights were replaced" in body["error"]["message"]
        with pytest.raises(aiohttp.ClientPayloadError):
            await cut.read()
        assert (await changing)[0] == 200
        assert (await worker.text_of(STEM))[0] == 0


async def test_a_replacement_loads_the_weights_that_the_pool_has_now(redis_url, pool, models):
    async with a_worker(redis_url, pool, models[0], kv_blocks=200) as worker:
        assert (await worker.change(models[1], pool=True))[0] == 200
        new = worker.server.service.info.model
    async with a_worker(redis_url, pool, models[0], kv_blocks=200) as worker:
        assert worker.server.service.info.model == new
        assert (await worker.text_of(STEM))[1] == answer_of(models[1], STEM)
        assert (await worker.change(models[0], pool=True))[0] == 200
    async with a_worker(redis_url, pool, models[0], kv_blocks=200) as worker:
        assert (await worker.text_of(STEM))[1] == answer_of(models[0], STEM)


async def test_a_start_waits_for_redis_to_name_the_weights(redis_url, pool, models, monkeypatch):
    """With the weights of its settings the worker might differ from all others."""
    monkeypatch.setattr("worker.service.RECORD_RETRY_S", 0)
    failures = [OSError("no route to Redis")] * 10
    weights = PoolRecord.weights

    async def weights_at_last(record, configured):
        if failures:
            raise failures.pop()
        return await weights(record, configured)

    async with a_worker(redis_url, pool, models[0], kv_blocks=200) as worker:
        assert (await worker.change(models[1], pool=True))[0] == 200
    monkeypatch.setattr(PoolRecord, "weights", weights_at_last)
    async with a_worker(redis_url, pool, models[0], kv_blocks=200) as worker:
        assert (await worker.text_of(STEM))[1] == answer_of(models[1], STEM)


async def test_weights_of_one_worker_end_with_it(redis_url, pool, models):
    async with a_worker(redis_url, pool, models[0], kv_blocks=200) as worker:
        assert (await worker.change(models[1]))[0] == 200
        assert (await worker.text_of(STEM))[1] == answer_of(models[1], STEM)
    async with a_worker(redis_url, pool, models[0], kv_blocks=200) as worker:
        assert (await worker.text_of(STEM))[1] == answer_of(models[0], STEM)


async def test_the_last_weights_are_recorded_last(redis_url, pool, models, monkeypatch):
    """Redis cannot be reached at the first change, but at the second."""
    monkeypatch.setattr("worker.service.RECORD_RETRY_S", 0)
    async with a_worker(redis_url, pool, models[0], kv_blocks=200) as worker:
        recorded, away = [], True

        async def give_weights(_configured, given):
            if away and given.model == models[1]:
                raise OSError("no route to Redis")
            recorded.append(given.model)

        monkeypatch.setattr(worker.server.service._record, "give_weights", give_weights)
        assert (await worker.change(models[1], pool=True))[0] == 200
        assert recorded == []
        assert (await worker.change(models[0], pool=True))[0] == 200
        away = False
        await worker.text_of(STEM)
        assert recorded == [models[0]]


async def test_a_clock_that_was_set_back_does_not_silence_a_worker(
    redis_url, pool, models, monkeypatch
):
    """A worker is killed, and the next one of its name starts an hour earlier."""
    async with a_worker(redis_url, pool, models[0], kv_blocks=20) as worker:
        service = worker.server.service
        await service.publisher.flushed()
        before = service.epoch
        service.publisher.leave = no_leave
    real = time.time_ns
    monkeypatch.setattr("worker.service.time.time_ns", lambda: real() - 3600 * 10**9)
    async with a_worker(redis_url, pool, models[0], kv_blocks=20) as worker:
        service = worker.server.service
        await service.publisher.flushed()
        assert service.publisher.status.connected
        assert service.epoch > before
        assert await service.flush() > before + 1
        assert (await worker.text_of(STEM))[0] == 0


async def no_leave() -> None:
    """A killed worker does not sign off."""


def test_the_prompts_of_a_file(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("one\nand more\n---\n\n---\n  two, with spaces  \n")
    assert read_prompts(str(file)) == ["one\nand more", "  two, with spaces  "]
    file.write_text("---\n\n")
    with pytest.raises(WarmupError, match="holds no prompt"):
        read_prompts(str(file))
    with pytest.raises(WarmupError, match="cannot read"):
        read_prompts(str(tmp_path / "none"))


async def test_a_warm_up_that_cannot_be_is_told_at_the_start(redis_url, pool, models, tmp_path):
    (tmp_path / "prompts.txt").write_text("x" * 700)
    with pytest.raises(WarmupError, match=r"prompt 1 .* has 700 tokens; this worker takes 639"):
        async with a_worker(
            redis_url, pool, models[0], kv_blocks=40, warmup_file=str(tmp_path / "prompts.txt")
        ):
            pass
