"""Cards, a byte-level tokenizer, a fake follower and a fake worker for the router's tests.

The fake worker stands where a real engine would only add model time: it speaks `/generate`,
`/model` and `/admin/flush` over real HTTP, and every test says what it answers.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import msgspec
import tokenizers
from aiohttp import web
from tokenizers import decoders, models, pre_tokenizers

from cluster.blocks import Namespace, hash_blocks, join_hashes, pack_tokens
from cluster.frames import error_frame, frame
from cluster.protocol import (
    HEADER_HIT_TOKENS,
    HEADER_PROGRESS,
    HEADER_PROMPT_TOKENS,
    HEADER_REQUEST_ID,
    HEADER_WORKER,
    GenerateRequest,
    Load,
    ModelInfo,
    Report,
    WorkerCard,
)
from cluster.settings import GatewaySettings, Settings
from router.fleet import Fleet
from router.gateway import Gateway
from router.siblings import Siblings

BLOCK_SIZE = 4
NAMESPACE = Namespace(
    weights="w1", tokenizer="t1", kv_dtype="float32", block_size=BLOCK_SIZE, positions="rope:1"
)
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'villain' %}"
    "{{ raise_exception('no villains here') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
)


def card(worker: str = "w0", **changes) -> WorkerCard:
    fields = {
        "worker": worker,
        "epoch": 1,
        "address": f"http://{worker}.invalid:1",
        "model": "tiny",
        "namespace": NAMESPACE,
        "capacity_blocks": 1000,
        "context_tokens": 200,
        "max_batch_size": 8,
        "token_budget": 64,
        "device": "fake",
        "state": "ready",
    }
    fields.update(changes)
    fields.setdefault("namespace_check", fields["namespace"].check())
    return WorkerCard(**fields)


def report(worker: str = "w0", epoch: int = 1, *, stored=(), evicted=(), **fields) -> Report:
    load = fields.pop("load", None) or Load(free_blocks=1000)
    return Report(
        worker=worker,
        epoch=epoch,
        sequence=fields.pop("sequence", 1),
        load=load,
        stored=join_hashes(list(stored)),
        evicted=join_hashes(list(evicted)),
        **fields,
    )


def chain_of(tokens, root: bytes = b"root", block_size: int = BLOCK_SIZE) -> list[bytes]:
    return hash_blocks(root, pack_tokens(list(tokens)), block_size)


def byte_tokenizer() -> str:
    """A tokenizer with one token a byte, as the contents of a tokenizer.json."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: number for number, symbol in enumerate([*alphabet, "<s>"])}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer.to_str()


TOKENIZER = byte_tokenizer()


def model_info(**changes) -> ModelInfo:
    fields = {
        "model": "tiny",
        "namespace": NAMESPACE,
        "tokenizer_json": TOKENIZER,
        "chat_template": TEMPLATE,
        "special_tokens": {"bos_token": "<s>"},
        "context_tokens": 200,
    }
    return ModelInfo(**{**fields, **changes})


class FakeStatus(msgspec.Struct):
    connected: bool = True
    stale: bool = False
    reason: str = ""
    reports: int = 7
    gaps: int = 1
    disagreements: int = 0
    disagreeing: dict[str, int] = {}
    repairs: int = 1
    unreadable: int = 0
    refused: dict[str, str] = {}
    report_ages_s: dict[str, float] = {}
    kept: list[str] = []
    warning: str = ""


class FakeFollower:
    """Follows nothing: tests call the fleet's own methods as a follower would."""

    def __init__(self, fleet: Fleet) -> None:
        self.status = FakeStatus()
        self.ended = False

    async def run(self) -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            self.ended = True


Answer = Callable[[web.Request, GenerateRequest], Awaitable[web.StreamResponse]]


