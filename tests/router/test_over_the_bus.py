"""Gateway, real follower, real Valkey, real publishers: what workers publish is what routes."""

import asyncio
import contextlib

import aiohttp

from cluster.bus import Publisher
from cluster.protocol import HEADER_PREDICTED_HIT_TOKENS, HEADER_WORKER, Load
from cluster.settings import BusSettings, GatewaySettings, Settings
from router.gateway import Gateway
from tests.router.support import QUICK_STOP, FakeWorker
from tests.router.test_forwarding import chain_of_text
from tests.watching import Heard

QUICK = BusSettings(lease_s=1.0, heartbeat_s=0.1, min_report_gap_s=0.002)
TEXT = "a prompt of some blocks"


class Published:
    """A fake worker with a real publisher."""

    def __init__(
        self,
        worker: FakeWorker,
        redis_url: str,
        pool: str,
        bus: BusSettings = QUICK,
        epoch: int = 1,
    ) -> None:
        self.worker = worker
        self.publisher = Publisher(redis_url, pool, bus)
        self.epoch = epoch
        self.held = 0
        self.publisher.begin(worker.card(epoch=epoch))
        self.publisher.update(load=self.load())
        self.task = asyncio.create_task(self.publisher.run())
        worker.on_flush = self.flush

    def load(self) -> Load:
        return Load(free_blocks=1000, cached_blocks=self.held)

    def hold(self, chain) -> None:
        self.held += len(chain)
        self.publisher.update(load=self.load(), stored=chain)

    def flush(self) -> int:
        self.epoch, self.held = self.epoch + 1, 0
        self.publisher.begin(self.worker.card(epoch=self.epoch))
        self.publisher.update(load=self.load())
        return self.epoch

    async def die(self) -> None:
        """End without a word, as a killed process does."""
        self.task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self.task
        await self.publisher.close()


async def test_prefixes_flushes_and_deaths_arrive_over_the_bus(redis_url, pool):
    settings = Settings(
        pool=pool, redis_url=redis_url, bus=QUICK, gateway=GatewaySettings(port=0, **QUICK_STOP)
    )
    gateway = Gateway(settings)
    heard = Heard(gateway)
    fleet, chain = gateway.fleet, chain_of_text(TEXT)
    await gateway.start()
    async with FakeWorker("w0") as first, FakeWorker("w1") as second:
        workers = [Published(worker, redis_url, pool) for worker in (first, second)]
        try:
            async with aiohttp.ClientSession(gateway.url) as http:

                async def complete():
                    body = {"model": "tiny", "prompt": TEXT}
                    async with http.post("/v1/completions", json=body) as answer:
                        assert answer.status == 200
                        return answer.headers

                await heard.until(lambda: len(fleet.members()) == 2)
                workers[1].hold(chain)
                await heard.until(lambda: len(fleet.index) == len(chain))
                async with http.get("/ready") as answer:
                    assert answer.status == 200
                for _ in range(3):
                    headers = await complete()
                    assert headers[HEADER_WORKER] == "w1"
                    assert headers[HEADER_PREDICTED_HIT_TOKENS] == "20"

                async with http.post("/admin/flush") as answer:
                    assert (await answer.json()) == {"workers": {"w0": 2, "w1": 2}}
                assert len(fleet.index) == 0
                assert (await complete())[HEADER_PREDICTED_HIT_TOKENS] == "0"

                workers[0].hold(chain)
                await heard.until(lambda: len(fleet.index) == len(chain))
                await workers[0].die()
                await heard.until(lambda: len(fleet.members()) == 1)
                assert len(fleet.index) == 0
                assert (await complete())[HEADER_WORKER] == "w1"
                fleet.check()
        finally:
            for worker in workers:
                await worker.die()
            await gateway.stop()


async def test_a_worker_that_publishes_none_of_what_it_caches_is_not_followed_in_silence(
    redis_url, pool
):
    settings = Settings(
        pool=pool, redis_url=redis_url, bus=QUICK, gateway=GatewaySettings(port=0, **QUICK_STOP)
    )
    gateway = Gateway(settings)
    heard = Heard(gateway)
    await gateway.start()
    async with FakeWorker("w0") as worker, aiohttp.ClientSession(gateway.url) as http:
        published = Published(worker, redis_url, pool)
        published.held = 50
        published.publisher.update(load=published.load())
        try:

            async def index():
                async with http.get("/ready") as answer:
                    return (await answer.json())["index"]

            await heard.until(lambda: gateway._follower.status.disagreeing)
            view = await index()
            assert view["stale"]
            assert "w0: it reports 50 cached blocks, but has published 0" in view["reason"]
            assert gateway._follower.status.gaps == 0

            published.held = 0
            published.hold(chain_of_text(TEXT))
            await heard.until(lambda: len(gateway.fleet.index) == 5)
            assert await index() == {"stale": False, "reason": ""}
        finally:
            await published.die()
            await gateway.stop()
