"""What clients that leave, or stop reading, cost: from then on nothing."""

import asyncio
import json

from aiohttp import web

from tests.router.http_site import post, sweep_until
from tests.router.support import Rig, count, event

STREAM = {"model": "tiny", "prompt": "some prompt", "stream": True}


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
        timeout_s = rig.gateway.settings.gateway.write_timeout_s
        await sweep_until(rig.gateway._server, timeout_s, worker.cancelled.is_set)
        assert rig.fleet.in_flight == 0
        assert rig.fleet.load_of(rig.fleet.members()[0]).batch == 0
        assert count(rig, "stalled_connections") == 1
        assert count(rig, "requests", endpoint="/v1/completions", status="499") == 1
        writer.close()
