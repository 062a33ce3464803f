"""Addresses as users give them, the record of a running `up`, and proxies of the environment."""

from __future__ import annotations

import asyncio
import os
import tempfile
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from cluster.settings import GatewaySettings, ServeSettings, Settings, WorkerSettings
from ops.addresses import base_url, free_port, is_loopback
from ops.cli import app
from ops.local import LocalCluster
from ops.up_record import find_record, record_path, with_record, write_record
from tests.router.support import Rig


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("localhost", "http://localhost"),
        ("http://h:1/", "http://h:1"),
        ("https://h", "https://h"),
    ],
)
def test_a_url_without_a_scheme_is_http(given: str, wanted: str) -> None:
    assert base_url(given) == wanted


@pytest.mark.parametrize(
    ("url", "here"),
    [
        ("http://127.0.0.1:8000", True),
        ("127.9.9.9:1", True),
        ("http://localhost:8000", True),
        ("http://[::1]:8000", True),
        ("http://10.0.0.1", False),
        ("http://127.0.0.1.example.com", False),
        ("http://[broken", False),
    ],
)
def test_what_is_on_this_machine(url: str, here: bool) -> None:
    assert is_loopback(url) is here


@pytest.mark.parametrize(("command", "found"), [("status", "w0"), ("doctor", "answers at http://")])
async def test_this_machine_is_asked_past_a_proxy(
    monkeypatch: pytest.MonkeyPatch, command: str, found: str
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    for name in ("NO_PROXY", "no_proxy"):  # else the environment alone would make it pass
        monkeypatch.delenv(name, raising=False)
    async with Rig() as rig:
        url = rig.gateway.url.removeprefix("http://")
        result = await asyncio.to_thread(CliRunner().invoke, app, [command, "--url", url])
        assert found in result.output, result.output


@pytest.mark.parametrize("url", ["127.0.0.1:99999", "127.0.0.1:x", "http://[", "h:x"])
def test_a_url_that_cannot_be_is_said_in_a_sentence(url: str) -> None:
    for command in ("status", "doctor"):
        told = CliRunner().invoke(app, [command, "--url", url])
        assert told.exit_code == 1
        assert isinstance(told.exception, SystemExit), told.exception


async def test_up_does_not_take_the_gateway_of_another_pool_for_its_own() -> None:
    async with Rig() as rig:
        host, _, port = rig.gateway.url.removeprefix("http://").rpartition(":")
        own = rig.gateway.settings.pool
        for pool, taken in ((own, True), ("up-1", False)):
            settings = Settings(
                pool=pool,
                gateway=GatewaySettings(host=host, port=int(port)),
                serve=ServeSettings(replicas=1),
            )
            local = LocalCluster(msgspec.structs.replace(settings, secret="s"))
            local.settings = msgspec.structs.replace(local.settings, pool=pool)
            assert await asyncio.to_thread(local._all_seen) is taken


def test_a_port_for_later_is_not_one_that_connections_get() -> None:
    for host in ("127.0.0.1", "localhost"):
        assert 20_000 <= free_port(host) < 32_000  # Linux gives connections ports from 32,768 on


def test_every_local_cluster_has_a_pool_and_a_secret_of_its_own() -> None:
    one, other = LocalCluster(Settings()).settings, LocalCluster(Settings()).settings
    assert one.pool != other.pool
    assert one.secret != other.secret
    assert min(len(one.secret), len(other.secret)) >= 32
    chosen = LocalCluster(Settings(pool="mine", secret="s")).settings
    assert (chosen.pool, chosen.secret) == ("mine", "s")


def test_a_disk_tier_keeps_its_secret_so_that_a_restart_finds_its_blocks(tmp_path: Path) -> None:
    worker = WorkerSettings(disk_tier_gb=1, cpu_tier_gb=1, cache_dir=str(tmp_path))
    one, other = (LocalCluster(Settings(worker=worker)).settings for _ in range(2))
    assert one.secret == other.secret
    assert one.pool != other.pool
    assert (tmp_path / "up-secret").stat().st_mode & 0o077 == 0


@pytest.fixture
def running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    settings = Settings(
        pool="up-1",
        secret="s",
        redis_url="redis://127.0.0.1:7",
        gateway=GatewaySettings(port=4321, admin_key="a"),
    )
    write_record(settings)
    return settings


def test_a_record_is_found_by_the_port_and_fills_what_is_not_given(running: Settings) -> None:
    record = find_record("localhost:4321")
    assert record is not None
    assert record.pid == os.getpid()
    filled = with_record(Settings(gateway=GatewaySettings(port=9)), record)
    assert (filled.pool, filled.secret, filled.redis_url) == ("up-1", "s", "redis://127.0.0.1:7")
    assert filled.gateway.admin_key == "a"
    given = Settings(pool="p", secret="t", redis_url="redis://h")
    assert msgspec.structs.replace(with_record(given, record), gateway=given.gateway) == given
    assert find_record("http://127.0.0.1:4322") is None
    assert find_record("http://example.com:4321") is None


@pytest.mark.parametrize("runtime", ["", "/nowhere", "read-only"])
def test_without_a_runtime_directory_the_record_is_in_the_temporary_folder(
    runtime: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    if runtime == "read-only":
        runtime = str(tmp_path / runtime)
        Path(runtime).mkdir()
        monkeypatch.setattr(os, "access", lambda path, mode: str(path) != runtime)
    monkeypatch.setenv("XDG_RUNTIME_DIR", runtime)
    write_record(Settings(pool="up-2", gateway=GatewaySettings(port=4321)))
    assert record_path(4321).parent == tmp_path / f"stemroute_{os.getuid()}"
    assert record_path(4321).parent.stat().st_mode & 0o077 == 0
    record = find_record("localhost:4321")
    assert record is not None
    assert record.pool == "up-2"


def test_a_record_that_others_could_have_written_is_not_read(running: Settings) -> None:
    path = record_path(4321)
    path.chmod(0o620)
    assert find_record("localhost:4321") is None
    path.chmod(0o600)
    path.parent.chmod(0o777)
    assert find_record("localhost:4321") is None
    with pytest.raises(PermissionError):
        write_record(running)
