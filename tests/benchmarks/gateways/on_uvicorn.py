"""Our gateway as an ASGI application on uvicorn: httptools, uvloop, no access log.

    python -m tests.benchmarks.gateways.on_uvicorn PORT

It answers with the same handlers as `stemroute gateway`. As that does, it cancels a request whose
client has left. It has no limit for slow readers and none for idle connections.
"""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import Mapping
from typing import Any

import uvicorn

from cluster.settings import load_settings
from router.background import SWITCH_INTERVAL_S
from router.gateway import GC_ALLOCATIONS, Gateway
from router.http_connection import Service
from router.http_messages import Request, Response


class _Stream:
    """In the place of `router.http_messages.Stream`."""

    def __init__(self, send: Any, headers: Mapping[str, str]) -> None:
        self._send = send
        self._headers = headers
        self._sending: asyncio.Future[None] | None = None
        self.started = self.ended = False

    async def write(self, data: bytes) -> None:
        if data:
            await self._write(data, more=True)

    def end(self, data: bytes = b"") -> None:
        self.ended = True
        try:
            self._write(data, more=False).send(None)  # it waits only where the client is slow
        except StopIteration:
            return
        raise RuntimeError("the benchmark's client is slow")

    async def _write(self, data: bytes, more: bool) -> None:
        if not self.started:
            self.started = True
            await self._send(_start(200, self._headers))
        await self._send({"type": "http.response.body", "body": data, "more_body": more})


class _AsgiRequest(Request):
    """A request whose stream goes out as ASGI messages."""

    __slots__ = ("send",)

    def begin(self, headers: Mapping[str, str]) -> Any:
        self.stream = _Stream(self.send, headers)  # type: ignore[assignment]
        return self.stream


def _start(status: int, headers: Mapping[str, str]) -> dict[str, Any]:
    raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    return {"type": "http.response.start", "status": status, "headers": raw}


class App:
    """The ASGI application."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        headers = {
            name.decode("latin-1"): value.decode("utf-8", "surrogateescape")
            for name, value in scope["headers"]
        }
        request = _AsgiRequest(None, headers, scope["method"], scope["path"], "1.1", True)  # type: ignore[arg-type]
        request.send = send
        self._service.admit(request)
        message = await receive()
        body = message["body"]
        while message.get("more_body"):
            message = await receive()
            body += message["body"]
        request.body = body
        task = asyncio.current_task()
        assert task is not None
        leaving = asyncio.create_task(_cancel_when_gone(receive, task))
        try:
            response = await self._service.answer(request)
            if response is not None:
                await self._send_whole(response, send)
        finally:
            leaving.cancel()

    async def _send_whole(self, response: Response, send: Any) -> None:
        headers = {**response.headers, "Content-Length": str(len(response.body))}
        await send(_start(response.status, headers))
        await send({"type": "http.response.body", "body": response.body})


async def _cancel_when_gone(receive: Any, task: asyncio.Task[None]) -> None:
    message = await receive()
    if message["type"] == "http.disconnect":
        task.cancel()


async def serve_on_uvicorn(service: Service, port: int) -> None:
    """Until the process is ended."""
    config = uvicorn.Config(
        App(service),  # type: ignore[arg-type]
        host="127.0.0.1",
        port=port,
        http="httptools",
        ws="none",
        lifespan="off",
        access_log=False,
        log_level="warning",
        server_header=False,
    )
    await uvicorn.Server(config).serve()


async def serve(port: int) -> None:
    """The gateway, until the process is ended."""
    gateway = Gateway(load_settings(flags={"gateway.port": 0}))
    await gateway.start()
    sys.setswitchinterval(SWITCH_INTERVAL_S)  # all this as `serve_gateway` does
    gc.freeze()
    gc.set_threshold(GC_ALLOCATIONS, *gc.get_threshold()[1:])
    try:
        await serve_on_uvicorn(gateway._server._service, port)
    finally:
        await gateway.stop()


if __name__ == "__main__":
    import uvloop

    uvloop.run(serve(int(sys.argv[1])))
