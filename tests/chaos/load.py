"""An open-loop client that keeps what it got, and when: nothing that it sends waits for answers."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import aiohttp
import msgspec

from loadgen.sse import EventParser

CONNECT_TIMEOUT_S = 5.0
STEMS = 6
"""Prompts share so many beginnings, so that routing by prefix has something to do."""
WHOLE_EVERY = 7
"""Each seventh request asks for a whole answer instead of a stream."""
SEEDED_EVERY = 3
"""Each third request samples with a seed; the others are greedy."""
SERIAL_DIGITS = 8

serials = itertools.count(1)
"""Of this process: none comes twice."""

PATHS = {"chat": "/v1/chat/completions", "completion": "/v1/completions"}


@dataclass(frozen=True)
class Ask:
    """One request that has one right answer: greedy, or sampled with a seed.

    serial   digits in its prompt. To an emulated worker, whose answer follows from the prompt's
             length and last token, another serial is a new prompt with the same answer.
    """

    number: int
    kind: str
    fields: dict[str, Any]
    text: str
    serial: int = 0

    @property
    def body(self) -> dict[str, Any]:
        """What is sent."""
        prompt = self.text.format(serial=f"{self.serial:0{SERIAL_DIGITS}}")
        if self.kind == "chat":
            return {**self.fields, "messages": [{"role": "user", "content": prompt}]}
        return {**self.fields, "prompt": prompt}

    @property
    def stream(self) -> bool:
        """Whether the answer is a stream of events."""
        return bool(self.fields["stream"])


@dataclass
class Outcome:
    """One request and what came of it. Times are seconds on the event loop's clock.

    status       HTTP status; 0 without one
    finished     the answer is complete: a whole body, or a stream with its last event
    error        what the client was told, or what went wrong on the way
    silence_s    longest time without a byte, from sending on
    first_s      from sending to the first byte of the body
    """

    ask: int
    stream: bool
    sent_at: float
    gateway: int = 0
    status: int = 0
    finished: bool = False
    error: str = ""
    text: str = ""
    completion_tokens: int | None = None
    retry_after: str = ""
    worker: str = ""
    silence_s: float = 0.0
    first_s: float | None = None
    elapsed_s: float = 0.0
    _heard_at: float = field(default=0.0, repr=False)

    def heard(self, now: float) -> None:
        """Bytes have come, or the answer has ended."""
        self.silence_s = max(self.silence_s, now - (self._heard_at or self.sent_at))
        self._heard_at = now
        self.elapsed_s = now - self.sent_at


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    message: _Delta | None = None
    text: str | None = None
    finish_reason: str | None = None

    @property
    def content(self) -> str:
        part = self.delta or self.message
        return (part.content if part is not None else self.text) or ""


class _Usage(msgspec.Struct):
    completion_tokens: int | None = None


class _Error(msgspec.Struct):
    message: str = ""


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = msgspec.field(default_factory=list)
    usage: _Usage | None = None
    error: _Error | None = None


def asks(
    model: str,
    count: int,
    tokens: tuple[int, int],
    *,
    first: int = 0,
    stream: bool | None = None,
) -> list[Ask]:
    """`count` requests, chats and completions, with answers of `tokens` (least, most).

    They are numbered from `first`; the same arguments give the same requests. `stream` None mixes
    streams with whole answers.
    """
    rng = random.Random(f"{first} {count} {tokens}")
    found = []
    for number in range(first, first + count):
        stem = f"You are assistant number {number % STEMS}. Answer in a few words. " * 6
        text = f"{stem}Question {{serial}} of {number}: " + "why? " * rng.randint(1, 30)
        streams = number % WHOLE_EVERY != WHOLE_EVERY - 1 if stream is None else stream
        fields: dict[str, Any] = {
            "model": model,
            "max_tokens": rng.randint(*tokens),
            "ignore_eos": True,
            "temperature": 0,
            "stream": streams,
        }
        if streams:
            fields["stream_options"] = {"include_usage": True}
        if number % SEEDED_EVERY == SEEDED_EVERY - 1:
            fields |= {"temperature": 0.8, "seed": number}
        found.append(Ask(number, "chat" if number % 2 else "completion", fields, text))
    return found


class Sending(NamedTuple):
    """A request that is being sent."""

    outcome: Outcome
    task: asyncio.Task[None]


class Client:
    """Sends requests to gateways as a load balancer would: in turn, past those that do not listen.

    urls   base URLs
    """

    def __init__(self, urls: Sequence[str]) -> None:
        self._urls = list(urls)
        self._session: aiohttp.ClientSession
        self._next = 0

    async def __aenter__(self) -> Client:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
            read_bufsize=1 << 20,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def send(self, ask: Ask, gateway: int | None = None) -> Outcome:
        """Send one request and read its answer to the end.

        `gateway` is where to send it first; None takes them in turn.
        """
        outcome = self._outcome(ask, gateway)
        await self._run(ask, outcome)
        return outcome

    def begin(self, ask: Ask, gateway: int | None = None) -> Sending:
        """The same as a task of its own, whose outcome can be looked at when it is cancelled."""
        outcome = self._outcome(ask, gateway)
        return Sending(outcome, asyncio.create_task(self._run(ask, outcome)))

    def _outcome(self, ask: Ask, gateway: int | None) -> Outcome:
        if gateway is None:
            gateway = self._next
            self._next = (self._next + 1) % len(self._urls)
        return Outcome(ask.number, ask.stream, asyncio.get_running_loop().time(), gateway)

    async def _run(self, ask: Ask, outcome: Outcome) -> None:
        first = outcome.gateway
        try:
            for step in range(len(self._urls)):
                outcome.gateway, outcome.error = (first + step) % len(self._urls), ""
                try:
                    await self._post(ask, outcome)
                    break
                except aiohttp.ClientConnectorError as error:
                    outcome.error = f"no connection: {error}"
        except asyncio.CancelledError:
            outcome.error = "no end"
            raise
        except (aiohttp.ClientError, OSError, msgspec.MsgspecError) as error:
            outcome.error = f"{type(error).__name__}: {error}"
        finally:
            outcome.heard(asyncio.get_running_loop().time())

    async def _post(self, ask: Ask, outcome: Outcome) -> None:
        url = self._urls[outcome.gateway] + PATHS[ask.kind]
        async with self._session.post(url, json=ask.body) as answer:
            outcome.status = answer.status
            outcome.retry_after = answer.headers.get("Retry-After", "")
            outcome.worker = answer.headers.get("x-stemroute-worker", "")
            if answer.status != 200 or not ask.stream:
                body = await answer.read()
                if answer.status == 200:
                    outcome.first_s = asyncio.get_running_loop().time() - outcome.sent_at
                    _take(outcome, body)
                    outcome.finished = True
                else:
                    outcome.error = body.decode(errors="replace")[:300]
                return
            await self._read_stream(answer, outcome)

    async def _read_stream(self, answer: aiohttp.ClientResponse, outcome: Outcome) -> None:
        clock, parser = asyncio.get_running_loop().time, EventParser()
        async for piece in answer.content.iter_any():
            now = clock()
            if outcome.first_s is None:
                outcome.first_s = now - outcome.sent_at
            outcome.heard(now)
            for data in parser.feed(piece):
                if data == b"[DONE]":
                    outcome.finished = not outcome.error
                else:
                    _take(outcome, data)
        if not outcome.finished and not outcome.error:
            outcome.error = "the stream ended early, without an error event"


def _take(outcome: Outcome, data: bytes) -> None:
    chunk = msgspec.json.decode(data, type=_Chunk)
    if chunk.error is not None:
        outcome.error = chunk.error.message or "an error event without a message"
    outcome.text += "".join(choice.content for choice in chunk.choices)
    if chunk.usage is not None:
        outcome.completion_tokens = chunk.usage.completion_tokens


async def replay(
    client: Client,
    chosen: Sequence[Ask],
    *,
    rate: float,
    seconds: float,
    patience_s: float,
    fresh: bool = False,
) -> list[Outcome]:
    """Send requests for `seconds` at `rate` per second (Poisson), whatever comes of the earlier.

    `fresh` gives each a serial of its own. What has not ended `patience_s` after the last one was
    sent is cut off, and unfinished.
    """
    rng, loop = random.Random(0), asyncio.get_running_loop()
    sent: list[Sending] = []
    begin = due = loop.time()
    try:
        while (due := due + rng.expovariate(rate)) < begin + seconds:
            await asyncio.sleep(max(0.0, due - loop.time()))
            ask = chosen[rng.randrange(len(chosen))]
            if fresh:
                ask = replace(ask, serial=next(serials))
            sent.append(client.begin(ask))
        return await gather(sent, patience_s)
    finally:
        await _cut_off(sent)


async def gather(sent: Sequence[Sending], patience_s: float) -> list[Outcome]:
    """The outcomes of all; those that have not ended after `patience_s` are cut off."""
    if sent:
        await asyncio.wait([each.task for each in sent], timeout=patience_s)
    await _cut_off(sent)
    return [each.outcome for each in sent]


async def _cut_off(sent: Sequence[Sending]) -> None:
    for each in sent:
        each.task.cancel()
    await asyncio.gather(*(each.task for each in sent), return_exceptions=True)
