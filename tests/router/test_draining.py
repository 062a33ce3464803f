"""A gateway that stops: unready first, then nothing new, and what is left ends with an error."""

import asyncio
import json

import aiohttp
import pytest

from tests.router.http_site import GET, Site, answer, closed
from tests.router.support import Rig, event

AN_AGE_S = 600.0
"""No test waits for it."""


async def never(request, generate):
    await asyncio.get_running_loop().create_future()


async def begin_stop(rig: Rig) -> asyncio.Task:
    """Returns once it is shutting down."""
    stopping = asyncio.create_task(rig.gateway.stop())
    while not rig.gateway.readiness().reasons:  # noqa: ASYNC110
        await asyncio.sleep(0)
    return stopping


async def interrupt(stopping: asyncio.Task) -> None:
    stopping.cancel()
    await asyncio.wait([stopping])


async def test_a_gateway_that_stops_is_unready_first_and_still_serves():
    async with Rig(drain_notice_s=AN_AGE_S) as rig:
        stopping = await begin_stop(rig)
        async with aiohttp.ClientSession(rig.gateway.url) as newcomer:
            async with newcomer.get("/ready") as response:
                assert response.status == 503
                assert (await response.json())["reasons"] == ["this gateway is shutting down"]
                assert response.headers["Connection"] == "close"
            body = {"model": "tiny", "prompt": "x"}
            async with newcomer.post("/v1/completions", json=body) as response:
                assert response.status == 200
        await interrupt(stopping)
        with pytest.raises(aiohttp.ClientConnectorError):
            await rig.get("/health")


async def test_what_is_not_done_in_time_ends_with_an_error():
    async with Rig(drain_timeout_s=0.0) as rig:
        worker = rig.workers[0]
        begun = event("so far")

        async def half(request, generate):
            if not generate.stream:
                return await never(request, generate)
            response = aiohttp.web.StreamResponse(headers=worker.headers(generate))
            await response.prepare(request)
            await response.write(begun)
            return await never(request, generate)

        worker.answer = half
        whole = asyncio.create_task(rig.complete())
        await worker.got_request.wait()
        body = {"model": "tiny", "prompt": "x", "stream": True}
        async with rig.http.post("/v1/completions", json=body) as stream:
            assert await stream.content.readexactly(len(begun)) == begun
            await rig.gateway.stop()
            status, _, told = await whole
            assert (status, told["error"]["code"]) == (503, "gateway_stopping")
            last = (await stream.content.read()).removeprefix(b"data: ")
            assert json.loads(last)["error"] == told["error"]
        counted = rig.gateway.metrics.requests.answered
        assert counted == {("/v1/completions", 503): 1, ("/v1/completions", 200): 1}


async def test_a_body_that_is_still_arriving_is_served():
    async with Site() as site:
        reader, writer = await site.connect()
        writer.write(b"POST /echo HTTP/1.1\r\nHost: h\r\nContent-Length: 4\r\n\r\nbo")
        other_reader, other = await site.connect()
        other.write(GET)  # all that was sent before is read before this is answered
        await answer(other_reader)
        stopping = asyncio.create_task(site.server.stop(AN_AGE_S))
        assert await closed(other_reader)
        writer.write(b"dy")
        status, headers, body = await answer(reader)
        assert (status, json.loads(body)["body"], headers["Connection"]) == (200, "body", "close")
        await stopping


async def test_a_second_signal_ends_the_drain_at_once():
    async with Site() as site:
        reader, writer = await site.connect()
        writer.write(b"GET /wait HTTP/1.1\r\nHost: h\r\n\r\n")
        await site.began.wait()
        stopping = asyncio.create_task(site.server.stop(AN_AGE_S))
        while not site.server.closing:  # noqa: ASYNC110
            await asyncio.sleep(0)
        await interrupt(stopping)
        assert await closed(reader)
        assert not site.server.connections
