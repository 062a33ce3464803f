"""Ten thousand requests with cancels, errors and deaths: at quiet every load is exactly 0.

Gateway, HTTP, publishers, Valkey and follower are real. The workers are fakes that report
every request, and fail in every way that a worker can.
"""

import asyncio
import random

import aiohttp
import pytest
import uvloop
from aiohttp import web

from cluster.protocol import GenerateRequest, Load
from cluster.settings import BusSettings, GatewaySettings, Settings
from router.gateway import Gateway
from tests.router.support import QUICK_STOP, FakeWorker
from tests.router.test_over_the_bus import Heard, Published

REQUESTS = 10_000
AT_ONCE = 64
WORKERS = 4
DEATHS_EVERY = 500
BUS = BusSettings(lease_s=1.0, heartbeat_s=0.2, min_report_gap_s=0.02)


class Fickle(Published):
    """Answers, refuses, breaks off or hangs until its client gives up; lives more than once."""

    def __init__(self, fake: FakeWorker, redis_url: str, pool: str, rng: random.Random, epoch: int):
        self.running = self.pending_tokens = 0
        self.rng = rng
        self.seen = 0
        super().__init__(fake, redis_url, pool, BUS, epoch)
        self.ways = [
            *[fake.say("one two three")] * 12,
            fake.refuse(429),
            fake.refuse(500),
            fake.refuse(400),
            fake.drop(),
            fake.drop(b'data: {"choices": []}\n\ndata: half'),
            self.hang,
        ]
        fake.answer = self.answer

    def load(self) -> Load:
        return Load(
            free_blocks=1000, running=self.running, pending_prefill_tokens=self.pending_tokens
        )

    async def answer(self, request: web.Request, generate: GenerateRequest) -> web.StreamResponse:
        tokens = len(generate.token_ids) // 4
        self.seen += 1
        self.running += 1
        self.pending_tokens += tokens
        self.publisher.update(load=self.load(), received=[generate.request_id])
        try:
            return await self.rng.choice(self.ways)(request, generate)
        finally:
            self.running -= 1
            self.pending_tokens -= tokens
            self.publisher.update(load=self.load())

    async def hang(self, request: web.Request, generate: GenerateRequest) -> web.StreamResponse:
        await asyncio.get_running_loop().create_future()
        raise AssertionError("only a cancellation ends it")


@pytest.mark.timeout(300)
def test_after_ten_thousand_requests_every_load_is_zero(redis_url, pool):
    uvloop.run(ten_thousand_requests(redis_url, pool))


async def ten_thousand_requests(redis_url: str, pool: str) -> None:
    rng = random.Random(4)
    settings = Settings(
        pool=pool,
        redis_url=redis_url,
        bus=BUS,
        gateway=GatewaySettings(port=0, **QUICK_STOP, attempts=2, first_byte_timeout_s=0.15),
    )
    gateway = Gateway(settings)
    heard = Heard(gateway)
    fleet = gateway.fleet
    await gateway.start()
    workers: list[Fickle] = []
    lives = seen = 0
    outcomes: dict[str, int] = {}

    async def begin(name: str) -> None:
        nonlocal lives
        lives += 1
        fake = await FakeWorker(name).__aenter__()
        workers.append(Fickle(fake, redis_url, pool, rng, epoch=lives))

    async def end() -> str:
        nonlocal seen
        worker = workers.pop(rng.randrange(len(workers)))
        await worker.die()
        await worker.worker.__aexit__()
        seen += worker.seen
        return worker.worker.name

    async def ask(http: aiohttp.ClientSession, number: int) -> None:
        prompt = f"{rng.randrange(40):03} a prompt that some share {number % 7}"
        body = {"model": "tiny", "prompt": prompt, "stream": rng.random() < 0.5}
        patience_s = rng.choice([None, None, None, 0.0, 0.01, 0.05])
        try:
            async with asyncio.timeout(patience_s):
                async with http.post("/v1/completions", json=body) as answer:
                    outcome = str(answer.status)
                    await answer.read()
        except TimeoutError:
            outcome = "cancelled"
        except aiohttp.ClientError:
            outcome = "broken"
        outcomes[outcome] = outcomes.get(outcome, 0) + 1

    try:
        for number in range(WORKERS):
            await begin(f"w{number}")
        await heard.until(lambda: len(fleet.members()) == WORKERS)
        numbers = iter(range(REQUESTS))

        async def client(http: aiohttp.ClientSession) -> None:
            for number in numbers:
                if number % DEATHS_EVERY == DEATHS_EVERY - 1:
                    await begin(await end())
                await ask(http, number)

        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(gateway.url, connector=connector) as http:
            await asyncio.gather(*(client(http) for _ in range(AT_ONCE)))

        def quiet() -> bool:
            members = fleet.members()
            return {m.card.epoch for m in members} == {w.epoch for w in workers} and all(
                fleet.load_of(m) == Load(free_blocks=1000) for m in members
            )

        await heard.until(quiet)
        assert fleet.in_flight == 0
        assert len(fleet.coming) == 0
        fleet.check()
        assert sum(outcomes.values()) == REQUESTS
        assert {"200", "400", "cancelled"} <= outcomes.keys(), outcomes
        assert lives == WORKERS + REQUESTS // DEATHS_EVERY
        assert seen + sum(worker.seen for worker in workers) > REQUESTS // 2
    finally:
        while workers:
            await end()
        await gateway.stop()
