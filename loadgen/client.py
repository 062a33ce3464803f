"""The client: sends each request at its intended time, whatever the others do, and times it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import aiohttp
import msgspec

from cluster.protocol import (
    HEADER_EXPLAIN,
    HEADER_HIT_TOKENS,
    HEADER_POLICY,
    HEADER_PREDICTED_HIT_TOKENS,
    HEADER_REQUEST_ID,
    HEADER_WORKER,
)
from loadgen.answer import Answer, error_message
from loadgen.outcomes import Outcome
from loadgen.requests import PATHS, Request
from loadgen.sse import EventParser

CONNECT_TIMEOUT_S = 10.0
ERROR_TEXT_CHARACTERS = 300


class Client:
    """Sends requests to one gateway.

    url          base URL, such as "http://127.0.0.1:8000"
    api_key      bearer token, "" for none
    timeout_s    a request that has not ended by then counts as unfinished
    explain      have the gateway keep its decisions (`loadgen.admin.Admin.decision`)
    """

    def __init__(
        self, url: str, api_key: str = "", timeout_s: float = 300.0, *, explain: bool = False
    ) -> None:
        self._url = url.rstrip("/")
        self._timeout_s = timeout_s
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        if explain:
            self._headers[HEADER_EXPLAIN] = "1"

    async def replay(
        self,
        requests: Sequence[Request],
        arm: str,
        on_end: Callable[[Outcome], None] = lambda outcome: None,
        *,
        repeat: int = 0,
        begin: float | None = None,
        max_concurrency: int | None = None,
    ) -> list[Outcome]:
        """Send every request at its intended time; outcomes in the order of the requests.

        Open loop: nothing waits for an answer. With `max_concurrency` it is a closed loop: a
        request also waits until fewer than so many are running, and only then counts as intended.
        `begin` on the loop's clock is second 0; None is now. Ends at most `timeout_s` after the
        last request was sent. When cancelled, it closes what is running first.
        """
        loop = asyncio.get_running_loop()
        outcomes = [_blank(request, arm, repeat) for request in requests]
        slots = asyncio.Semaphore(max_concurrency) if max_concurrency is not None else None

        def release(_: asyncio.Task[None]) -> None:
            assert slots is not None
            slots.release()

        async with self._session() as session, asyncio.TaskGroup() as tasks:
            begin = loop.time() if begin is None else begin
            for request, outcome in zip(requests, outcomes, strict=True):
                delay = begin + request.intended_at_s - loop.time()
                # Even a late request yields once, so that answers are read between sends.
                await asyncio.sleep(max(0.0, delay))
                if slots is not None:
                    await slots.acquire()
                    outcome.intended_s = loop.time() - begin
                task = tasks.create_task(self._send(session, request, outcome, begin, on_end))
                if slots is not None:
                    task.add_done_callback(release)
        return outcomes

    def _session(self) -> aiohttp.ClientSession:
        # aiohttp and asyncio set TCP_NODELAY on every connection. No limit on connections:
        # a request that waits for one would be the client's lag.
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(
                total=self._timeout_s, sock_connect=min(CONNECT_TIMEOUT_S, self._timeout_s)
            ),
            headers=self._headers,
            read_bufsize=1 << 20,
        )

    async def _send(
        self,
        session: aiohttp.ClientSession,
        request: Request,
        outcome: Outcome,
        begin: float,
        on_end: Callable[[Outcome], None],
    ) -> None:
        loop = asyncio.get_running_loop()
        answer = Answer(outcome)
        outcome.sent_s = loop.time() - begin
        try:
            async with session.post(
                self._url + PATHS[request.kind], data=bytes(request.body)
            ) as response:
                _read_headers(outcome, response)
                if response.status != 200:
                    outcome.error = _refusal(response.status, await response.read())
                else:
                    parser = EventParser()
                    async for chunk in response.content.iter_any():
                        now_s = loop.time() - begin
                        for data in parser.feed(chunk):
                            answer.take(data, now_s)
            answer.end(loop.time() - begin)
        except TimeoutError:
            _cut(answer, loop.time() - begin, f"not finished after {self._timeout_s:g} s")
        except aiohttp.ClientPayloadError as error:
            _cut(answer, loop.time() - begin, f"the connection broke: {error}")
        except (aiohttp.ClientError, OSError) as error:
            outcome.error = f"{type(error).__name__}: {error}"
            answer.end(loop.time() - begin)
        except msgspec.DecodeError as error:
            outcome.error = f"the stream holds an event that is no chunk: {error}"
            answer.end(loop.time() - begin)
        on_end(outcome)


def _blank(request: Request, arm: str, repeat: int) -> Outcome:
    return Outcome(
        arm=arm,
        repeat=repeat,
        id=request.id,
        session=request.session,
        turn=request.turn,
        group=request.group,
        intended_s=request.intended_at_s,
    )


def _read_headers(outcome: Outcome, response: aiohttp.ClientResponse) -> None:
    outcome.http_status = response.status
    outcome.request_id = response.headers.get(HEADER_REQUEST_ID, "")
    outcome.worker = response.headers.get(HEADER_WORKER, "")
    outcome.policy = response.headers.get(HEADER_POLICY, "")
    outcome.predicted_hit_tokens = _integer(response.headers.get(HEADER_PREDICTED_HIT_TOKENS))
    outcome.hit_tokens = _integer(response.headers.get(HEADER_HIT_TOKENS))


def _integer(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() else None


def _refusal(status: int, body: bytes) -> str:
    text = error_message(body) or body.decode(errors="replace")
    return f"HTTP {status}: {text[:ERROR_TEXT_CHARACTERS].strip() or 'no text'}"


def _cut(answer: Answer, now_s: float, reason: str) -> None:
    answer.end(now_s)
    if answer.outcome.status != "failed":
        answer.outcome.status = "unfinished"
        answer.outcome.error = reason
