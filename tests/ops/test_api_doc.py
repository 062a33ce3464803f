"""docs/api.md is generated, and its lists are those of a live gateway and of the sources."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster.protocol import HEADER_MIGRATIONS
from ops.api_doc import (
    ENDPOINTS,
    ERRORS,
    MESSAGE,
    RESPONSE_HEADERS,
    SERVED,
    STREAM_OPTIONS,
    render,
)
from router import edge
from router.openai_api import ChatBody, CompletionBody, Message, StreamOptions
from router.unserved import NO_EFFECT, UNSERVED
from tests.router.support import Rig
from worker import engine

ROOT = Path(__file__).parents[2]
FROM_WORKERS = [Path(engine.__file__)]
"""Sources of errors with a code that a gateway passes on."""


def test_the_page_of_the_api_is_up_to_date() -> None:
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    assert page == render(), "run: python -m ops.api_doc > docs/api.md"


async def test_the_endpoints_are_those_of_a_gateway(monkeypatch: pytest.MonkeyPatch) -> None:
    served = []
    add = edge.Edge.add

    def recorded(self: edge.Edge, routes: list[edge.Route]) -> None:
        served.extend((route.method, route.path) for route in routes)
        add(self, routes)

    monkeypatch.setattr(edge.Edge, "add", recorded)
    async with Rig():
        assert sorted(served) == sorted((each.method, each.path) for each in ENDPOINTS)


@pytest.mark.parametrize("endpoint", ENDPOINTS, ids=lambda each: f"{each.method} {each.path}")
async def test_an_endpoint_asks_for_the_key_that_is_written(endpoint: Any) -> None:
    path = endpoint.path.replace("{model}", "tiny").replace("{request_id}", "1")
    keys = {"API": "a", "admin": "b"}
    async with Rig(api_key="a", admin_key="b") as rig:
        for sent in ("", "a", "b"):
            headers = {"Authorization": f"Bearer {sent}"} if sent else {}
            request = rig.http.request(endpoint.method, path, headers=headers, data=b"{")
            async with request as answer:
                wrong = endpoint.key and sent != keys[endpoint.key]
                assert (answer.status == 401) == bool(wrong)


def test_every_field_that_is_read_is_explained() -> None:
    fields = {*ChatBody.__struct_fields__, *CompletionBody.__struct_fields__}
    assert set(SERVED) == fields - NO_EFFECT
    assert not fields & set(UNSERVED)
    assert set(MESSAGE) == set(Message.__annotations__)
    assert set(STREAM_OPTIONS) == set(StreamOptions.__struct_fields__)


async def test_the_response_headers_are_those_of_an_answer() -> None:
    async with Rig() as rig:
        _, headers, _ = await rig.complete(not_a_field=1)
        ours = {name.lower() for name in headers if name.lower().startswith("x-stemroute-")}
        assert ours == set(RESPONSE_HEADERS) - {HEADER_MIGRATIONS}  # no worker has failed


def raised(path: Path) -> Iterator[tuple[str, str, str]]:
    """(code, status, type) of each RequestError with a literal code; "" for what is no literal."""
    names = {"SERVICE_UNAVAILABLE": "service_unavailable"}
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "self._refusal":
            code = node.args[1]
            assert isinstance(code, ast.Constant)
            yield str(code.value), "429", "rate_limit_error"
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "RequestError":
            given = {
                word.arg: names.get(ast.unparse(word.value), getattr(word.value, "value", ""))
                for word in node.keywords
            }
            if isinstance(given.get("code"), str) and given["code"]:
                status = given.get("status", 400)
                kind = given.get("type", "invalid_request_error")
                yield given["code"], *(x if isinstance(x, str) else str(x) for x in (status, kind))


def test_the_errors_are_those_that_are_raised() -> None:
    written = {error.code: error for error in ERRORS}
    gateway = {each for path in (ROOT / "router").glob("*.py") for each in raised(path)}
    passed_on = {each for path in FROM_WORKERS for each in raised(path)}
    unseen = {"duplicate_request_id"}  # request ids are the gateway's own
    assert set(written) == {code for code, _, _ in gateway | passed_on} - unseen
    for code, status, kind in gateway:
        error = written[code]
        assert status in error.status or not status.isdecimal()
        assert kind in error.type or not kind.isidentifier()
