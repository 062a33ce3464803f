import json
import math

import pytest

from loadgen.admin import Admin, AdminError
from loadgen.arrivals import Arrivals
from loadgen.bodies import Writer
from loadgen.plan import Load, TraceSource, make_plan
from loadgen.probe import GatewayProbe
from loadgen.requests import digest
from loadgen.traces import TraceOptions, TraceRequest
from loadgen.workloads import Chat, SharedPrefix
from tests.loadgen.fake_gateway import FakeGateway, serving


class Known:
    """A model of which everything is known."""

    def __init__(self, tokens_per_word=1.0):
        self.probes = 0
        self._tokens_per_word = tokens_per_word

    async def model(self):
        return "known"

    async def tokens_per_word(self, model):
        assert model in ("known", "asked")
        self.probes += 1
        return self._tokens_per_word


def bodies(plan):
    return [json.loads(bytes(request.body)) for request in plan.requests]


def trace(tmp_path, format="mooncake", **options):
    rows = {
        "mooncake": [
            {"timestamp": i * 500, "input_length": 700, "output_length": 3, "hash_ids": [1, i + 2]}
            for i in range(4)
        ],
        "lmcache": [
            {"timestamp": i * 500_000, "input": "hi" * (i + 1), "output": "ho", "session_id": 1}
            for i in range(4)
        ],
    }[format]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return TraceSource(files=(str(path),), format=format, options=TraceOptions(**options))


async def test_prose_needs_no_probe_and_made_text_one():
    probe = Known(tokens_per_word=2.0)
    plan = await make_plan(Load(workload=SharedPrefix()), probe, "", None)
    assert (probe.probes, plan.source.notes) == (0, [])
    plan = await make_plan(Load(workload=Chat(users=2, turns=1)), probe, "", None)
    assert probe.probes == 1
    assert "2 tokens each for known (measured)" in plan.source.notes[0]
    system = bodies(plan)[0]["messages"][0]["content"]
    assert len(system.split()) == 400 / 2


async def test_the_model_that_was_asked_for_stands_in_every_body():
    plan = await make_plan(Load(workload=Chat(users=2, turns=2)), Known(), "asked", None)
    assert {body["model"] for body in bodies(plan)} == {"asked"}


async def test_what_is_written_is_what_is_sent(tmp_path):
    plan = await make_plan(Load(seed=5), Known(), "", tmp_path / "new")
    data = (tmp_path / "new" / "workload.jsonl").read_bytes()
    assert plan.source.sha256 == digest(data)
    again = await make_plan(Load(requests=tmp_path / "new" / "workload.jsonl"), Known(), "", None)
    assert again.requests == plan.requests
    assert (again.source.workload, again.source.arrivals) == (None, None)


async def test_a_trace_keeps_its_times_unless_others_are_given(tmp_path):
    source = trace(tmp_path, speed_up=2)
    plan = await make_plan(Load(trace=source), Known(), "", None)
    assert [request.intended_at_s for request in plan.requests] == [0, 0.25, 0.5, 0.75]
    assert plan.source.trace == source
    assert plan.source.arrivals is None
    assert {request.kind for request in plan.requests} == {"completion"}
    steady = Arrivals(request_rate=10, burstiness=math.inf)
    plan = await make_plan(Load(trace=source, arrivals=steady), Known(), "", None)
    assert [request.intended_at_s for request in plan.requests] == [0.1, 0.2, 0.3, 0.4]
    assert "the trace's own times are not used" in plan.source.notes


async def test_recorded_texts_are_sent_as_they_are(tmp_path):
    probe = Known()
    plan = await make_plan(Load(trace=trace(tmp_path, "lmcache")), probe, "", None)
    assert probe.probes == 0
    assert [body["prompt"] for body in bodies(plan)] == ["hi", "hihi", "hihihi", "hihihihi"]
    assert [request.turn for request in plan.requests] == [0, 1, 2, 3]


def test_ids_that_are_hashes_make_text_too():
    def prompt(*ids):
        request = TraceRequest(
            arrival_s=0,
            session="s",
            turn=0,
            prompt_tokens=16 * len(ids),
            output_tokens=1,
            hash_ids=ids,
            block_tokens=16,
        )
        return json.loads(writer.completion(request))["prompt"]

    writer = Writer("m")
    one, other = prompt(2**63 - 1, 5), prompt(2**63 - 1, 2**60)
    assert one[: 16 * 4] == other[: 16 * 4]
    assert one[16 * 4 :] != other[16 * 4 :]
    assert prompt(2**63 - 1, 5) == one


async def test_a_gateway_is_asked_how_many_tokens_a_word_is():
    gateway = FakeGateway()
    gateway.tokens_per_word = 3
    async with serving(gateway) as url, Admin(url) as admin:
        assert await GatewayProbe(url, admin).tokens_per_word("fake-model") == 3
    assert gateway.requests_total == 0


@pytest.mark.parametrize(
    ("attribute", "value", "said"),
    [("tokens_per_word", 0, "cannot be trusted"), ("usage_name", "other", "without usage")],
)
async def test_a_probe_that_tells_nothing_is_an_error(attribute, value, said):
    gateway = FakeGateway()
    setattr(gateway, attribute, value)
    async with serving(gateway) as url, Admin(url) as admin:
        with pytest.raises(AdminError, match=said):
            await GatewayProbe(url, admin).tokens_per_word("fake-model")
    with pytest.raises(AdminError, match="no answer"):
        async with Admin("http://127.0.0.1:1") as admin:
            await GatewayProbe("http://127.0.0.1:1", admin).tokens_per_word("m")
