"""How long a gateway's other clients wait while one sends the largest body that is admitted.

A gateway process, a mock worker with a context of 800,000 tokens, and three clients: one asks
`/health` all the time, one reads a stream of an event every 10 ms, one sends the body of the case
and waits for its answer. The value is the worst time of `/health` to answer, over all cases. The
stream's largest gap is shown too; where a prompt fits, the mock worker's hashing is part of it.

Each case runs several times, and its quietest run counts: what else the machine does delays a run
now and then, while what the gateway does delays every one.
"""

from __future__ import annotations

import random
import socket
import statistics
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import msgspec

from tests.benchmarks.gateways.mock_worker import MODEL
from tests.benchmarks.gateways.processes import CannotRun, Stage

NAME = "loop_stall"
BAR_MS = 50.0
ROUNDS = 5
BODY_BYTES = 8 * 2**20
CONTEXT_TOKENS = 800_000
EVENT_GAP_S = 0.01
IDLE_S = 1.0
HELLO = [{"role": "user", "content": "hello"}]


class Outcome(NamedTuple):
    """One run of a case."""

    body_mib: float
    status: int
    answer_s: float
    health_ms: float
    gap_ms: float


def chat(messages: object, **fields: object) -> bytes:
    return msgspec.json.encode({"model": MODEL, "messages": messages, "max_tokens": 1, **fields})


def completion(prompt: object) -> bytes:
    return msgspec.json.encode({"model": MODEL, "prompt": prompt, "max_tokens": 1})


