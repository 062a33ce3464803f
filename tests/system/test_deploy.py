"""`stemroute deploy` onto a Ray cluster that runs already, and a gateway started by itself."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.ports import free_port
from tests.system.processes import alive, end_all
from tests.system.test_up import until
from tests.tiny_model import write_tiny_llama

pytestmark = pytest.mark.timeout(240)

RAY_TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "5" * 64}
"""Ray asks whoever joins or deploys for its cluster's token."""

STEMROUTE = [sys.executable, "-m", "ops.cli"]


@pytest.fixture
def ray_address() -> Iterator[str]:
    """A Ray head of its own, in the foreground of a child process."""
    port = free_port()
    command = [str(Path(sys.executable).parent / "ray"), "start", "--head", "--block"]
    command += [f"--port={port}", "--include-dashboard=false", "--num-cpus=2"]
    command += ["--object-store-memory=80000000", "--disable-usage-stats"]
    command += [f"--dashboard-agent-listen-port={free_port()}", "--node-ip-address=127.0.0.1"]
    head = subprocess.Popen(
        command,
        env={**os.environ, **RAY_TOKEN},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield f"127.0.0.1:{port}"
    finally:
        ended = end_all(head)  # asked kindly, Ray takes longer than a test should
        until(lambda: not [pid for pid in ended if alive(pid)], "Ray has ended", 30)


def test_deploy_ask_and_remove(ray_address: str, redis_url: str, pool: str, tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path / "tiny")
    environment = {
        **os.environ,
        **RAY_TOKEN,
        "STEMROUTE_POOL": pool,
        "STEMROUTE_REDIS_URL": redis_url,
        "STEMROUTE_SECRET": "only for this pool",
        "STEMROUTE_WORKER_KV_BLOCKS": "100",
        "STEMROUTE_WORKER_CACHE_DIR": str(tmp_path / "cache"),
    }
    deploy = [*STEMROUTE, "deploy", "--address", ray_address]

    def run(*arguments: str) -> str:
        done = subprocess.run(
            [*deploy, *arguments], env=environment, capture_output=True, text=True, timeout=150
        )
        assert done.returncode == 0, done.stderr
        return done.stderr

    flags = ["--workers", "1", "--model", str(model), "--worker-host", "127.0.0.1"]
    until(lambda: _answers(ray_address), "the Ray head listens")
    assert "1 workers are ready" in run(*flags)
    port = free_port()
    gateway = subprocess.Popen([*STEMROUTE, "gateway", "--port", str(port)], env=environment)
    try:
        url = f"http://127.0.0.1:{port}"
        until(lambda: _status(url + "/ready") == 200, "the gateway is ready")
        body = {"model": "tiny", "prompt": "Once upon a time", "max_tokens": 4}
        answer = httpx.post(url + "/v1/completions", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        assert "removed" in run("--remove")
        until(lambda: _status(url + "/ready") == 503, "the gateway knows that they have left")
        assert httpx.post(url + "/v1/completions", json=body, timeout=60).status_code in (404, 503)
    finally:
        gateway.terminate()
        assert gateway.wait(20) == 0


def test_no_cluster_there_is_said_in_a_sentence() -> None:
    command = [*STEMROUTE, "deploy", "--address", f"127.0.0.1:{free_port()}"]
    command += ["--redis-url", "redis://127.0.0.1:1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert "no Ray cluster at" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_head_that_asks_for_the_token_of_its_user_is_joined(
    ray_address: str, tmp_path: Path
) -> None:
    """The token lies where Ray keeps it; nobody sets RAY_AUTH_MODE for the command."""
    until(lambda: _answers(ray_address), "the Ray head listens")
    deploy = [*STEMROUTE, "deploy", "--address", ray_address, "--remove"]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    token = tmp_path / ".ray" / "auth_token"

    def run() -> str:
        done = subprocess.run(
            deploy,
            env={**environment, "HOME": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=150,
        )
        assert "Traceback" not in done.stderr
        return done.stderr

    assert "set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN" in run()
    token.parent.mkdir()
    token.write_text(RAY_TOKEN["RAY_AUTH_TOKEN"])
    assert "no workers are deployed on this cluster" in run()


def _answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=1).close()
    except OSError:
        return False
    return True


def _status(url: str) -> int:
    try:
        return httpx.get(url, timeout=5).status_code
    except httpx.HTTPError:
        return 0
