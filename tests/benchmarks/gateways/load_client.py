"""A closed-loop load client, one process for all runs so that it is the same for every target.

    python -m tests.benchmarks.gateways.load_client < orders > results

Each line in is an `Order` (JSON), each line out a `Result`. Each connection sends its next
request when the last answer is complete: a closed loop, which measures a gateway's own cost and
no queueing. It speaks HTTP by hand to take little of the machine that it shares.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections.abc import Iterator
from functools import cache
from itertools import accumulate
from typing import cast

import msgspec
import uvloop

from tests.benchmarks.gateways.mock_worker import EVENTS, MODEL
from tests.real_tokenizer import smollm2

SHORT_CHARACTERS = 1_000
LONG_CHARACTERS = 32_000
TURNS = 16
"""A conversation goes on so often; half of it before and half of it after 32k characters."""

END_OF_STREAM = b"0\r\n\r\n"
END_OF_WHOLE = b"data: [DONE]\n\n"
"""Mock workers send the same body for both."""


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """One run.

    ports         targets; connections take them in turn
    case          "short", "turn" or "new"
    seed          same seed, same prompts
    stream        whether answers are streams
    pids          the target's processes, whose CPU time is measured
    """

    ports: list[int]
    case: str
    concurrency: int
    seconds: float
    seed: int
    stream: bool = True
    pids: list[int] = []


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """`ttft_s` of each request; how long the whole took, and the target's CPU time in it."""

    ttft_s: list[float]
    wall_s: float
    cpu_s: float


@cache
def vocabulary() -> tuple[list[str], list[float]]:
    """Some 18,000 words and how often they come, as Zipf's law has it (cumulative weights).

    They are the tokenizer's words of three letters or more in its order, which is about that of
    their frequency, and, rarer than these, two of them written as one.
    """
    tree = json.loads(smollm2().tokenizer_json)
    tokens = sorted(tree["model"]["vocab"], key=tree["model"]["vocab"].__getitem__)
    plain = [token[1:] for token in tokens if token[0] == "Ġ" and token[3:].isascii()]
    single = [word for word in plain if word.isalpha() and len(word) > 2][:12_000]
    rng = random.Random("vocabulary")
    compound = [rng.choice(single) + rng.choice(single) for _ in range(6_000)]
    every = single + compound
    return every, list(accumulate(1 / (rank + 2) for rank in range(len(every))))


