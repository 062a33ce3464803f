"""`stemroute up`: its Valkey is started again, and nothing stays behind however it ends."""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import tempfile
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from ops.cli import app
from ops.up_record import find_record, record_path
from tests.system.processes import command_line, descendants
from tests.system.test_up import Up, until
from tests.tiny_model import write_tiny_llama

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")


def valkeys(up: Up) -> set[int]:
    below = descendants(up.process.pid).items()
    return {pid for pid, command in below if "valkey-server" in command}


def directories(up: Up) -> set[Path]:
    """What this `up` may leave in the temporary folder: the directories that its processes name or
    work in. Those of other tests, which run at the same time, are not among them."""
    folder = Path(tempfile.gettempdir())
    found = {path for kind in ("stemroute_up_*", "valkey-*") for path in folder.glob(kind)}
    named = ""
    for pid, command in descendants(up.process.pid).items():
        with contextlib.suppress(OSError):
            named += f"{command} {os.readlink(f'/proc/{pid}/cwd')} "
    return {path for path in found if str(path) in named}


def well(up: Up) -> bool:
    answer = httpx.get(up.url + "/ready", timeout=10, trust_env=False)
    return answer.status_code == 200 and not answer.json()["degraded"]


def test_valkey_comes_back_and_a_killed_up_leaves_nothing(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One start serves all: it takes many seconds."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    up = Up(model, "--workers", "1")
    try:
        own = directories(up)
        port = int(up.url.rpartition(":")[2])
        record = find_record(up.url)
        assert record is not None
        assert record.pool == up.fleet()["pool"]
        assert stat.S_IMODE(record_path(port).stat().st_mode) == 0o600

        # doctor finds Redis, pool and secret by itself, past a proxy, by a URL without a scheme
        for name in ("HTTP_PROXY", "http_proxy"):
            monkeypatch.setenv(name, "http://127.0.0.1:1")
        for command in ("doctor", "status"):
            told = CliRunner().invoke(app, [command, "--url", f"127.0.0.1:{port}"])
            assert told.exit_code == 0, told.output
        for name in ("HTTP_PROXY", "http_proxy"):
            monkeypatch.delenv(name)

        (killed,) = valkeys(up)
        os.kill(killed, signal.SIGKILL)
        until(lambda: valkeys(up) - {killed}, "Valkey runs again")
        until(lambda: well(up), "workers publish again")
        own |= directories(up)
        assert up.ask().status_code == 200
    finally:
        # Ray's own agents notice later that their node is gone
        below = {p: c for p, c in descendants(up.process.pid).items() if "Agent" not in c}
        os.kill(up.process.pid, signal.SIGKILL)  # no chance to clear anything away
        up.process.wait(10)
    assert any("valkey-server" in command for command in below.values())
    assert any("ops.cli gateway" in command for command in below.values())

    def left() -> list[str]:
        return [command for pid, command in below.items() if command_line(pid) == command]

    until(lambda: not left(), "no process is left")
    assert own
    until(lambda: not [path for path in own if path.exists()], "no directory is left")
    assert find_record(up.url) is None
