"""The gateway's own answers: errors with status and sentence, models, readiness, metrics, keys."""

import asyncio
import gc
import json
import subprocess
import sys

import aiohttp
import msgspec
import pytest

from cluster.blocks import unpack_tokens
from cluster.protocol import Load
from cluster.settings import GatewaySettings, Settings
from router.background import SWITCH_INTERVAL_S
from router.gateway import Gateway, serve_gateway
from router.policies import PolicyError
from tests.router.support import NAMESPACE, QUICK_STOP, FakeFollower, Rig, card, report

HELLO = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}


def test_the_gateway_needs_neither_torch_nor_ray():
    code = (
        "import sys, router.gateway; "
        "print([m for m in ('torch', 'ray', 'worker', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


async def test_a_chat_reaches_the_worker_as_tokens_of_its_own_template():
    async with Rig() as rig:
        body = {**HELLO, "cache_salt": "s", "temperature": 0, "stop": ["x"], "request_type": "q"}
        status, _, _ = await rig.post("/v1/chat/completions", body)
        assert status == 200
        (generate,) = rig.workers[0].requests
        assert len(unpack_tokens(generate.token_ids)) == len("<user>hello<assistant>")
        assert (generate.kind, generate.cache_salt) == ("chat", "s")
        assert (generate.request_type, generate.turn) == ("q", 1)
        assert (generate.sampling.temperature, generate.sampling.stop) == (0, ["x"])
        # 200 tokens of context less 22 of the prompt, below the default of 1024
        assert generate.sampling.max_tokens == 178
        assert rig.workers[0].model_fetches == 1


async def test_an_answer_is_bounded_by_the_default_and_by_the_context():
    async with Rig(default_max_tokens=16) as rig:
        await rig.complete("12345")
        await rig.complete("12345", max_tokens=30)
        await rig.complete("12345", max_tokens=1000)
        limits = [generate.sampling.max_tokens for generate in rig.workers[0].requests]
        assert limits == [16, 30, 195]


@pytest.mark.parametrize(
    ("path", "body", "status", "code", "param", "words"),
    [
        ("/v1/chat/completions", b"{", 400, "invalid_json", None, "not valid JSON"),
        ("/v1/completions", b"\xff", 400, "invalid_json", None, "not valid JSON"),
        ("/v1/chat/completions", {"model": "tiny"}, 400, None, "messages", "is missing"),
        ("/v1/chat/completions", {**HELLO, "n": "2"}, 400, None, "n", "wrong type"),
        ("/v1/chat/completions", {**HELLO, "n": 2}, 400, None, "n", "send more requests"),
        (
            "/v1/chat/completions",
            {**HELLO, "logprobs": True},
            400,
            "unsupported_parameter",
            "logprobs",
            "leave it out",
        ),
        (
            "/v1/chat/completions",
            {**HELLO, "model": "huge"},
            404,
            "model_not_found",
            "model",
            "the model `huge` does not exist here: send one of `other`, `tiny`",
        ),
        (
            "/v1/chat/completions",
            {**HELLO, "model": "other"},
            503,
            "no_ready_worker",
            None,
            "no worker of the model `other` is ready",
        ),
        (
            "/v1/chat/completions",
            {"model": "tiny", "messages": [{"role": "villain", "content": "x"}]},
            400,
            None,
            "messages",
            "no villains here",
        ),
        (
            "/v1/completions",
            {"model": "tiny", "prompt": "x" * 200},
            400,
            "context_length_exceeded",
            "prompt",
            "the context of `tiny` is 200 tokens, but the prompt has 200",
        ),
        (
            "/v1/completions",
            {"model": "tiny", "prompt": [1, 2, 999]},
            400,
            None,
            "prompt",
            "token id 999",
        ),
        (
            "/v1/completions",
            {"model": "tiny", "prompt": "x" * 3000},
            413,
            "body_too_large",
            None,
            "exceeds the limit of 2000 bytes",
        ),
        ("/v1/embeddings", HELLO, 404, "unknown_url", None, "there is no endpoint /v1/embeddings"),
        ("/v1/models", HELLO, 405, "method_not_allowed", None, "does not accept POST: send GET"),
    ],
)
async def test_what_goes_wrong_is_said(path, body, status, code, param, words):
    async with Rig(max_body_bytes=2000) as rig:
        rig.fleet.on_card(card("o", model="other", state="starting"))
        got, headers, answer = await rig.post(path, body)
        error = answer["error"]
        assert (got, error["code"], error["param"]) == (status, code, param)
        assert words in error["message"]
        assert error["type"] == (
            "service_unavailable" if status == 503 else "invalid_request_error"
        )
        assert headers.get("Retry-After") == ("1" if status == 503 else None)
        assert rig.workers[0].requests == []
        assert (await rig.post("/v1/chat/completions", HELLO))[0] == 200


async def test_a_prompt_that_leaves_room_for_one_token_is_served():
    async with Rig() as rig:
        assert (await rig.complete("x" * 199))[0] == 200
        assert rig.workers[0].requests[0].sampling.max_tokens == 1


async def test_a_body_over_the_limit_without_a_length_is_refused_too():
    async with Rig(max_body_bytes=2000) as rig:

        async def body():
            for _ in range(5):
                yield b" " * 1000

        async with rig.http.post("/v1/completions", data=body()) as answer:
            assert answer.status == 413
            assert (await answer.json())["error"]["code"] == "body_too_large"


async def test_an_empty_pool_asks_to_come_back():
    async with Rig(workers=0) as rig:
        status, headers, body = await rig.complete()
        assert (status, headers["Retry-After"]) == (503, "1")
        assert body["error"]["code"] == "no_ready_worker"


async def test_a_failure_of_the_gateway_shows_no_trace(monkeypatch, caplog):
    async with Rig() as rig:

        def fail(*_, **__):
            raise RuntimeError("secret detail")

        monkeypatch.setattr(rig.gateway.dispatcher, "place", fail)
        status, _, body = await rig.complete()
        assert (status, body["error"]["type"]) == (500, "server_error")
        assert "secret" not in json.dumps(body)
        assert "secret detail" in caplog.text


async def test_a_worker_that_serves_another_model_than_its_card_says_gets_nothing():
    async with Rig() as rig:
        other = msgspec.structs.replace(NAMESPACE, tokenizer="t2")
        rig.fleet.on_card(rig.workers[0].card(namespace=other))
        status, headers, body = await rig.complete()
        assert (status, headers["Retry-After"]) == (503, "1")
        assert "does not match its card" in body["error"]["message"]
        assert rig.workers[0].requests == []


async def test_models():
    async with Rig() as rig:
        rig.fleet.on_card(card("o", model="org/other", state="starting"))
        status, _, body = await rig.get("/v1/models")
        assert (status, body["object"]) == (200, "list")
        (entry,) = body["data"]
        assert (entry["id"], entry["object"], entry["max_model_len"]) == ("tiny", "model", 200)
        assert (await rig.get("/v1/models/tiny"))[2] == entry
        assert (await rig.get("/v1/models/none"))[0] == 404
        rig.fleet.on_report(report("o", state="ready"))
        assert (await rig.get("/v1/models/org/other"))[2]["id"] == "org/other"


async def test_health_is_about_the_process_and_ready_about_the_pool():
    async with Rig(workers=0) as rig:
        assert (await rig.get("/health"))[0] == 200
        status, _, body = await rig.get("/ready")
        assert (status, body["ready"]) == (503, False)
        assert body["reasons"] == ["no worker has announced itself in the pool 'default'"]
        rig.fleet.on_card(card("a", state="starting"))
        rig.fleet.on_card(card("b"))
        rig.fleet.trust.suspect("b", "it refused a connection")
        _, _, body = await rig.get("/ready")
        assert body["reasons"] == [
            "none of the 2 workers can serve: a is starting, "
            "b is not reachable (it refused a connection)"
        ]
        rig.fleet.on_report(report("b"))
        status, _, body = await rig.get("/ready")
        assert (status, body["ready"], body["reasons"]) == (200, True, [])
        assert (body["models"], body["workers_ready"]) == (["tiny"], 1)
        assert body["index"] == {"stale": False, "reason": ""}


async def test_a_stale_index_is_not_ready_and_says_why():
    async with Rig() as rig:
        rig.follower.status.connected, rig.follower.status.stale = False, True
        rig.follower.status.reason = "Redis cannot be reached"
        status, _, body = await rig.get("/ready")
        assert status == 503
        assert body["reasons"] == ["the index is stale: Redis cannot be reached"]
        assert body["index"] == {"stale": True, "reason": "Redis cannot be reached"}
        assert (await rig.complete())[0] == 200  # requests go on with what is known


async def test_a_worker_that_disagrees_is_named_while_requests_go_on():
    async with Rig(workers=2) as rig:
        rig.fleet.on_report(report("w1", load=Load(cached_blocks=50), stored=[b"x" * 16]))
        rig.follower.status.disagreeing = {"w1": 3, "gone": 4}
        status, _, body = await rig.get("/ready")
        assert (status, body["ready"], body["reasons"]) == (200, True, [])
        assert body["index"]["stale"]
        assert body["index"]["reason"].startswith(
            "w1: it reports 50 cached blocks, but has published 1, although its whole set was read "
            "3 times"
        )
        fleet = (await rig.get("/admin/fleet"))[2]
        assert fleet["bus"]["stale"]
        assert fleet["bus"]["reason"] == body["index"]["reason"]
        assert fleet["disagreeing"] == {"w1": body["index"]["reason"].removeprefix("w1: ")}
        assert (await rig.complete())[0] == 200
        rig.follower.status.disagreeing = {"w0": 3}
        reason = (await rig.get("/ready"))[2]["index"]["reason"]
        assert reason.startswith("w0: its reports state other numbers of blocks in cold tiers")
        rig.follower.status.disagreeing = {}
        assert (await rig.get("/ready"))[2]["index"] == {"stale": False, "reason": ""}


async def test_of_many_workers_that_disagree_some_are_named():
    async with Rig(workers=6) as rig:
        rig.follower.status.disagreeing = {f"w{number}": 3 for number in range(6)}
        reason = (await rig.get("/ready"))[2]["index"]["reason"]
        assert "w2: its reports state" in reason
        assert "w3" not in reason
        assert reason.endswith("; and 3 more workers")


async def test_a_follower_that_ended_is_not_ready():
    class Broken(FakeFollower):
        async def run(self):
            raise RuntimeError("bug")

    gateway = Gateway(Settings(gateway=GatewaySettings(port=0, **QUICK_STOP)), Broken)
    await gateway.start()
    await asyncio.wait([gateway._following])
    assert "the bus follower has stopped" in gateway.readiness().reasons[-1]
    await gateway.stop()


async def test_refused_workers_are_named_with_the_reason():
    async with Rig(workers=0) as rig:
        rig.follower.status.refused = {"x": "it speaks protocol version 9"}
        _, _, body = await rig.get("/ready")
        assert body["refused"] == {"x": "it speaks protocol version 9"}
        assert body["reasons"][-1] == "worker x is refused: it speaks protocol version 9"
        rig.fleet.on_card(card("a"))
        wrong = msgspec.structs.replace(NAMESPACE, block_size=32)
        rig.fleet.on_card(card("b", namespace=wrong))
        status, _, body = await rig.get("/ready")
        assert status == 200
        assert "block_size 32 instead of 4" in body["refused"]["b"]


async def test_metrics_tell_of_fleet_bus_and_requests():
    async with Rig() as rig:
        await rig.complete()
        await rig.post("/v1/completions", b"{")
        await rig.get("/v1/nothing")
        rig.follower.status.unreadable = 3
        rig.follower.status.disagreements, rig.follower.status.disagreeing = 9, {"w0": 4}
        rig.follower.status.report_ages_s = {"w0": 0.5}
        rig.fleet.on_card(card("b", state="draining"))
        rig.fleet.on_report(
            report(
                "w0", load=Load(pending_prefill_tokens=9, running=2, waiting=1), stored=[b"x" * 16]
            )
        )
        async with rig.http.get("/metrics") as answer:
            assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
            lines = (await answer.text()).splitlines()
        assert {
            'stemroute_gateway_requests_total{endpoint="/v1/completions",status="200"} 1.0',
            'stemroute_gateway_requests_total{endpoint="/v1/completions",status="400"} 1.0',
            'stemroute_gateway_requests_total{endpoint="none",status="404"} 1.0',
            'stemroute_gateway_decisions_total{policy="locality",reason="only"} 1.0',
            "stemroute_gateway_decision_duration_seconds_count 1.0",
            "stemroute_gateway_time_to_first_byte_seconds_count 1.0",
            "stemroute_gateway_prompt_tokens_total 11.0",
            'stemroute_gateway_workers{model="tiny",state="ready"} 1.0',
            'stemroute_gateway_workers{model="tiny",state="draining"} 1.0',
            'stemroute_gateway_worker_pending_prefill_tokens{worker="w0"} 9.0',
            'stemroute_gateway_worker_batch_requests{worker="w0"} 3.0',
            'stemroute_gateway_worker_indexed_blocks{worker="w0"} 1.0',
            "stemroute_gateway_bus_up 1.0",
            "stemroute_gateway_index_stale 1.0",
            "stemroute_gateway_bus_reports_total 7.0",
            "stemroute_gateway_bus_gaps_total 1.0",
            "stemroute_gateway_bus_repairs_total 1.0",
            "stemroute_gateway_index_disagreements_total 9.0",
            "stemroute_gateway_disagreeing_workers 1.0",
            "stemroute_gateway_bus_unreadable_messages_total 3.0",
            'stemroute_gateway_worker_report_age_seconds{worker="w0"} 0.5',
            "stemroute_gateway_in_flight_requests 0.0",
            "stemroute_gateway_open_connections 1.0",
            "stemroute_gateway_refused_connections_total 0.0",
            "stemroute_gateway_stalled_connections_total 0.0",
        } <= set(lines)


@pytest.mark.parametrize(
    ("header", "status"),
    [
        (None, 401),
        ("Bearer wrong", 401),
        ("Basic key", 401),
        ("Bearer käse", 401),
        ("Bearer key", 200),
        ("bearer  key", 200),
    ],
)
async def test_the_api_key_is_asked_for(header, status):
    async with Rig(api_key="key") as rig:
        headers = {} if header is None else {"Authorization": header}
        got, told, body = await rig.post("/v1/chat/completions", HELLO, headers=headers)
        assert got == status
        assert told.get("WWW-Authenticate") == ("Bearer" if status == 401 else None)
        if status == 401:
            assert body["error"]["type"] == "authentication_error"
            assert (await rig.get("/v1/models"))[0] == 401
        assert (await rig.get("/health"))[0] == (await rig.get("/ready"))[0] == 200


async def test_two_gateways_of_one_process_count_apart():
    async with Rig() as one, Rig() as other:
        await one.complete()
        assert b"stemroute_gateway_prompt_tokens_total 11.0" in one.gateway.metrics.text()
        assert b"stemroute_gateway_prompt_tokens_total 0.0" in other.gateway.metrics.text()


async def test_a_taken_port_is_an_error_and_leaves_nothing():
    async with Rig() as rig:
        before = asyncio.all_tasks()
        port = int(rig.gateway.url.rpartition(":")[2])
        second = Gateway(Settings(gateway=GatewaySettings(port=port)), FakeFollower)
        with pytest.raises(OSError, match=str(port)):
            await second.start()
        assert second._follower.ended or second._following.done()
        assert asyncio.all_tasks() == before
        await second.stop()


async def test_the_setting_bounds_the_messages_of_a_chat():
    async with Rig(max_messages=2) as rig:
        for count, expected in ((2, 200), (3, 400)):
            body = {"model": "tiny", "messages": HELLO["messages"] * count}
            status, _, answer = await rig.post("/v1/chat/completions", body)
            assert status == expected
        assert "3 messages: send at most 2 (gateway.max_messages)" in answer["error"]["message"]


def test_an_unknown_policy_is_named_before_anything_starts():
    with pytest.raises(PolicyError, match="there is no policy 'best'"):
        Gateway(Settings(gateway=GatewaySettings(policy="best")), FakeFollower)


@pytest.fixture
def interpreter():
    """What a gateway sets for its whole process does not stay for other tests."""
    interval, thresholds = sys.getswitchinterval(), gc.get_threshold()
    yield
    sys.setswitchinterval(interval)
    gc.set_threshold(*thresholds)
    gc.unfreeze()


@pytest.mark.usefixtures("interpreter")
async def test_serve_gateway_tells_its_url_and_ends_when_cancelled():
    ready = asyncio.get_running_loop().create_future()
    gateway = GatewaySettings(port=0, **QUICK_STOP)
    settings = Settings(redis_url="redis://127.0.0.1:1/0", gateway=gateway)
    serving = asyncio.create_task(serve_gateway(settings, ready=ready.set_result))
    url = await asyncio.wait_for(ready, 20)
    assert sys.getswitchinterval() == pytest.approx(SWITCH_INTERVAL_S)
    async with aiohttp.ClientSession() as http:
        async with http.get(f"{url}/health") as answer:
            assert answer.status == 200
        async with http.get(f"{url}/ready") as answer:
            assert answer.status == 503
            assert "the index is stale" in (await answer.json())["reasons"][-1]
        serving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await serving
        with pytest.raises(aiohttp.ClientConnectorError):
            await http.get(f"{url}/health")


async def test_that_the_follower_ended_is_told_everywhere():
    async with Rig() as rig:
        rig.gateway._following.cancel()
        await asyncio.wait([rig.gateway._following])
        status, _, body = await rig.get("/ready")
        assert (status, body["index"]["stale"]) == (503, True)
        assert body["reasons"] == [f"the index is stale: {body['index']['reason']}"]
        bus = (await rig.get("/admin/fleet"))[2]["bus"]
        assert (bus["connected"], bus["stale"]) == (False, True)
        assert bus["reason"] == body["index"]["reason"] != ""
        lines = rig.gateway.metrics.text().decode().splitlines()
        assert {"stemroute_gateway_bus_up 0.0", "stemroute_gateway_index_stale 1.0"} <= set(lines)


async def test_a_worker_that_is_not_in_the_fleet_makes_no_index_stale():
    async with Rig() as rig:
        rig.follower.status.disagreeing = {"gone": 4}
        assert not (await rig.get("/ready"))[2]["index"]["stale"]
        lines = rig.gateway.metrics.text().decode().splitlines()
        assert {
            "stemroute_gateway_index_stale 0.0",
            "stemroute_gateway_disagreeing_workers 0.0",
        } <= set(lines)
