"""Web pages of other origins may call `/v1` only where the setting admits their origin."""

import pytest

from cluster.protocol import HEADER_IGNORED_FIELDS, HEADER_WORKER
from tests.router.support import Rig

PAGE = "https://chat.example.com"
ASKS = {
    "Origin": PAGE,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization",
}


@pytest.mark.parametrize("origins", [PAGE, f"https://a.example, {PAGE}/", "*"])
async def test_an_admitted_page_may_ask_and_read_the_headers(origins):
    async with Rig(cors_origins=origins, api_key="key") as rig:
        path = "/v1/chat/completions"
        async with rig.http.options(path, headers=ASKS) as answer:
            assert answer.status == 200
            assert answer.headers["Access-Control-Allow-Origin"] == PAGE
            assert answer.headers["Access-Control-Allow-Headers"] == "authorization"
            assert "POST" in answer.headers["Access-Control-Allow-Methods"]
            assert answer.headers["Vary"] == "Origin"
        body = {"model": "tiny", "prompt": "x"}
        for stream in (False, True):
            headers = {"Origin": PAGE, "Authorization": "Bearer key"}
            sent = {**body, "stream": stream}
            async with rig.http.post("/v1/completions", json=sent, headers=headers) as answer:
                assert answer.status == 200
                assert answer.headers["Access-Control-Allow-Origin"] == PAGE
                assert HEADER_WORKER in answer.headers["Access-Control-Expose-Headers"]
        refused, headers, _ = await rig.post("/v1/completions", body, headers={"Origin": PAGE})
        assert (refused, headers["Access-Control-Allow-Origin"]) == (401, PAGE)


@pytest.mark.parametrize("origins", ["", "https://a.example"])
async def test_other_pages_get_no_permission(origins):
    async with (
        Rig(cors_origins=origins) as rig,
        rig.http.options("/v1/completions", headers=ASKS) as answer,
    ):
        assert answer.status == 405
        assert "Access-Control-Allow-Origin" not in answer.headers


async def test_admin_is_never_open_to_pages():
    async with (
        Rig(cors_origins="*") as rig,
        rig.http.options("/admin/policy", headers=ASKS) as answer,
    ):
        assert answer.status in (403, 405)
        assert "Access-Control-Allow-Origin" not in answer.headers


async def test_unknown_fields_are_named_in_every_answer():
    async with Rig() as rig:
        _, headers, _ = await rig.complete(max_toksn=5, other=1)
        assert headers[HEADER_IGNORED_FIELDS] == "max_toksn, other"
        _, headers, _ = await rig.complete()
        assert HEADER_IGNORED_FIELDS not in headers
