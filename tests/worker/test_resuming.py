"""A response that one worker began and another ends is that of an undisturbed worker."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import aiohttp
import msgspec
import pytest

from cluster.blocks import pack_tokens, unpack_tokens
from cluster.frames import FrameReader
from cluster.protocol import HEADER_HIT_TOKENS, HEADER_PROGRESS, GenerateRequest, Sampling
from tests.worker.conftest import StartWorker
from worker.messages import Output
from worker.server import WorkerServer

PROMPT = [(7 * i) % 250 for i in range(70)]
CREATED = 1_700_000_000
SAMPLINGS = {
    "greedy": Sampling(max_tokens=24, temperature=0.0, ignore_eos=True),
    "seeded": Sampling(max_tokens=24, temperature=1.5, top_p=0.95, seed=11, ignore_eos=True),
}


def wanted(sampling: Sampling, **fields: object) -> GenerateRequest:
    return GenerateRequest(
        **{  # type: ignore[arg-type]
            "request_id": "a",
            "model": "tiny",
            "kind": "chat",
            "token_ids": pack_tokens(PROMPT),
            "sampling": sampling,
            "include_usage": True,
            "created": CREATED,
            **fields,
        }
    )


async def post(worker: WorkerServer, request: GenerateRequest) -> tuple[int, dict[str, str], bytes]:
    async with (
        aiohttp.ClientSession() as http,
        http.post(worker.url + "/generate", data=msgspec.msgpack.encode(request)) as answer,
    ):
        return answer.status, dict(answer.headers), await answer.read()


def frames_of(body: bytes) -> list[tuple[bytes, bytes]]:
    """Bytes for the client and packed ids of each frame."""
    frames, reader, before = [], FrameReader(), b""
    for line in body.splitlines(keepends=True):
        passed = reader.feed(line)
        if reader.ids != before or reader.last:
            frames.append((passed, reader.ids[len(before) :]))
            before = reader.ids
    assert reader.last
    return frames


@pytest.mark.parametrize("kind", ["chat", "completion"])
@pytest.mark.parametrize("name", SAMPLINGS)
async def test_a_stream_goes_on_after_any_of_its_frames(
    start_worker: StartWorker, name: str, kind: str
) -> None:
    worker, other = await start_worker(), await start_worker(name="w1")
    whole = wanted(SAMPLINGS[name], stream=True, progress=True, kind=kind)
    _, headers, body = await post(worker, whole)
    assert headers[HEADER_PROGRESS] == "1"
    frames = frames_of(body)
    undisturbed = b"".join(passed for passed, _ in frames)
    _, headers, plain = await post(other, msgspec.structs.replace(whole, progress=False))
    assert HEADER_PROGRESS not in headers
    assert plain == undisturbed
    assert len(b"".join(ids for _, ids in frames)) == 4 * 24
    for cut in range(1, len(frames)):
        sent = b"".join(passed for passed, _ in frames[:cut])
        ids = b"".join(ids for _, ids in frames[:cut])
        resumed = msgspec.structs.replace(whole, output_ids=ids, hit_tokens=0)
        _, headers, body = await post(other, resumed)
        assert headers[HEADER_HIT_TOKENS] == "0"  # of the first worker
        rest = b"".join(passed for passed, _ in frames_of(body))
        assert sent + rest == undisturbed


async def test_a_stop_string_across_the_cut_stops(start_worker: StartWorker) -> None:
    worker = await start_worker()
    whole = wanted(SAMPLINGS["greedy"], stream=True, progress=True)
    frames = frames_of((await post(worker, whole))[2])
    ids = unpack_tokens(b"".join(packed for _, packed in frames))
    text = worker.service.tokenizer.decode(ids)
    stop = text[len(text) // 2 - 2 : len(text) // 2 + 3]
    sampling = msgspec.structs.replace(whole.sampling, stop=[stop])
    stopping = msgspec.structs.replace(whole, sampling=sampling)
    _, headers, body = await post(worker, stopping)
    frames, hit_tokens = frames_of(body), int(headers[HEADER_HIT_TOKENS])
    undisturbed = b"".join(passed for passed, _ in frames)
    assert b'"finish_reason":"stop"' in undisturbed
    for cut in range(1, len(frames)):
        sent = b"".join(passed for passed, _ in frames[:cut])
        output_ids = b"".join(packed for _, packed in frames[:cut])
        resumed = msgspec.structs.replace(stopping, output_ids=output_ids, hit_tokens=hit_tokens)
        while worker.service.publisher.load.batch:  # the former request "a", which is cancelled
            await worker.service.engine.stats()
        rest = b"".join(passed for passed, _ in frames_of((await post(worker, resumed))[2]))
        assert sent + rest == undisturbed


@pytest.mark.parametrize("name", SAMPLINGS)
async def test_a_whole_response_goes_on_after_any_token(
    start_worker: StartWorker, name: str
) -> None:
    worker, other = await start_worker(), await start_worker(name="w1")
    whole = wanted(SAMPLINGS[name])
    _, _, plain = await post(worker, whole)
    _, _, body = await post(other, msgspec.structs.replace(whole, progress=True))
    frames = frames_of(body)
    assert b"".join(passed for passed, _ in frames) == plain + b"\n"
    assert frames[0] == (b"", frames[0][1])  # with the first token, long before the end
    assert len(frames[0][1]) == 4
    ids = b"".join(packed for _, packed in frames)
    for cut in (1, 5, 23):
        output_ids = ids[: 4 * cut]
        resumed = msgspec.structs.replace(whole, output_ids=output_ids, hit_tokens=0)
        _, _, body = await post(other, resumed)
        assert body == plain


async def test_what_cannot_go_on_is_refused_in_words(start_worker: StartWorker) -> None:
    worker = await start_worker()
    whole = wanted(SAMPLINGS["greedy"])
    for output_ids, told in (
        (pack_tokens([1] * 24), "nothing is left to generate"),
        (pack_tokens([1_000_000]), "token id 1000000"),
        (b"123", "output_ids must have 4 bytes per token"),
    ):
        status, _, body = await post(worker, msgspec.structs.replace(whole, output_ids=output_ids))
        assert status == 400
        assert told in json.loads(body)["error"]["message"]


@pytest.mark.parametrize("progress", [True, False])
async def test_a_request_that_fails_in_its_stream_says_so_in_a_frame(
    start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch, progress: bool
) -> None:
    worker = await start_worker()

    async def generate(request: object) -> AsyncIterator[Output]:
        yield Output("a", [65])
        yield Output("a", [], "error", error="not finite")

    monkeypatch.setattr(worker.service.engine, "generate", generate)
    request = wanted(SAMPLINGS["greedy"], stream=True, progress=progress)
    if not progress:
        with pytest.raises(aiohttp.ClientPayloadError):
            await post(worker, request)
        return
    reader = FrameReader()
    reader.feed((await post(worker, request))[2])
    assert (reader.ids, reader.last) == (pack_tokens([65]), False)
    assert "not finite" in json.loads(reader.error)["error"]["message"]
