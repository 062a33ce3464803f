"""The processes of one gateway: each listens to the others on its own Unix socket.

A client's request reaches one process (`SO_REUSEPORT`). For requests that concern all processes, it
asks the others over sockets in a directory that only the gateway's user can enter.
"""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import NamedTuple

import aiohttp

from cluster.protocol import RequestError

ANSWER_TIMEOUT_S = 5.0


class SiblingAnswer(NamedTuple):
    """The response of the process `number`."""

    number: int
    status: int
    body: bytes


class Siblings:
    """This process among those of its gateway, and a client of the others.

    directory   directory of the sockets
    number      number of this process, from 0 to `count` - 1
    """

    def __init__(self, directory: Path, number: int, count: int) -> None:
        self.directory = directory
        self.number = number
        self.count = count
        self._sessions: dict[int, aiohttp.ClientSession] = {}

    @property
    def socket_path(self) -> Path:
        """Where this process listens for the others."""
        return self.directory / str(self.number)

    async def ask(
        self,
        number: int,
        method: str,
        path: str,
        body: bytes = b"",
        timeout_s: float = ANSWER_TIMEOUT_S,
    ) -> SiblingAnswer:
        """Ask one other process. Raises RequestError (503) if it does not respond."""
        if number not in self._sessions:
            connector = aiohttp.UnixConnector(str(self.directory / str(number)))
            self._sessions[number] = aiohttp.ClientSession(connector=connector)
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        url = f"http://sibling{path}"
        try:
            request = self._sessions[number].request(method, url, data=body, timeout=timeout)
            async with request as answer:
                return SiblingAnswer(number, answer.status, await answer.read())
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            reason = str(error) or f"no response within {timeout_s:g} s"
            raise RequestError(
                f"process {number} of this gateway does not answer: {reason}",
                status=503,
                type="server_error",
                code="process_unreachable",
            ) from error

    async def ask_all(
        self, method: str, path: str, body: bytes = b"", timeout_s: float = ANSWER_TIMEOUT_S
    ) -> list[SiblingAnswer]:
        """Ask all other processes at once. Raises RequestError (503) if one does not respond."""
        others = [number for number in range(self.count) if number != self.number]
        return await asyncio.gather(
            *(self.ask(number, method, path, body, timeout_s) for number in others)
        )

    async def close(self) -> None:
        """Close the connections, and remove the socket; the last process removes the directory."""
        for session in self._sessions.values():
            await session.close()
        self.socket_path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self.directory.rmdir()
