"""A whole worker over HTTP: engine process, server, publisher."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import tempfile
from collections.abc import AsyncIterator

import aiohttp
import aiohttp.web
import msgspec
import pytest
from tokenizers import Tokenizer

from cluster.blocks import hash_blocks, pack_tokens, split_hashes
from cluster.protocol import (
    HEADER_HIT_TOKENS,
    HEADER_PROMPT_TOKENS,
    HEADER_WORKER,
    BlockList,
    GenerateRequest,
    ModelInfo,
    Sampling,
    pool_token,
)
from tests.worker.conftest import StartWorker
from worker.engine_client import EngineDead
from worker.server import WorkerServer


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


def request(request_id: str, tokens: list[int], **changes: object) -> GenerateRequest:
    sampling = Sampling(
        max_tokens=changes.pop("max_tokens", 8),  # type: ignore[arg-type]
        temperature=0.0,
        stop=changes.pop("stop", []),  # type: ignore[arg-type]
        ignore_eos=True,
    )
    fields = {"model": "tiny", "kind": "completion", **changes}
    return GenerateRequest(
        request_id=request_id,
        token_ids=pack_tokens(tokens),
        sampling=sampling,
        **fields,  # type: ignore[arg-type]
    )


async def post(
    http: aiohttp.ClientSession, worker: WorkerServer, wanted: GenerateRequest
) -> tuple[int, dict[str, str], bytes]:
    body = msgspec.msgpack.encode(wanted)
    async with http.post(worker.url + "/generate", data=body) as answer:
        return answer.status, dict(answer.headers), await answer.read()


def events(body: bytes) -> list[dict]:
    lines = [line for line in body.decode().split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


PROMPT = [(7 * i) % 250 for i in range(70)]


async def test_streamed_and_whole_answers_say_the_same(start_worker: StartWorker, http) -> None:
    worker = await start_worker()
    status, headers, body = await post(http, worker, request("a", PROMPT))
    whole = json.loads(body)
    assert status == 200
    assert headers[HEADER_WORKER] == "w0"
    assert headers[HEADER_PROMPT_TOKENS] == "70"
    assert headers[HEADER_HIT_TOKENS] == "0"
    assert whole["object"] == "text_completion"
    assert whole["choices"][0]["finish_reason"] == "length"
    assert whole["usage"] == {
        "prompt_tokens": 70,
        "completion_tokens": 8,
        "total_tokens": 78,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    wanted = request("b", PROMPT, stream=True, include_usage=True)
    _, headers, body = await post(http, worker, wanted)
    chunks = events(body)
    assert headers[HEADER_HIT_TOKENS] == "64"
    text = "".join(c["choices"][0]["text"] for c in chunks if c["choices"])
    assert text == whole["choices"][0]["text"]
    assert chunks[-1]["choices"] == []
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] == 64
    assert [c["choices"][0]["finish_reason"] for c in chunks if c["choices"]][-1] == "length"


async def test_a_chat_stream_begins_with_its_role_and_counts_as_it_goes(
    start_worker: StartWorker, http
) -> None:
    worker = await start_worker()
    wanted = request("a", PROMPT, kind="chat", stream=True, continuous_usage=True)
    _, _, body = await post(http, worker, wanted)
    first, *rest = events(body)
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all(chunk["id"] == "chatcmpl-a" for chunk in (first, *rest))
    counts = [chunk["usage"]["completion_tokens"] for chunk in rest]
    assert counts == sorted(counts)
    assert counts[-1] == 8


async def test_a_stop_string_ends_the_answer_and_the_work(start_worker: StartWorker, http) -> None:
    worker = await start_worker()
    _, _, body = await post(http, worker, request("a", PROMPT, max_tokens=40))
    text = json.loads(body)["choices"][0]["text"]
    stop = text[len(text) // 2 :][:2]
    _, _, body = await post(http, worker, request("b", PROMPT, max_tokens=1500, stop=[stop]))
    answer = json.loads(body)
    assert answer["choices"][0]["text"] == text[: text.index(stop)]
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] <= 40
    while (load := worker.service.publisher.load).batch:  # the engine hears of it a moment later
        await worker.service.engine.stats()
    assert load.free_blocks == 100


async def test_closing_the_connection_cancels_the_request(start_worker: StartWorker, http) -> None:
    worker = await start_worker(context_tokens=1500)
    wanted = request("a", PROMPT, max_tokens=1400, stream=True)
    body = msgspec.msgpack.encode(wanted)
    async with http.post(worker.url + "/generate", data=body) as answer:
        await answer.content.readany()
        assert worker.service.engine.running == 1
        answer.close()
    async with asyncio.timeout(10):
        while worker.service.engine.running or worker.service.publisher.load.batch:
            await worker.service.engine.stats()
    assert (await worker.service.engine.stats()).stats.generated_tokens < 1400


async def test_a_connection_that_is_lost_while_writing_ends_the_request_without_an_alarm(
    start_worker: StartWorker, http, monkeypatch: pytest.MonkeyPatch, caplog
) -> None:
    worker = await start_worker(context_tokens=1500)
    write = aiohttp.web.StreamResponse.write

    async def lost(response: aiohttp.web.StreamResponse, data: bytes) -> None:
        await write(response, data)
        raise aiohttp.ClientConnectionResetError("Cannot write to closing transport")

    monkeypatch.setattr(aiohttp.web.StreamResponse, "write", lost)
    await post(http, worker, request("a", PROMPT, max_tokens=1400, stream=True))
    async with asyncio.timeout(10):
        while worker.service.engine.running or worker.service.publisher.load.batch:
            await worker.service.engine.stats()
    assert not [record for record in caplog.records if record.levelname in ("ERROR", "WARNING")]


async def test_bad_requests_are_told_what_to_change_and_leave_nothing(
    start_worker: StartWorker, http
) -> None:
    worker = await start_worker(max_waiting=1, max_batch_size=1)
    cases = [
        (request("a", PROMPT, model="other"), 404, "serves 'tiny', not 'other'"),
        (request("b", [1] * 1700), 400, "1599 at most"),
        (request("c", []), 400, "empty"),
    ]
    for wanted, status, words in cases:
        got, _, body = await post(http, worker, wanted)
        assert got == status, body
        error = json.loads(body)["error"]
        assert words in error["message"]
        assert "Traceback" not in error["message"]
    async with http.post(worker.url + "/generate", data=b"nonsense") as answer:
        assert answer.status == 400
        assert "GenerateRequest" in (await answer.json())["error"]["message"]
    async with http.get(worker.url + "/nowhere") as answer:
        assert answer.status == 404
        assert "error" in await answer.json()
    assert worker.service.engine.running == 0


async def test_a_token_id_beyond_the_embedding_is_refused_and_nobody_else_notices(
    start_worker: StartWorker, http
) -> None:
    worker = await start_worker()
    rows = worker.service.info.model.embedding_rows
    beside = asyncio.create_task(post(http, worker, request("beside", PROMPT, max_tokens=60)))
    for number in range(4):
        status, _, body = await post(http, worker, request(f"beyond {number}", [1, rows, 2]))
        assert status == 400
        message = json.loads(body)["error"]["message"]
        assert message == f"the prompt has the token id {rows}; this model's ids end at {rows - 1}"
    status, _, body = await beside
    assert status == 200
    assert json.loads(body)["usage"]["completion_tokens"] == 60
    assert (await post(http, worker, request("last", [1, rows - 1])))[0] == 200


async def test_a_full_queue_answers_429(start_worker: StartWorker, http) -> None:
    worker = await start_worker(max_waiting=1, max_batch_size=1)
    long = [request(f"r{i}", PROMPT, max_tokens=600) for i in range(4)]
    answers = await asyncio.gather(*(post(http, worker, wanted) for wanted in long))
    statuses = sorted(status for status, _, _ in answers)
    assert statuses[0] == 200
    assert statuses[-1] == 429


async def test_blocks_and_hashes_are_those_of_the_protocol(start_worker: StartWorker, http) -> None:
    worker = await start_worker(secret="s")
    token = {"Authorization": f"Bearer {pool_token('s')}"}
    http.headers.update(token)
    await post(http, worker, request("a", PROMPT, max_tokens=1))
    async with http.get(worker.url + "/blocks") as answer:
        listing = msgspec.msgpack.decode(await answer.read(), type=BlockList)
    async with http.get(worker.url + "/model") as answer:
        info = msgspec.json.decode(await answer.read(), type=ModelInfo)
    root = info.namespace.root(b"s")
    assert set(split_hashes(listing.blocks)) == set(hash_blocks(root, pack_tokens(PROMPT), 16))
    assert Tokenizer.from_str(info.tokenizer_json).encode("abc").ids
    async with http.post(worker.url + "/admin/flush") as answer:
        assert (await answer.json())["epoch"] > listing.epoch
    async with http.get(worker.url + "/blocks") as answer:
        assert msgspec.msgpack.decode(await answer.read(), type=BlockList).blocks == b""


async def test_salts_and_adapters_do_not_share_blocks(start_worker: StartWorker, http) -> None:
    worker = await start_worker()
    hits = []
    for salt, adapter in [("", ""), ("", ""), ("x", ""), ("", "x"), ("x", ""), ("x", "x")]:
        wanted = request(f"r{len(hits)}", PROMPT, cache_salt=salt, adapter=adapter)
        _, headers, _ = await post(http, worker, wanted)
        hits.append(int(headers[HEADER_HIT_TOKENS]))
    assert hits == [0, 64, 0, 0, 64, 0]


async def test_without_the_pool_s_secret_nobody_comes_in(start_worker: StartWorker, http) -> None:
    worker = await start_worker(secret="s")
    status, _, body = await post(http, worker, request("a", PROMPT))
    assert status == 401
    assert b"STEMROUTE_SECRET" in body
    async with http.post(worker.url + "/admin/flush") as answer:
        assert answer.status == 401
    async with http.get(worker.url + "/health") as answer:
        assert answer.status == 200


async def test_a_dead_engine_is_said_in_words_and_fails_what_runs(
    start_worker: StartWorker, http
) -> None:
    worker = await start_worker(context_tokens=1500)
    wanted = request("a", PROMPT, max_tokens=1400, stream=True)
    async with http.post(worker.url + "/generate", data=msgspec.msgpack.encode(wanted)) as answer:
        await answer.content.readany()
        os.kill(worker.service.engine.pid, signal.SIGKILL)
        with pytest.raises(aiohttp.ClientPayloadError):
            await answer.content.read()
    async with http.get(worker.url + "/health") as answer:
        assert answer.status == 503
        assert "exit code -9" in (await answer.json())["reason"]
    status, _, body = await post(http, worker, request("b", PROMPT))
    assert status == 503
    assert b"exit code" in body
    assert worker.service.publisher.card.state == "failed"


async def test_a_worker_that_runs_has_no_folder_that_its_end_could_leave(
    start_worker: StartWorker, http, tmp_path_factory, monkeypatch
) -> None:
    folder = tmp_path_factory.mktemp("t")  # a socket's path has to be short
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    worker = await start_worker()
    assert list(folder.iterdir()) == []
    assert (await post(http, worker, request("a", PROMPT)))[0] == 200


async def test_a_model_that_is_not_there_ends_the_start_with_the_reason(
    start_worker: StartWorker,
) -> None:
    with pytest.raises(EngineDead, match="no model"):
        await start_worker(model="/no/such/model")


async def test_draining_lets_answers_end_and_takes_no_more(start_worker: StartWorker, http) -> None:
    worker = await start_worker(context_tokens=1500, drain_timeout_s=60)
    wanted = request("a", PROMPT, max_tokens=300, stream=True, include_usage=True)
    async with http.post(worker.url + "/generate", data=msgspec.msgpack.encode(wanted)) as answer:
        first = await answer.content.readany()
        stopping = asyncio.create_task(worker.stop())
        async with asyncio.timeout(10):
            while not worker.service.problem():
                await worker.service.engine.stats()
        status, _, body = await post(http, worker, request("b", PROMPT))
        assert (status, b"draining" in body) == (503, True)
        rest = await answer.content.read()
    assert events(first + rest)[-1]["usage"]["completion_tokens"] == 300
    await stopping
    assert worker.service.engine.problem()
