"""Our HTTP server, or uvicorn, with a handler that forwards nothing: it answers by itself.

    python -m tests.benchmarks.gateways.bare_server stemroute|uvicorn PORT

The answers are those of the mock workers: whole, or as a stream of an event per turn of the loop.
"""

from __future__ import annotations

import asyncio
import gc
import sys

import uvloop

from cluster.settings import GatewaySettings
from router.counts import ConnectionCounts, RequestCounts
from router.edge import Edge, Route, json_response
from router.gateway import GC_ALLOCATIONS
from router.http_messages import Request, Response
from router.http_server import HttpServer
from tests.benchmarks.gateways.mock_worker import EVENT_BYTES
from tests.benchmarks.gateways.on_uvicorn import serve_on_uvicorn

HEADERS = {
    "x-stemroute-request-id": "0123456789abcdef0123456789abcdef",
    "x-stemroute-worker": "w0",
    "x-stemroute-policy": "locality",
    "x-stemroute-predicted-hit-tokens": "128",
    "x-stemroute-prompt-tokens": "256",
    "x-stemroute-hit-tokens": "128",
    "Content-Type": "text/event-stream",
}


async def answer(request: Request) -> Response | None:
    """Whole, or as a stream."""
    if b'"stream":false' in request.body:
        return Response(b"".join(EVENT_BYTES), headers=HEADERS)
    stream = request.begin(HEADERS)
    for event in EVENT_BYTES[:-1]:
        await stream.write(event)
        await asyncio.sleep(0)
    stream.end(EVENT_BYTES[-1])
    return None


async def health(request: Request) -> Response:
    """Ready at once."""
    return json_response({"workers_ready": 0})


async def serve(name: str, port: int) -> None:
    """Until the process is ended."""
    edge = Edge(GatewaySettings(), RequestCounts())
    edge.add([Route("POST", "/v1/chat/completions", answer), Route("GET", "/ready", health)])
    gc.freeze()
    gc.set_threshold(GC_ALLOCATIONS, *gc.get_threshold()[1:])
    if name == "uvicorn":
        await serve_on_uvicorn(edge.service(), port)
        return
    server = HttpServer(
        edge.service(),
        max_connections=1000,
        write_timeout_s=60.0,
        max_held_bytes=1 << 30,
        counts=ConnectionCounts(),
    )
    await server.start("127.0.0.1", port)
    await asyncio.get_running_loop().create_future()


if __name__ == "__main__":
    uvloop.run(serve(sys.argv[1], int(sys.argv[2])))
