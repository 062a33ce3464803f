"""What clients that leave, or stop reading, cost: from then on nothing."""

import asyncio
import json

from aiohttp import web

from tests.router.http_site import post
from tests.router.support import Rig, event

STREAM = {"model": "tiny", "prompt": "some prompt", "stream": True}


def count(rig: Rig, metric: str, **labels) -> float:
    return rig.gateway.metrics.registry.get_sample_value(f"stemroute_{metric}_total", labels) or 0


async def test_a_client_that_leaves_cancels_the_request_at_the_worker():
    async with Rig() as rig:
        (worker,) = rig.workers

        worker.answer = worker.begin()
        response = await rig.http.post("/v1/completions", json=STREAM)
        assert await response.content.readany() == event("first")
        assert rig.fleet.in_flight == 1
        response.close()
        await asyncio.wait_for(worker.cancelled.wait(), 10)
        assert rig.fleet.in_flight == 0
        assert rig.fleet.load_of(rig.fleet.members()[0]).batch == 0
        assert count(rig, "requests", endpoint="/v1/completions", status="499") == 1


async def test_a_client_that_leaves_before_the_first_token_cancels_too():
    async with Rig() as rig:
        (worker,) = rig.workers

        async def answer(request, generate):
            await asyncio.Event().wait()

        worker.answer = answer
        waiting = asyncio.create_task(rig.complete())
        await asyncio.wait_for(worker.got_request.wait(), 10)
        assert rig.fleet.in_flight == 1
        waiting.cancel()
        await asyncio.wait_for(worker.cancelled.wait(), 10)
        assert rig.fleet.in_flight == 0


async def test_a_client_that_stops_reading_is_cut_off_and_its_request_cancelled(held_back):
    async with Rig() as rig:
        (worker,) = rig.workers

        async def answer(request, generate):
            response = web.StreamResponse(headers=worker.headers(generate))
            await response.prepare(request)
            while True:
                await response.write(event("x" * 100_000))

        worker.answer = answer
        host, port = rig.gateway.url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(post(json.dumps(STREAM).encode(), "/v1/completions"))
        await asyncio.wait_for(held_back.wait(), 10)
        assert rig.fleet.in_flight == 1
        server, now = rig.gateway._server, asyncio.get_running_loop().time()
        async with asyncio.timeout(30):
            while not worker.cancelled.is_set():
                now += rig.gateway.settings.gateway.write_timeout_s
                server.sweep(now)
                await asyncio.sleep(0)  # the system may still have been taking some
        assert rig.fleet.in_flight == 0
        assert rig.fleet.load_of(rig.fleet.members()[0]).batch == 0
        assert count(rig, "stalled_connections") == 1
        assert count(rig, "requests", endpoint="/v1/completions", status="499") == 1
        writer.close()
