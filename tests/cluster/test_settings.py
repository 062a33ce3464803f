"""Settings: file < environment < flags, and errors that say where they come from."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.settings import (
    SettingsError,
    load_settings,
    settings_environment,
)
from ops.settings_doc import SECTIONS, meanings, render

DOCS = Path(__file__).parents[2] / "docs" / "settings.md"


def test_flags_go_before_environment_before_file(tmp_path: Path) -> None:
    file = tmp_path / "s.toml"
    file.write_text('pool = "f"\n[gateway]\nport = 1\nhost = "f"\npolicy = "f"\n')
    environment = {"STEMROUTE_GATEWAY_PORT": "2", "STEMROUTE_GATEWAY_HOST": "e", "OTHER": "x"}
    flags = {"gateway.port": 3, "gateway.policy": None}
    settings = load_settings(file, environment, flags)
    gateway = settings.gateway
    assert (gateway.port, gateway.host, gateway.policy, settings.pool) == (3, "e", "f", "f")


@pytest.mark.parametrize(
    ("file", "environment", "flags", "words"),
    [
        ("[gateway]\nprot = 1\n", {}, {}, "settings file.*prot"),
        ("gateway = [", {}, {}, "not TOML"),
        ("", {"STEMROUTE_WORKER_THREADS": "many"}, {}, "STEMROUTE_WORKER_THREADS"),
        ("", {"STEMROUTE_WORKER_THREDS": "1"}, {}, "threds"),
        ("", {}, {"gateway.port": "x"}, "flag gateway.port"),
    ],
)
def test_what_cannot_be_used_is_named_with_its_origin(
    tmp_path: Path, file: str, environment: dict, flags: dict, words: str
) -> None:
    path = tmp_path / "s.toml"
    path.write_text(file)
    with pytest.raises(SettingsError, match=words):
        load_settings(path, environment, flags)


def test_a_file_that_is_not_there_is_an_error() -> None:
    with pytest.raises(SettingsError, match="cannot read"):
        load_settings("/no/such/file.toml", {})


def test_a_child_process_loads_equal_settings() -> None:
    flags = {"gateway.port": 9, "redis_url": "redis://:p@h:1/0", "bus.lease_s": 1.5}
    settings = load_settings(environ={}, flags=flags)
    assert load_settings(environ=settings_environment(settings)) == settings


def test_the_page_of_settings_is_up_to_date_and_says_something_of_each() -> None:
    assert DOCS.read_text() == render(), "run: python -m ops.settings_doc > docs/settings.md"
    for _, struct, prefix in SECTIONS:
        nested = {"bus", "gateway", "worker", "serve"} if not prefix else set()
        assert set(meanings(struct)) == set(struct.__struct_fields__) - nested
