"""A fake gateway: the HTTP face of a gateway over pretended workers, with events a test controls.

Its tokens are words, its caches remember message prefixes, and nothing takes time, so that the
load generator's own behaviour can be tested alone.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import msgspec
from aiohttp import web

from cluster.protocol import (
    HEADER_EXPLAIN,
    HEADER_HIT_TOKENS,
    HEADER_POLICY,
    HEADER_PREDICTED_HIT_TOKENS,
    HEADER_REQUEST_ID,
    HEADER_WORKER,
)

Behaviour = Callable[["FakeGateway", web.Request, dict], Awaitable[web.StreamResponse]]


def chunk(text: str = "", tokens: int | None = None, finish: str | None = None, **usage) -> bytes:
    """One streamed chunk; `tokens` is the running count of completion tokens."""
    body: dict = {"choices": [{"delta": {"content": text}, "finish_reason": finish}]}
    if tokens is not None:
        body["usage"] = {"completion_tokens": tokens, **usage}
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


async def whole_answer(gateway: FakeGateway, request: web.Request, body: dict):
    """Two words and the end, after the fake's own routing."""
    worker, prompt, hit = gateway.route(body)
    response = await gateway.begin(request, worker, prompt, hit)
    usage = {"prompt_tokens": prompt, "prompt_tokens_details": {"cached_tokens": hit}}
    await response.write(chunk("Good ", 1, **usage))
    await response.write(chunk("day.", 2, finish="stop", **usage))
    await response.write(b"data: [DONE]\n\n")
    return response


class FakeGateway:
    """State of the fake; tests read it and set `behave`."""

    def __init__(self, workers: int = 2) -> None:
        self.policy = "locality"
        self.available = ["round_robin", "locality"]
        self.caches: dict[str, set[str]] = {f"w{i}": set() for i in range(workers)}
        self.epoch = 1
        self.requests_total = 0
        self.left_blocks = 0
        self.stale = ""
        self.running = 0
        self.keys: list[str] = []
        self.admin_key = ""
        self.bodies: list[tuple[str, bytes]] = []
        self.policies_set: list[str] = []
        self.flushes = 0
        self.probes = 0
        self.tokens_per_word = 1
        self.usage_name = "usage"
        self.decisions: dict[str, str] = {}  # workers by request id, of requests that asked
        self.asked: list[str] = []
        self.no_decisions = False
        self.behave: Behaviour = whole_answer
        self._turn = itertools.count()
        self._ids = itertools.count()

    def route(self, body: dict) -> tuple[str, int, int]:
        """Worker, prompt tokens and reused tokens, by the policy now."""
        messages = body.get("messages") or [{"role": "text", "content": body["prompt"]}]
        texts = [f"{m['role']} {m['content']}" for m in messages]
        prefixes = ["\n".join(texts[: i + 1]) for i in range(len(texts))]

        def hit(worker: str) -> int:
            held = [p for p in prefixes if p in self.caches[worker]]
            return len(held[-1].split()) if held else 0

        names = list(self.caches)
        worker = names[next(self._turn) % len(names)]
        if self.policy == "locality":
            worker = max(names, key=lambda name: (hit(name), name == worker))
        prompt, reused = len(prefixes[-1].split()), hit(worker)
        self.caches[worker].update(prefixes)
        return worker, prompt, min(reused, prompt - 1)

    async def begin(
        self, request: web.Request, worker: str = "w0", prompt: int = 10, hit: int = 0
    ) -> web.StreamResponse:
        """Send the response headers of a stream."""
        request_id = f"q{next(self._ids)}"
        if request.headers.get(HEADER_EXPLAIN) == "1":
            self.decisions[request_id] = worker
        response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream",
                HEADER_REQUEST_ID: request_id,
                HEADER_WORKER: worker,
                HEADER_POLICY: self.policy,
                HEADER_HIT_TOKENS: str(hit),
                HEADER_PREDICTED_HIT_TOKENS: str(hit),
            }
        )
        await response.prepare(request)
        return response

    def app(self) -> web.Application:
        app = web.Application()
        app.add_routes(
            [
                web.post("/v1/chat/completions", self._chat),
                web.post("/v1/completions", self._chat),
                web.get("/admin/decisions/{id}", self._decision),
                web.get("/v1/models", self._models),
                web.get("/admin/policy", self._policy),
                web.post("/admin/policy", self._set_policy),
                web.post("/admin/flush", self._flush),
                web.get("/admin/fleet", self._fleet),
            ]
        )
        return app

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        data = await request.read()
        self.keys.append(request.headers.get("Authorization", ""))
        body = msgspec.json.decode(data)
        if not body.get("stream"):  # a probe of how many tokens a text has
            self.probes += 1
            words = len(body["messages"][-1]["content"].split())
            tokens = self.tokens_per_word * words + 7
            return web.json_response({self.usage_name: {"prompt_tokens": tokens}})
        self.bodies.append((self.policy, data))
        self.requests_total += 1
        return await self.behave(self, request, body)

    async def _decision(self, request: web.Request) -> web.Response:
        request_id = request.match_info["id"]
        self.asked.append(request_id)
        if self.no_decisions or request_id not in self.decisions:
            return web.json_response({"error": {"message": "none is kept"}}, status=404)
        chosen = self.decisions[request_id]
        workers = [
            {
                "worker": worker,
                "hit_tokens": 3,
                "new_tokens": 9,
                "cost": 9.0,
                "chosen": worker == chosen,
            }
            for worker in self.caches
        ]
        return web.json_response(
            {
                "policy": self.policy,
                "because": f"{chosen} is right: a <test>",
                "workers": workers,
                "others": 3,
            }
        )

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "fake-model"}]})

    async def _policy(self, request: web.Request) -> web.Response:
        if self.admin_key and request.headers.get("Authorization") != f"Bearer {self.admin_key}":
            return web.json_response({"error": {"message": "no"}}, status=401)
        return web.json_response({"policy": self.policy, "available": self.available})

    async def _set_policy(self, request: web.Request) -> web.Response:
        policy = (await request.json())["policy"]
        if "bad" in policy:
            message = f"{policy}: there is no parameter bad"
            return web.json_response({"error": {"message": message}}, status=400)
        self.policy = policy
        self.policies_set.append(self.policy)
        return web.json_response({"policy": self.policy})

    async def _flush(self, request: web.Request) -> web.Response:
        self.flushes += 1
        self.epoch += 1
        for cache in self.caches.values():
            cache.clear()
        return web.json_response({"workers": dict.fromkeys(self.caches, self.epoch)})

    async def _fleet(self, request: web.Request) -> web.Response:
        workers = [
            {
                "worker": worker,
                "epoch": self.epoch,
                "device": "fake",
                "block_size": 16,
                "capacity_blocks": 100,
                "indexed_blocks": len(cache) + self.left_blocks,
                "cached_blocks": len(cache),
                "running": self.running,
                "waiting": 0,
                "state": "ready",
            }
            for worker, cache in self.caches.items()
        ]
        return web.json_response(
            {
                "pool": "fake",
                "policy": self.policy,
                "requests_total": self.requests_total,
                "in_flight": 0,
                "bus": {"connected": True, "stale": bool(self.stale), "reason": self.stale},
                "workers": workers,
            }
        )


@asynccontextmanager
async def serving(gateway: FakeGateway) -> AsyncIterator[str]:
    """Serve it on a free port of this machine; yields its URL."""
    runner = web.AppRunner(gateway.app(), shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
