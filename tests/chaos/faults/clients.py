"""Clients that leave at every stage of a request, or close their half of the connection."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import struct
from collections.abc import Callable, Coroutine
from typing import Any

from tests.chaos.driving import Result, drive, fault
from tests.chaos.load import PATHS, Ask
from tests.chaos.rig import Needs, Rig

PER_SECOND = 20
AT_ONCE = 24
PART_S = 0.5
"""Of the load's duration in which they come."""
ANSWER_S = 30.0

Vanish = Callable[[asyncio.StreamReader, asyncio.StreamWriter, bytes], Coroutine[Any, Any, None]]


def request_of(ask: Ask) -> bytes:
    """The bytes of a whole HTTP request."""
    body = json.dumps(ask.body).encode()
    head = f"POST {PATHS[ask.kind]} HTTP/1.1\r\nHost: 127.0.0.1\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


async def _at_once(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes
) -> None:
    """Leaves before it has sent anything."""


async def _in_head(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes
) -> None:
    writer.write(request[:40])
    await writer.drain()


async def _in_body(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes
) -> None:
    writer.write(request[:-40])
    await writer.drain()


async def _after_request(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes
) -> None:
    writer.write(request)
    await writer.drain()


async def _at_first_byte(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes
) -> None:
    writer.write(request)
    await reader.read(1)


async def _in_stream(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes
) -> None:
    writer.write(request)
    for _ in range(5):
        await reader.read(1 << 16)


async def _reset_in_stream(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes
) -> None:
    await _in_stream(reader, writer, request)
    linger = struct.pack("ii", 1, 0)
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)


STAGES: tuple[Vanish, ...] = (
    _at_once,
    _in_head,
    _in_body,
    _after_request,
    _at_first_byte,
    _in_stream,
    _reset_in_stream,
)


async def vanish(port: int, request: bytes, stage: Vanish) -> None:
    """One client that leaves at a stage."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(ANSWER_S):
                await stage(reader, writer, request)
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def half_closed(port: int, request: bytes) -> bool:
    """Whether a client gets its whole answer that closes its own half after the request."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request)
        writer.write_eof()
        async with asyncio.timeout(ANSWER_S):
            return b"[DONE]" in await reader.read()
    except (OSError, TimeoutError):
        return False
    finally:
        writer.close()


async def crowd(rig: Rig, count: int) -> None:
    """`count` clients that vanish, some at once."""
    rng, limit = random.Random(count), asyncio.Semaphore(AT_ONCE)
    streams = [ask for ask in rig.asks if ask.stream]
    ports = [gateway.port for gateway in rig.gateways if gateway.alive]

    async def one(number: int) -> None:
        async with limit:
            request = request_of(rng.choice(streams))
            with contextlib.suppress(OSError):
                await vanish(rng.choice(ports), request, STAGES[number % len(STAGES)])

    await asyncio.gather(*(one(number) for number in range(count)))


@fault("clients-vanish", "clients that leave at every stage", Needs(serve=False))
async def clients_vanish(rig: Rig, seconds: float) -> Result:
    """Nothing is left of them, and nobody else notices."""
    count, answered = int(PER_SECOND * PART_S * seconds), 0

    async def strike() -> None:
        nonlocal answered
        await crowd(rig, count)
        ask = next(ask for ask in rig.asks if ask.stream)
        answers = [half_closed(gateway.port, request_of(ask)) for gateway in rig.gateways]
        answered = sum(await asyncio.gather(*answers))

    result = await drive(rig, seconds, strike)
    result.notes.append(f"{count} clients left early")
    result.expect(
        answered == len(rig.gateways),
        f"{len(rig.gateways) - answered} of {len(rig.gateways)} clients got no answer that had "
        "closed their half of the connection",
    )
    return result
