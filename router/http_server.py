"""HTTP/1.1 for clients: a small server on llhttp's parser (`httptools`).

It does what a gateway needs: bodies that fit in memory are whole when a handler starts, an answer
goes out in one piece or as a stream, a client that leaves cancels its handler, one that reads
slowly holds its answers back, and one that stops reading is cut off. Requests of one connection are
answered one after the other. TLS and HTTP/2 belong to a proxy before it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable
from itertools import islice

from cluster.protocol import RequestError
from router.counts import ConnectionCounts
from router.http_connection import ClientConnection
from router.http_messages import Handler, Request, Response

log = logging.getLogger(__name__)

IDLE_S = 75.0
"""A connection is closed when for so long nothing was answered and neither a request began, nor
was a head completed, nor anything of a body came: a head may not trickle in for ever."""

MAKES_WAY_S = 5.0
"""Where there is no room for a new connection, one that nobody has asked anything on for so long
makes way: else whoever opens connections and sends nothing locks everybody out, and has the gateway
restarted, as its health cannot be asked for."""

MOST_LOOKED_AT = 16
"""Connections that are looked at for that, those unheard of for the longest time first."""

MAX_TURNED_AWAY = 256
"""So many clients that found no room may take their time to read that; more are cut at once."""

SWEEP_S = 5.0
BACKLOG = 1024


class HttpServer:
    """Listens, and hands requests over.

    admit            looks at a request when its head is there: sets `handler`, or `refusal`
    answer           answers a complete request. Must not raise but when cancelled
    malformed        the refusal of what cannot be read: a reason and a status
    max_body_bytes   longer bodies are refused with `too_large`
    max_connections  at once; where none makes way, others get the answer `full` and are closed
    write_timeout_s  a client that takes nothing of its answer for so long is cut off
    counts           of connections that were not served to their end
    idle             connections on which nothing is being answered, in the order of `heard_at`
    """

    def __init__(
        self,
        *,
        admit: Callable[[Request], None],
        answer: Handler,
        malformed: Callable[[str, int], RequestError],
        too_large: RequestError,
        max_body_bytes: int,
        full: Response,
        max_connections: int,
        write_timeout_s: float,
        counts: ConnectionCounts,
    ) -> None:
        self.admit = admit
        self.answer = answer
        self.malformed = malformed
        self.too_large = too_large
        self.max_body_bytes = max_body_bytes
        self.full = full
        self.max_connections = max_connections
        self.write_timeout_s = write_timeout_s
        self.counts = counts
        self.connections: set[ClientConnection] = set()
        self.idle: OrderedDict[ClientConnection, None] = OrderedDict()
        self.turned_away: set[ClientConnection] = set()  # and not gone yet
        self.closing = False
        self._last_gone: asyncio.Future[None] | None = None
        self._listening: asyncio.Server
        self._sweeping: asyncio.TimerHandle

    async def start(self, host: str, port: int) -> tuple[str, int]:
        """Listen; returns the address. Raises OSError for a taken port."""
        loop = asyncio.get_running_loop()
        self._listening = await loop.create_server(
            lambda: ClientConnection(self), host, port, backlog=BACKLOG
        )
        self._sweeping = loop.call_later(SWEEP_S, self._sweep_on)
        name = self._listening.sockets[0].getsockname()
        return str(name[0]), int(name[1])

    async def stop(self, drain_s: float) -> None:
        """Take no new requests, give answers `drain_s` to end and to be read, then cut what is
        left."""
        self.closing = True
        self._listening.close()
        self._sweeping.cancel()
        for connection in list(self.turned_away):
            connection.transport.abort()
        for connection in list(self.connections):
            if connection.task is None:
                connection.transport.close()
        if self.connections:
            self._last_gone = asyncio.get_running_loop().create_future()
            await asyncio.wait([self._last_gone], timeout=drain_s)
            late = [each.task for each in self.connections if each.task is not None]
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
            for connection in list(self.connections):
                connection.transport.abort()
            await self._last_gone
        await self._listening.wait_closed()

    def take(self, connection: ClientConnection) -> bool:
        """A client has connected. Returns whether its requests will be answered."""
        if len(self.connections) >= self.max_connections and not self._makes_way():
            self.counts.refused += 1
            if len(self.turned_away) >= MAX_TURNED_AWAY:
                connection.transport.abort()
            self.turned_away.add(connection)
            return False
        self.connections.add(connection)
        self.idle[connection] = None
        return True

    def lost(self, connection: ClientConnection) -> None:
        """The connection has ended."""
        self.turned_away.discard(connection)
        self.connections.discard(connection)
        self.idle.pop(connection, None)
        if self._last_gone is not None and not self.connections and not self._last_gone.done():
            self._last_gone.set_result(None)

    def sweep(self, now: float) -> None:
        """End the connections on which nothing has moved for too long; `now` as the loop tells it.

        A stall is seen from sweep to sweep, so call it often.
        """
        for connection in list(self.connections):
            stalled_s = connection.stalled_s(now)
            if stalled_s >= self.write_timeout_s:
                self.counts.stalled += 1
                log.info(
                    "a client at %s is cut off: for %.0f s it has taken nothing of the %d bytes "
                    "that wait for it",
                    connection.remote,
                    stalled_s,
                    connection.unsent_bytes,
                )
                connection.transport.abort()
            elif connection.task is None and connection.heard_at < now - IDLE_S:
                connection.transport.close()  # what it still reads it gets

    def _makes_way(self) -> bool:
        """End an idle connection for a new one. Returns whether there was one."""
        latest = asyncio.get_running_loop().time() - MAKES_WAY_S
        for connection in islice(self.idle, MOST_LOOKED_AT):
            if connection.heard_at > latest:
                return False
            if not connection.unsent_bytes:
                connection.transport.abort()
                self.connections.discard(connection)
                del self.idle[connection]
                return True
        return False

    def _sweep_on(self) -> None:
        loop = asyncio.get_running_loop()
        self._sweeping = loop.call_later(SWEEP_S, self._sweep_on)
        self.sweep(loop.time())
