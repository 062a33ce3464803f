"""The keeper of `stemroute up`: it restarts Valkey, and clears away when its owner is gone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import redis

from ops.keeper import Keeper, KeeperError, start_valkey


def until(true: Callable[[], object], what: str, timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)  # other processes send no event


def record_of(pid: int, folder: Path) -> Path:
    record = folder / "stemroute" / "gateway-1.json"
    record.parent.mkdir(exist_ok=True)
    record.write_text(json.dumps({"pid": pid}))
    return record


def answers(url: str) -> bool:
    try:
        with redis.Redis.from_url(url) as client:
            return bool(client.ping())
    except redis.ConnectionError:
        return False


def test_valkey_is_restarted_on_its_port_and_ends_with_the_owner(tmp_path: Path) -> None:
    keeper = Keeper(tmp_path / "record", valkey=True)
    try:
        assert answers(keeper.redis_url)
        with redis.Redis.from_url(keeper.redis_url) as client:
            valkey = client.info("server")["process_id"]
        os.kill(valkey, signal.SIGKILL)
        until(lambda: answers(keeper.redis_url), "Valkey runs again on the same port")
    finally:
        keeper.stop()
    assert not answers(keeper.redis_url)
    assert not keeper.directory.exists()


def test_processes_that_it_was_told_of_end_with_the_owner() -> None:
    sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    ended, forgotten = subprocess.Popen(sleep), subprocess.Popen(sleep)
    try:
        keeper = Keeper(Path("/nowhere"), valkey=False)
        for process in (ended, forgotten):
            keeper.end_with_owner(process.pid)
        keeper.forget(forgotten.pid)
        keeper.stop()
        assert ended.wait(30) == -signal.SIGTERM
        assert forgotten.poll() is None
    finally:
        for process in (ended, forgotten):
            process.kill()
            process.wait()


def test_the_directory_stays_where_somebody_is_told_to_look_into_it() -> None:
    keeper = Keeper(Path("/nowhere"), valkey=False)
    keeper.keep_directory()
    keeper.stop()
    keeper.directory.rmdir()


def test_the_record_goes_with_its_owner(tmp_path: Path) -> None:
    keeper = Keeper(tmp_path / "stemroute" / "gateway-1.json", valkey=False)
    record = record_of(os.getpid(), tmp_path)
    keeper.stop()
    assert not record.parent.exists()


def test_the_record_of_another_owner_stays(tmp_path: Path) -> None:
    """Of one that was quicker to take the port, or took it over."""
    keeper = Keeper(tmp_path / "stemroute" / "gateway-1.json", valkey=False)
    record = record_of(1, tmp_path)
    keeper.stop()
    assert record.exists()


def test_a_machine_for_which_there_is_no_valkey_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.system", lambda: "Plan 9")
    with pytest.raises(KeeperError, match="Unsupported operating system"):
        start_valkey()
