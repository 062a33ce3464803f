"""Calls to workers other than `/generate`: one question, one JSON answer."""

from __future__ import annotations

from typing import TypeVar

import aiohttp
import msgspec

from cluster.protocol import ErrorAnswer

_Answer = TypeVar("_Answer", bound=msgspec.Struct)


class CallFailed(Exception):
    """A worker did not answer or refused; the text is the reason.

    status   of its response, 0 without one
    """

    def __init__(self, reason: str, status: int = 0) -> None:
        super().__init__(reason)
        self.status = status


class WorkerCalls:
    """Asks workers over the gateway's session, which sends the pool token.

    connect_timeout_s   for a worker to accept a connection
    """

    def __init__(self, session: aiohttp.ClientSession, connect_timeout_s: float) -> None:
        self._session = session
        self._connect_timeout_s = connect_timeout_s

    async def ask(
        self,
        method: str,
        url: str,
        kind: type[_Answer],
        timeout_s: float,
        body: object = None,
    ) -> _Answer:
        """The answer, decoded as `kind`. `body` is sent as JSON unless it is None.

        Raises CallFailed.
        """
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=self._connect_timeout_s)
        try:
            async with self._session.request(method, url, json=body, timeout=timeout) as answer:
                status, content = answer.status, await answer.read()
            if status == 200:
                return msgspec.json.decode(content, type=kind)
        except TimeoutError as error:
            reason = str(error) or f"no response within {timeout_s:g} s"
            raise CallFailed(reason) from error
        except (aiohttp.ClientError, OSError, ValueError, msgspec.MsgspecError) as error:
            raise CallFailed(str(error) or repr(error)) from error
        try:
            reason = msgspec.json.decode(content, type=ErrorAnswer).error.message
        except msgspec.MsgspecError:
            reason = f"status {status}"
        raise CallFailed(reason, status)
