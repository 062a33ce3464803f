"""`stemroute up` beside another one, and what it leaves behind however it ends."""

from __future__ import annotations

import os
import re
import signal
import stat
import tempfile
import time
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from ops.cli import app
from ops.up_record import find_record
from tests.system.processes import alive, command_line, descendants
from tests.system.test_up import Up, until
from tests.tiny_model import write_tiny_llama

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")


def valkeys(up: Up) -> list[int]:
    return [
        pid for pid, command in descendants(up.process.pid).items() if "valkey-server" in command
    ]


def left_behind() -> set[Path]:
    return {
        path
        for kind in ("stemroute-up-*", "valkey-*", "ray/session_2*")
        for path in Path(tempfile.gettempdir()).glob(kind)
    }


def test_two_on_one_machine_share_nothing_and_leave_nothing(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One start of each serves all: a start takes many seconds."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    before = left_behind()
    first = Up(model, "--workers", "1")
    port = int(first.url.rpartition(":")[2])
    try:
        record = find_record(first.url)
        assert record is not None
        assert (
            stat.S_IMODE((tmp_path / "stemroute" / f"gateway-{port}.json").stat().st_mode) == 0o600
        )
        second = Up(model, "--workers", "1", "--redis-url", record.redis_url)
        try:
            pools = {up.fleet()["pool"] for up in (first, second)}
            assert len(pools) == 2
            assert not first.workers() & second.workers()
            assert len(first.fleet()["workers"]) == len(second.fleet()["workers"]) == 1

            # doctor finds Redis, pool and secret by itself, past a proxy, by a URL without a scheme
            monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
            monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
            for command in ("doctor", "status"):
                url = f"127.0.0.1:{port}"
                told = CliRunner().invoke(app, [command, "--url", url])
                assert told.exit_code == 0, told.output

            (valkey,) = valkeys(first)
            os.kill(valkey, signal.SIGKILL)
            killed_at = time.monotonic()
            until(lambda: set(valkeys(first)) - {valkey}, "Valkey runs again", 20)
            for up in (first, second):
                until(
                    lambda up=up: (
                        httpx.get(up.url + "/ready", trust_env=False).json()["degraded"] == []
                        and httpx.get(up.url + "/ready", trust_env=False).status_code == 200
                    ),
                    "reports arrive again",
                    20,
                )
            assert time.monotonic() - killed_at < 20
            (started_again,) = valkeys(first)
        finally:
            said = second.interrupt()
        assert second.process.returncode == 0, said
    finally:
        below = descendants(first.process.pid)
        os.kill(first.process.pid, signal.SIGKILL)  # no chance to clear anything away
        first.process.wait(10)
    until(lambda: not alive(started_again), "Valkey ends with its owner", 30)
    killed_at = time.monotonic()

    def left() -> list[str]:
        return [command for pid, command in below.items() if command_line(pid) == command]

    try:
        until(lambda: not left(), "no process is left", 60)
    finally:
        print(f"{time.monotonic() - killed_at:.1f} s after the kill:", *left(), sep="\n")
    until(lambda: left_behind() <= before, "no directory is left", 60)
    assert find_record(first.url) is None
    assert re.match(r"http://", first.url)
