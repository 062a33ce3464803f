"""HTTP/1.1 for clients: a small server on llhttp's parser (`httptools`).

A handler starts when the whole body is in memory, and returns a whole response or streams it. If a
client disconnects, its handler is cancelled. If it reads slowly, its responses wait; if it stops
reading, it is disconnected. Requests of one connection are handled in order. TLS and HTTP/2 are for
a proxy.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from itertools import islice
from pathlib import Path

from router.counts import ConnectionCounts
from router.http_connection import ClientConnection, Service

log = logging.getLogger(__name__)

IDLE_S = 75.0
"""Close a connection after this time without progress: no response ended, no request began, no
headers were completed and no byte of a body arrived. So headers cannot trickle in for ever."""

REPLACEABLE_S = 5.0
"""At the connection limit, a connection that has been idle for this time is closed for a new one.
So idle connections cannot exhaust the limit, and health checks get through."""

MOST_LOOKED_AT = 16
"""Connections that are considered for closing, the longest idle first."""

MAX_TURNED_AWAY = 256
"""Connections beyond the limit that get the response `full` at a time; others are cut at once."""

LAST_WORDS_S = 1.0
"""Time for clients to read the errors with which a stopping server ends their requests."""

SWEEP_S = 5.0
BACKLOG = 1024


class HttpServer:
    """Listens, and passes requests to the service.

    max_connections  most open connections; if no idle one can be closed, new ones get `full`
    write_timeout_s  disconnect a client that receives nothing of its response for this time
    max_held_bytes   most bytes of the bodies of all requests that are not answered yet
    counts           counts of connections that were refused or cut
    connections      open connections, without those turned away
    idle             connections without a request to respond to, in the order of `heard_at`
    turned_away      connections beyond the limit that have not ended yet
    held_bytes       bytes of these bodies now
    closing          the server is stopping: connections are closed after their next response
    """

    def __init__(
        self,
        service: Service,
        *,
        max_connections: int,
        write_timeout_s: float,
        max_held_bytes: int,
        counts: ConnectionCounts,
    ) -> None:
        self.counts = counts
        self.connections: set[ClientConnection] = set()
        self.idle: OrderedDict[ClientConnection, None] = OrderedDict()
        self.turned_away: set[ClientConnection] = set()
        self.held_bytes = 0
        self.closing = self._stopped = False
        self._service = service
        self._max_connections = max_connections
        self._write_timeout_s = write_timeout_s
        self._max_held_bytes = max_held_bytes
        self._last_gone: asyncio.Future[None] | None = None
        self._listening: asyncio.Server
        self._sweeping: asyncio.TimerHandle

    async def start(self, host: str, port: int, *, shared: bool = False) -> tuple[str, int]:
        """Listen; returns the address. Raises OSError if the port is in use.

        `shared`: other processes listen on the same port (SO_REUSEPORT)
        """
        loop = asyncio.get_running_loop()
        self._listening = await loop.create_server(
            self._connection, host, port, backlog=BACKLOG, reuse_port=shared
        )
        self._sweeping = loop.call_later(SWEEP_S, self._sweep_on)
        name = self._listening.sockets[0].getsockname()
        return str(name[0]), int(name[1])

    async def start_unix(self, path: Path) -> None:
        """Listen on a Unix socket."""
        loop = asyncio.get_running_loop()
        self._listening = await loop.create_unix_server(self._connection, str(path))
        self._sweeping = loop.call_later(SWEEP_S, self._sweep_on)

    async def stop(self, drain_s: float, notice_s: float = 0.0) -> None:
        """Serve for `notice_s` as before, with each connection's last response. Then accept no new
        requests, give responses `drain_s` to end and to be read, and end the rest with an error.

        If it is cancelled, the remaining connections are cut at once.
        """
        self.closing = True
        try:
            await asyncio.sleep(notice_s)
            self._close_listener()
            for connection in list(self.connections):
                if not connection.has_request:
                    connection.transport.close()
            await self._until_gone(drain_s)
            for connection in list(self.connections):
                connection.cut_off()
            await self._until_gone(LAST_WORDS_S)
        finally:
            self._close_listener()
            late = [each.task for each in self.connections if each.task is not None]
            for connection in list(self.connections):
                connection.transport.abort()
            await self._until_gone(None)
            await asyncio.gather(*late, return_exceptions=True)
            await self._listening.wait_closed()

    def _close_listener(self) -> None:
        self._stopped = True
        self._listening.close()
        self._sweeping.cancel()
        for connection in list(self.turned_away):
            connection.transport.abort()

    async def _until_gone(self, timeout_s: float | None) -> None:
        """Wait for the last connection to end."""
        if self.connections:
            self._last_gone = asyncio.get_running_loop().create_future()
            await asyncio.wait([self._last_gone], timeout=timeout_s)

    # Called by connections

    def opened(self, connection: ClientConnection) -> bool:
        """Returns whether the connection's requests will be served."""
        if self._stopped:  # it was accepted just before
            connection.transport.abort()
            return False
        if len(self.connections) >= self._max_connections and not self._replace_idle():
            self.counts.refused += 1
            if len(self.turned_away) >= MAX_TURNED_AWAY:
                connection.transport.abort()
            self.turned_away.add(connection)
            return False
        self.connections.add(connection)
        self.idle[connection] = None
        return True

    def busy(self, connection: ClientConnection) -> None:
        self.idle.pop(connection, None)

    def idle_since_now(self, connection: ClientConnection) -> None:
        self.idle[connection] = None

    def heard(self, connection: ClientConnection) -> None:
        if connection in self.idle:
            self.idle.move_to_end(connection)

    def lost(self, connection: ClientConnection) -> None:
        self.turned_away.discard(connection)
        self.connections.discard(connection)
        self.idle.pop(connection, None)
        if self._last_gone is not None and not self.connections and not self._last_gone.done():
            self._last_gone.set_result(None)

    def hold(self, count: int) -> bool:
        if count and self.held_bytes + count > self._max_held_bytes:
            return False
        self.held_bytes += count
        return True

    def release(self, count: int) -> None:
        self.held_bytes -= count

    def sweep(self, now: float) -> None:
        """Close connections without progress; `now` is the loop's time.

        A stall is measured from sweep to sweep, so call it often.
        """
        for connection in list(self.connections):
            stalled_s = connection.stalled_s(now)
            if stalled_s >= self._write_timeout_s:
                self.counts.stalled += 1
                log.info(
                    "disconnected the client %s: for %.0f s it received none of the %d bytes "
                    "of its response that are pending",
                    connection.remote,
                    stalled_s,
                    connection.unsent_bytes,
                )
                connection.transport.abort()
            elif connection.task is None and connection.heard_at < now - IDLE_S:
                connection.transport.close()  # once pending bytes are sent

    def _connection(self) -> ClientConnection:
        return ClientConnection(self._service, self)

    def _replace_idle(self) -> bool:
        """Close an idle connection for a new one. Returns whether there was one."""
        latest = asyncio.get_running_loop().time() - REPLACEABLE_S
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
