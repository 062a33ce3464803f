"""Two gateways on one pool: each sees what the other sent, through the workers' own reports.

The workers are fakes with real publishers: they take requests, report them, and answer when the
test lets them. Valkey, followers, fleets and HTTP are real.
"""

import asyncio
import contextlib

import aiohttp
import pytest
from aiohttp import web

from cluster.protocol import GenerateRequest, Load
from cluster.settings import BusSettings, GatewaySettings, Settings
from router.gateway import Gateway
from tests.router.support import QUICK_STOP, FakeWorker
from tests.router.test_over_the_bus import Heard, Published

BUS = BusSettings(lease_s=3.0, heartbeat_s=0.1, min_report_gap_s=0.02)
WORKERS = 4


class Busy(Published):
    """Reports every request as it comes and holds its answer back until `let_go` is set."""

    def __init__(self, worker: FakeWorker, redis_url: str, pool: str) -> None:
        self.running = self.pending_tokens = 0
        self.let_go = asyncio.Event()
        super().__init__(worker, redis_url, pool, BUS)
        self.say = worker.say("hello")
        worker.answer = self.answer

    def load(self) -> Load:
        return Load(
            free_blocks=1000,
            cached_blocks=self.held,
            running=self.running,
            pending_prefill_tokens=self.pending_tokens,
        )

    async def answer(self, request: web.Request, generate: GenerateRequest) -> web.StreamResponse:
        tokens = len(generate.token_ids) // 4
        self.running += 1
        self.pending_tokens += tokens
        self.publisher.update(load=self.load(), received=[generate.request_id])
        try:
            await self.let_go.wait()
            return await self.say(request, generate)
        finally:
            self.running -= 1
            self.pending_tokens -= tokens
            self.publisher.update(load=self.load())


class Side:
    """One gateway, what it hears, and a client of it."""

    def __init__(self, redis_url: str, pool: str, policy: str) -> None:
        gateway = GatewaySettings(port=0, **QUICK_STOP, policy=policy)
        settings = Settings(pool=pool, redis_url=redis_url, bus=BUS, gateway=gateway)
        self.gateway = Gateway(settings)
        self.batches_when_named: dict[str, int] = {}
        apply = self.gateway.fleet.on_report

        def on_report(report):
            answer = apply(report)
            for request_id in report.received:
                self.batches_when_named[request_id] = self.batch(report.worker)
            return answer

        self.gateway.fleet.on_report = on_report
        self.heard = Heard(self.gateway)

    def batch(self, worker: str) -> int:
        fleet = self.gateway.fleet
        return next(fleet.load_of(m).batch for m in fleet.members() if m.card.worker == worker)

    async def complete(self, prompt: str) -> None:
        body = {"model": "tiny", "prompt": prompt}
        async with self.http.post("/v1/completions", json=body) as answer:
            assert answer.status == 200, await answer.text()

    async def __aenter__(self):
        await self.gateway.start()
        self.http = aiohttp.ClientSession(self.gateway.url, connector=aiohttp.TCPConnector(limit=0))
        return self

    async def __aexit__(self, *_):
        await self.http.close()
        await self.gateway.stop()


@contextlib.asynccontextmanager
async def pair(redis_url: str, pool: str, policy: str):
    """Two gateways that know all workers, the workers, and a queue of who got a request."""
    async with contextlib.AsyncExitStack() as stack:
        arrivals: asyncio.Queue[str] = asyncio.Queue()
        workers = []
        for number in range(WORKERS):
            fake = await stack.enter_async_context(FakeWorker(f"w{number}"))
            fake.arrivals = arrivals
            workers.append(Busy(fake, redis_url, pool))
            stack.push_async_callback(workers[-1].die)
        sides = [await stack.enter_async_context(Side(redis_url, pool, policy)) for _ in range(2)]
        for side in sides:
            await side.heard.until(lambda s=side: len(s.gateway.fleet.members()) == WORKERS)
        yield sides, workers, arrivals


@pytest.mark.parametrize("policy", ["locality", "least_requests"])
async def test_each_gateway_sees_the_others_dispatches_in_the_next_report(redis_url, pool, policy):
    async with pair(redis_url, pool, policy) as (sides, workers, arrivals):
        asking = []
        for number in range(3 * WORKERS):
            sender, other = sides[number % 2], sides[1 - number % 2]
            asking.append(asyncio.create_task(sender.complete(f"prompt {number:03}")))
            name = await asyncio.wait_for(arrivals.get(), 10)
            fake = next(w.worker for w in workers if w.worker.name == name)
            request_id = fake.requests[-1].request_id
            for side in (sender, other):
                await side.heard.until(lambda s=side, r=request_id: r in s.batches_when_named)
                # at once with the report that names it, and counted once
                assert side.batches_when_named[request_id] == len(fake.requests)
            counts = [len(w.worker.requests) for w in workers]
            assert max(counts) - min(counts) <= 1, counts
        for worker in workers:
            worker.let_go.set()
        await asyncio.gather(*asking)
        for side in sides:
            await side.heard.until(lambda s=side: not any(s.batch(f"w{n}") for n in range(WORKERS)))
            side.gateway.fleet.check()


async def test_a_burst_through_both_gives_no_worker_more_than_its_share_and_one_report(
    redis_url, pool
):
    """A third gateway has filled one worker to its share of all requests. What the other two then
    get comes in pairs of bursts, each pair when the one before it has been reported. So what one
    gateway does not know of a worker is at most the other's latest burst, and no worker gets more
    than that beyond its share. Gateways that did not heed reports would share everything they got
    evenly, and the filled one would get a quarter of it on top.
    """
    burst, pairs_of_bursts = 6, 6
    share = pairs_of_bursts * 2 * burst // (WORKERS - 1)
    async with contextlib.AsyncExitStack() as stack:
        sides, workers, _ = await stack.enter_async_context(pair(redis_url, pool, "locality"))
        gathers = await stack.enter_async_context(Side(redis_url, pool, "prefix_only"))
        await gathers.heard.until(lambda: len(gathers.gateway.fleet.members()) == WORKERS)
        asking = [asyncio.create_task(gathers.complete("the same words")) for _ in range(share)]
        await reported(sides, share)
        assert sorted(len(w.worker.requests) for w in workers) == [0, 0, 0, share]
        for sent in range(0, pairs_of_bursts * 2 * burst, 2 * burst):
            asking += [
                asyncio.create_task(sides[number % 2].complete(f"{number:03} is my word"))
                for number in range(sent, sent + 2 * burst)
            ]
            await reported(sides, len(asking))
        counts = [len(w.worker.requests) for w in workers]
        assert sum(counts) == share * WORKERS
        assert max(counts) <= share + burst, counts
        for worker in workers:
            worker.let_go.set()
        await asyncio.gather(*asking)
        for side in (*sides, gathers):
            await side.heard.until(lambda s=side: not any(s.batch(f"w{n}") for n in range(WORKERS)))
            assert side.gateway.fleet.in_flight == 0
            side.gateway.fleet.check()


async def reported(sides: list[Side], requests: int) -> None:
    """Wait until all of `sides` have heard of so many requests in workers' reports."""
    for side in sides:
        await side.heard.until(lambda s=side: len(s.batches_when_named) == requests)