def words(rng: random.Random, characters: int) -> str:
    """English-like text of so many characters, with punctuation, numbers and paragraphs."""
    every, weights = vocabulary()
    chosen = rng.choices(every, cum_weights=weights, k=characters // 4 + 20)
    for place in range(7, len(chosen), 9):
        chosen[place] += rng.choice([",", ".", ":", "?", ".\n\n"])
    for place in range(20, len(chosen), 40):
        chosen[place] = str(rng.randrange(10_000))
    return " ".join(chosen)[:characters]


def body(messages: list[dict[str, str]], stream: bool) -> bytes:
    """A whole HTTP request."""
    content = msgspec.json.encode(
        {"model": MODEL, "messages": messages, "stream": stream, "max_tokens": EVENTS}
    )
    return (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
        b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(content)
    ) + content


def short_prompts(rng: random.Random, stream: bool = True) -> Iterator[bytes]:
    """Half a system prompt that all share, half a question that nobody asked before."""
    half = SHORT_CHARACTERS // 2
    system = {"role": "system", "content": words(random.Random("system"), half)}
    while True:
        yield body([system, {"role": "user", "content": words(rng, half)}], stream)


def new_prompts(rng: random.Random, stream: bool = True) -> Iterator[bytes]:
    """32k characters that have nothing in common with any other prompt."""
    while True:
        yield body([{"role": "user", "content": words(rng, LONG_CHARACTERS)}], stream)


def conversation(rng: random.Random, stream: bool = True) -> Iterator[bytes]:
    """A conversation's requests, each with an answer and a question more: 1k characters."""
    messages = []
    for number in range((LONG_CHARACTERS - 500 * TURNS) // 500 - 1):
        role = "assistant" if number % 2 else "user"
        messages.append({"role": role, "content": words(rng, 500)})
    yield body(messages, stream)
    for _ in range(TURNS):
        messages.append({"role": "assistant", "content": words(rng, 500)})
        messages.append({"role": "user", "content": words(rng, 500)})
        yield body(messages, stream)


class Connection(asyncio.Protocol):
    """One connection. `ask` sends a request and waits for the whole answer."""

    def __init__(self, end: bytes) -> None:
        self._end_of_answer = end
        self._transport: asyncio.Transport
        self._answered: asyncio.Future[float]
        self._parts: list[bytes] = []
        self._sent_at = self._first_at = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, error: Exception | None) -> None:
        if not self._answered.done():
            self._answered.set_exception(RuntimeError(f"the connection is lost: {error}"))

    def ask(self, request: bytes) -> asyncio.Future[float]:
        """Seconds from sending to the first event."""
        self._answered = asyncio.get_running_loop().create_future()
        self._parts.clear()
        self._first_at = 0.0
        self._sent_at = time.perf_counter()
        self._transport.write(request)
        return self._answered

    def data_received(self, data: bytes) -> None:
        self._parts.append(data)
        if not self._first_at and b"data: " in data:
            self._first_at = time.perf_counter()
        if data.endswith(self._end_of_answer):
            self._end()

    def _end(self) -> None:
        answer = b"".join(self._parts)
        if not answer.startswith(b"HTTP/1.1 200 ") or answer.count(b"data: ") != EVENTS + 1:
            self._answered.set_exception(RuntimeError(f"not the expected answer: {answer!r}"))
        else:
            self._answered.set_result(self._first_at - self._sent_at)

    def close(self) -> None:
        self._transport.close()


def cpu_time_s(pids: list[int]) -> float:
    """CPU time of processes, all threads, since their start (clock_getcpuclockid(3))."""
    return sum(time.clock_gettime(~pid << 3 | 2) for pid in pids)


async def measure(order: Order) -> Result:
    """Run an order. Conversations' first requests are not counted."""
    loop = asyncio.get_running_loop()
    connections = []
    for number in range(order.concurrency):
        port = order.ports[number % len(order.ports)]
        _, connection = await loop.create_connection(
            lambda: Connection(END_OF_STREAM if order.stream else END_OF_WHOLE), "127.0.0.1", port
        )
        connections.append(connection)
    rngs = [random.Random(f"{order.seed} {number}") for number in range(order.concurrency)]
    queues = [_requests(order.case, rng, order) for rng in rngs]
    if order.case == "turn":
        for connection, queue in zip(connections, queues, strict=True):
            for request in queue[:: TURNS + 1]:
                await connection.ask(request)
            del queue[:: TURNS + 1]
    ttft_s: list[float] = []
    end_at = time.perf_counter() + order.seconds

    async def drive(connection: Connection, queue: list[bytes]) -> None:
        for request in queue:
            if time.perf_counter() >= end_at:
                return
            ttft_s.append(await connection.ask(request))

    began, cpu = time.perf_counter(), cpu_time_s(order.pids)
    await asyncio.gather(*map(drive, connections, queues))
    wall_s, cpu_s = time.perf_counter() - began, cpu_time_s(order.pids) - cpu
    for connection in connections:
        connection.close()
    return Result(ttft_s=ttft_s, wall_s=wall_s, cpu_s=cpu_s)


def _requests(case: str, rng: random.Random, order: Order) -> list[bytes]:
    """Made beforehand, mostly more than can be sent in the time."""
    if case == "turn":
        conversations = max(1, 4 // order.concurrency)
        return [
            request for _ in range(conversations) for request in conversation(rng, order.stream)
        ]
    prompts = (short_prompts if case == "short" else new_prompts)(rng, order.stream)
    count = 4_000 if case == "short" else 100
    return [next(prompts) for _ in range(int(count * order.seconds) // order.concurrency)]


async def main() -> None:
    """Until there are no more orders."""
    for line in sys.stdin:
        result = await measure(msgspec.json.decode(line, type=Order))
        print(msgspec.json.encode(result).decode(), flush=True)


if __name__ == "__main__":
    uvloop.run(main())