class FakeWorker:
    """A worker's HTTP side, without an engine."""

    def __init__(self, name: str = "w0", info: ModelInfo | None = None) -> None:
        self.name = name
        self.info = info or model_info()
        self.answer: Answer = self.say("hello")
        self.requests: list[GenerateRequest] = []
        self.arrivals: asyncio.Queue[str] | None = None
        self.model_fetches = 0
        self.got_request = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.on_flush: Callable[[], int] = lambda: 2
        self.others: dict[str, Callable[[web.Request], Awaitable[web.StreamResponse]]] = {}
        self.address = ""

    async def __aenter__(self) -> FakeWorker:
        app = web.Application()
        app.add_routes(
            [
                web.post("/generate", self._generate),
                web.get("/model", self._model),
                web.post("/admin/flush", self._flush),
                web.route("*", "/{other:.*}", self._other),
            ]
        )
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.2)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        host, port = self._runner.addresses[0][:2]
        self.address = f"http://{host}:{port}"
        return self

    async def __aexit__(self, *_) -> None:
        await self._runner.cleanup()

    def card(self, **changes) -> WorkerCard:
        return card(self.name, **{"address": self.address, **changes})

    def headers(self, generate: GenerateRequest, hit: int = 0) -> dict[str, str]:
        return {
            HEADER_WORKER: self.name,
            HEADER_REQUEST_ID: generate.request_id,
            HEADER_PROMPT_TOKENS: str(len(generate.token_ids) // 4),
            HEADER_HIT_TOKENS: str(hit),
        }

    def begin(self) -> Answer:
        """Stream the event "first", and nothing more."""

        async def answer(request: web.Request, generate: GenerateRequest) -> web.StreamResponse:
            response = web.StreamResponse(headers=self.headers(generate))
            await response.prepare(request)
            await response.write(event("first"))
            await asyncio.Event().wait()
            return response

        return answer

    def say(self, text: str, hit: int = 0) -> Answer:
        """Answer every request whole, or as a stream of one event a word."""

        async def answer(request: web.Request, generate: GenerateRequest) -> web.StreamResponse:
            headers = self.headers(generate, hit)
            if not generate.stream:
                return web.json_response(
                    {"id": generate.request_id, "choices": [{"text": text}]}, headers=headers
                )
            response = web.StreamResponse(headers={**headers, "Content-Type": "text/event-stream"})
            await response.prepare(request)
            for word in text.split():
                await response.write(event(word))
            await response.write(b"data: [DONE]\n\n")
            return response

        return answer

    def refuse(self, status: int, message: str = "no", code: str = "refused") -> Answer:
        async def answer(request: web.Request, generate: GenerateRequest) -> web.StreamResponse:
            error = {"message": message, "type": "from_worker", "param": None, "code": code}
            return web.json_response({"error": error}, status=status)

        return answer

    def generate(
        self, tokens: int, cut_after: int | None = None, error: bytes = b"", hit: int = 16
    ) -> Answer:
        """Generate the token ids 1, 2, … as frames with a word each, after those of the request.

        cut_after   frames after which the connection ends
        error       an error that ends the body instead of the last frame
        """

        async def answer(request: web.Request, generate: GenerateRequest) -> web.StreamResponse:
            kind = "text/event-stream" if generate.stream else "application/json"
            headers = {HEADER_PROGRESS: "1", "Content-Type": kind}
            response = web.StreamResponse(headers=self.headers(generate, hit) | headers)
            await response.prepare(request)
            done = len(generate.output_ids) // 4
            for number in range(done + 1, tokens + 1):
                last = number == tokens
                if cut_after is not None and number - done > cut_after:
                    request.transport.abort()
                    raise asyncio.CancelledError
                if last and error:
                    await response.write(error_frame(error))
                    break
                if generate.stream:
                    body = event(str(number)) + (b"data: [DONE]\n\n" if last else b"")
                else:
                    body = json.dumps(list(range(1, number + 1))).encode() + b"\n" if last else b""
                await response.write(frame(body, pack_tokens([number]), last=last))
            await response.write_eof()
            return response

        return answer

    def drop(self, after: bytes = b"") -> Answer:
        """Cut the connection, at once or after some bytes of the body."""

        async def answer(request: web.Request, generate: GenerateRequest) -> web.StreamResponse:
            if after:
                response = web.StreamResponse(
                    headers={**self.headers(generate), "Content-Type": "text/event-stream"}
                )
                await response.prepare(request)
                await response.write(after)
            request.transport.abort()
            raise asyncio.CancelledError

        return answer

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        generate = msgspec.msgpack.decode(await request.read(), type=GenerateRequest)
        self.requests.append(generate)
        if self.arrivals is not None:
            self.arrivals.put_nowait(self.name)
        self.got_request.set()
        try:
            return await self.answer(request, generate)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise

    async def _model(self, request: web.Request) -> web.Response:
        self.model_fetches += 1
        return web.Response(body=msgspec.json.encode(self.info), content_type="application/json")

    async def _other(self, request: web.Request) -> web.StreamResponse:
        handler = self.others.get(f"{request.method} {request.path}")
        if handler is None and request.path == "/health":
            return web.json_response({"worker": self.name, "ready": True})
        return await handler(request) if handler else web.json_response({}, status=404)

    async def _flush(self, request: web.Request) -> web.Response:
        return web.json_response({"worker": self.name, "epoch": self.on_flush()})


def event(text: str) -> bytes:
    return b"data: " + json.dumps({"choices": [{"text": text}]}).encode() + b"\n\n"


QUICK_STOP: dict[str, Any] = {"drain_notice_s": 0.0, "drain_timeout_s": 0.2}
"""Settings of gateways that tests stop."""


class Rig:
    """A gateway with fake workers, and a client."""

    def __init__(self, workers: int = 1, siblings: Siblings | None = None, **gateway) -> None:
        settings = Settings(gateway=GatewaySettings(**{"port": 0, **QUICK_STOP, **gateway}))
        self.gateway = Gateway(settings, FakeFollower, siblings=siblings)
        self.workers = [FakeWorker(f"w{number}") for number in range(workers)]
        self.arrivals: asyncio.Queue[str] = asyncio.Queue()
        for worker in self.workers:
            worker.arrivals = self.arrivals

    @property
    def fleet(self) -> Fleet:
        return self.gateway.fleet

    @property
    def follower(self) -> FakeFollower:
        return self.gateway._follower

    async def __aenter__(self) -> Rig:
        await self.gateway.start()
        for worker in self.workers:
            await worker.__aenter__()
            self.fleet.on_card(worker.card())
        self.http = aiohttp.ClientSession(self.gateway.url)
        return self

    async def __aexit__(self, kind, *_) -> None:
        await self.http.close()
        await self.gateway.stop()
        for worker in self.workers:
            await worker.__aexit__()
        if kind is None:
            self.fleet.check()
            assert self.fleet.in_flight == 0

    async def complete(self, prompt="some prompt", *, headers=None, **fields):
        """Post a completion; returns status, headers and the parsed body."""
        body = {"model": "tiny", "prompt": prompt, **fields}
        return await self.post("/v1/completions", body, headers=headers)

    async def post(self, path: str, body, **options):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.http.post(path, data=data, **options) as answer:
            return answer.status, answer.headers, await answer.json()

    async def get(self, path: str, **options):
        async with self.http.get(path, **options) as answer:
            return answer.status, answer.headers, await answer.json()


def count(rig: Rig, metric: str, **labels) -> float:
    """A counter of the rig's gateway; 0 if nothing was counted. AssertionError for no such one."""
    name = f"stemroute_gateway_{metric}_total"
    [family] = [f for f in rig.gateway.metrics.collect() if f"{f.name}_total" == name]
    return sum(sample.value for sample in family.samples if sample.labels == labels)