def filled(make: Callable[[int], bytes], unit: int) -> bytes:
    """The largest body that `make` gives for a number of units of so many bytes."""
    return make((BODY_BYTES - 300) // unit)


def words(rng: random.Random, characters: int) -> str:
    vocabulary = ["".join(rng.choices("etaoinshrdlu", k=rng.randrange(2, 9))) for _ in range(5_000)]
    return " ".join(rng.choices(vocabulary, k=characters // 5))[:characters]


def nested(opening: str, inside: str, closing: str, depth: int) -> bytes:
    deep = opening * depth + inside + closing * depth
    return f'{{"model": "{MODEL}", "messages": [], "tools": [{{"a": {deep}}}]}}'.encode()


def cases(rng: random.Random) -> Iterator[tuple[str, bytes]]:
    """Bodies that no earlier call gave, where that makes a difference."""
    message = {"role": "user", "content": "hello"}
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    yield "200,000 small messages", filled(lambda n: chat([message] * n), 40)
    yield "10,000 small messages", chat([message] * 10_000)
    yield "10,000 messages of 700 bytes", chat([{**message, "content": words(rng, 700)}] * 10_000)
    yield "a text", completion(words(rng, BODY_BYTES - 300))
    yield "a text that fits the context", completion(words(rng, 1_500_000))
    letters = "abcdefghijklm"
    yield "a text without spaces", completion("".join(rng.choices(letters, k=8_000_000)))
    yield "a word of one letter", completion(rng.choice(letters) * (BODY_BYTES - 300))
    yield "digits", completion("".join(rng.choices("0123456789", k=8_000_000)))
    yield "white space", completion(" \n" * ((BODY_BYTES - 300) // 3))
    yield "emoji", completion("\U0001f600" * ((BODY_BYTES - 300) // 4))
    yield "token ids that fit", completion([rng.randrange(20_000)] * 790_000)
    yield "arrays, too deep", nested("[", "", "]", (BODY_BYTES - 200) // 2)
    yield "objects, 1,500 deep", nested('{"a":', "1", "}", 1_500)
    yield "many tools", filled(lambda n: chat(HELLO, tools=[tool] * n), 70)
    yield "19,000 tools", chat(HELLO, tools=[tool] * 19_000)
    yield "many empty arrays", filled(lambda n: chat(HELLO, tools=[{"a": [[]] * n}]), 3)
    yield "many strings", filled(lambda n: chat(HELLO, tools=[{"a": [""] * n}]), 3)
    yield "180,000 strings", chat(HELLO, tools=[{"a": [""] * 180_000}])


def run() -> int:
    """Exit code: 0 met, 1 missed, 2 could not run."""
    try:
        with Stage("") as stage:
            stage.start_workers(1, str(CONTEXT_TOKENS), str(EVENT_GAP_S))
            worst_ms = measure(stage.start_ours().port)
    except CannotRun as error:
        print(f"{NAME}: could not run: {error}", file=sys.stderr)
        return 2
    print(f"{NAME}: {worst_ms:.1f} ms (bar {BAR_MS:g})")
    return int(worst_ms > BAR_MS)


def measure(port: int) -> float:
    """Worst time in ms that `/health` takes in any case."""
    post(port, "/v1/chat/completions", chat(HELLO))  # the gateway fetches the tokenizer
    with watching(port) as watched:
        time.sleep(IDLE_S)  # the period that is measured, not a wait
    print(f"{'idle':30} /health {watched.health_ms:6.1f} ms, stream gap {watched.gap_ms:6.1f} ms")
    outcomes: dict[str, list[Outcome]] = defaultdict(list)
    rng = random.Random(1)
    for _ in range(ROUNDS):
        for name, body in cases(rng):
            outcomes[name].append(outcome(port, body))
    for name, each in outcomes.items():
        quietest = min(each, key=lambda one: one.health_ms)
        answer_ms = statistics.median(one.answer_s for one in each) * 1e3
        print(
            f"{name:30} /health {quietest.health_ms:6.1f} ms, stream gap "
            f"{min(one.gap_ms for one in each):6.1f} ms; {quietest.body_mib:.1f} MiB answered "
            f"{quietest.status} after {answer_ms:.0f} ms"
        )
    return max(min(one.health_ms for one in each) for each in outcomes.values())


def outcome(port: int, body: bytes) -> Outcome:
    """Send a body while the others are watched."""
    path = "/v1/completions" if b'"prompt"' in body[:60] else "/v1/chat/completions"
    with watching(port) as watched:
        began = time.perf_counter()
        status = post(port, path, body)
        took_s = time.perf_counter() - began
    return Outcome(len(body) / 2**20, status, took_s, watched.health_ms, watched.gap_ms)


class Watched:
    """The worst that the other two clients saw."""

    def __init__(self) -> None:
        self.health_ms = 0.0
        self.gap_ms = 0.0
        self.ended = threading.Event()


@contextmanager
def watching(port: int) -> Iterator[Watched]:
    """Ask `/health` and read a stream meanwhile, each in a thread."""
    watched = Watched()
    streaming = threading.Event()
    threads = [
        threading.Thread(target=ask_health, args=(port, watched)),
        threading.Thread(target=read_stream, args=(port, watched, streaming)),
    ]
    for thread in threads:
        thread.start()
    streaming.wait()
    try:
        yield watched
    finally:
        watched.ended.set()
        for thread in threads:
            thread.join()


def ask_health(port: int, watched: Watched) -> None:
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while not watched.ended.wait(0.001):
            began = time.perf_counter()
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            answer = connection.recv(65536)
            while not answer.endswith(b"}"):
                answer += connection.recv(65536)
            watched.health_ms = max(watched.health_ms, (time.perf_counter() - began) * 1e3)


def read_stream(port: int, watched: Watched, streaming: threading.Event) -> None:
    body = chat(HELLO, stream=True).replace(b'"max_tokens":1', b'"max_tokens":1000000')
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(request("/v1/chat/completions", body))
        connection.recv(65536)
        last = time.perf_counter()
        streaming.set()
        while not watched.ended.is_set():
            connection.recv(65536)
            now = time.perf_counter()
            watched.gap_ms, last = max(watched.gap_ms, (now - last) * 1e3), now


def request(path: str, body: bytes) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def post(port: int, path: str, body: bytes) -> int:
    """Send a request and read its whole answer; returns the status."""
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(request(path, body))
        answer = b""
        while part := connection.recv(1 << 20):
            answer += part
    return int(answer.split(b" ", 2)[1])
