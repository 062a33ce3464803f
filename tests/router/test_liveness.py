"""A gateway whose Redis takes no writes: workers that answer go on serving."""

import asyncio
import contextlib

import aiohttp
import pytest
from aiohttp import web

from cluster.protocol import HEADER_WORKER, Load
from cluster.settings import GatewaySettings, Settings
from router.gateway import Gateway
from router.liveness import HealthProbe
from tests.cluster.redis_servers import order
from tests.router.support import QUICK_STOP, FakeWorker
from tests.router.test_over_the_bus import QUICK, Published
from tests.watching import Heard


def healthy(worker: FakeWorker, *, name: str = "", ready: bool = True) -> FakeWorker:
    async def answer(_: web.Request) -> web.Response:
        body = {"worker": name or worker.name, "ready": ready, "reason": "" if ready else "drains"}
        return web.json_response(body, status=200 if ready else 503)

    worker.others["GET /health"] = answer
    return worker


async def test_no_request_fails_while_redis_takes_no_writes(own_valkey, pool):
    """Leases lapse, workers are healthy: all requests are answered, and /ready says what is so."""
    settings = Settings(
        pool=pool,
        redis_url=own_valkey.connection_url,
        bus=QUICK,
        gateway=GatewaySettings(port=0, **QUICK_STOP),
    )
    gateway = Gateway(settings)
    heard = Heard(gateway)
    await gateway.start()
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(gateway.stop)
        fakes = [await stack.enter_async_context(FakeWorker(name)) for name in ("w0", "w1")]
        workers = [Published(healthy(fake), settings.redis_url, pool) for fake in fakes]
        for worker in workers:
            stack.push_async_callback(worker.die)
        http = await stack.enter_async_context(aiohttp.ClientSession(gateway.url))
        await heard.until(lambda: len(gateway.fleet.members()) == 2)
        await order(own_valkey, "CONFIG", "SET", "maxmemory", "1")
        for number, worker in enumerate(workers):  # what a worker stores no longer gets through
            worker.hold([bytes([number]) * 16])

        statuses = []

        async def complete() -> str:
            body = {"model": "tiny", "prompt": f"{len(statuses)} is the number"}
            async with http.post("/v1/completions", json=body) as answer:
                statuses.append(answer.status)
                return answer.headers.get(HEADER_WORKER, "")

        async def ready() -> tuple[int, dict]:
            async with http.get("/ready") as answer:
                return answer.status, await answer.json()

        async with asyncio.timeout(30):
            while len(gateway._follower.status.kept) < 2:
                await complete()
        served = {await complete() for _ in range(40)}
        assert set(statuses) == {200}
        assert served == {"w0", "w1"}
        status, view = await ready()
        assert (status, view["reasons"], view["workers_ready"]) == (200, [], 2)
        assert view["index"]["stale"]
        told = " ".join(view["degraded"])
        assert "Redis takes no writes: it has reached maxmemory" in told
        assert "2 of 2 workers do not report, the first since" in told
        assert "workers answer directly, but their reports do not arrive; last reports: w0 " in told
        async with http.get("/admin/fleet") as answer:
            rows = (await answer.json())["workers"]
        assert all(row["kept"] and row["report_age_s"] > 0 for row in rows)

        await fakes[1].__aexit__()  # this one is gone indeed
        await heard.until(lambda: len(gateway.fleet.members()) == 1)
        assert await complete() == "w0"

        await order(own_valkey, "CONFIG", "SET", "maxmemory", "0")
        workers[1].publisher.begin(fakes[1].card(epoch=2))
        workers[1].publisher.update(load=Load(free_blocks=1000))
        await heard.until(
            lambda: len(gateway.fleet.members()) == 2 and not gateway._follower.status.kept
        )
        gateway.fleet.check()


@pytest.mark.parametrize(
    ("name", "ready", "expected"),
    [("w0", True, (True, True)), ("w0", False, (True, False)), ("w7", True, (False, False))],
    ids=["ready", "draining", "another worker at its address"],
)
async def test_what_a_worker_says_of_itself(name, ready, expected):
    async with FakeWorker("w0") as worker, aiohttp.ClientSession() as session:
        healthy(worker, name=name, ready=ready)
        health = await HealthProbe(lambda: session, 5.0)(worker.card())
        assert (health.answers, health.ready) == expected


async def test_a_worker_that_refuses_connections_does_not_answer():
    worker = FakeWorker("w0")
    async with worker, aiohttp.ClientSession() as session:
        card = worker.card()
    async with aiohttp.ClientSession() as session:
        health = await HealthProbe(lambda: session, 5.0)(card)
    assert not health.answers
    assert "cannot be reached" in health.reason


async def test_a_busy_worker_is_asked_again_and_a_silent_one_not_for_ever():
    asked = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(request)
        if len(asked) == 2:
            return web.json_response({"worker": "w0", "ready": True})
        await asyncio.Event().wait()
        raise AssertionError

    async with FakeWorker("w0") as worker, aiohttp.ClientSession() as session:
        worker.others["GET /health"] = answer
        probe = HealthProbe(lambda: session, 0.05, 3)
        assert (await probe(worker.card())).answers
        health = await probe(worker.card())
        assert not health.answers
        assert "did not answer 3 requests" in health.reason
        assert len(asked) == 5
