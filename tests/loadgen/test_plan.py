import json
import math

import pytest

from loadgen import plan as plan_module
from loadgen.admin import Admin, AdminError
from loadgen.arrivals import Arrivals
from loadgen.bodies import Writer
from loadgen.plan import Load, TraceSource, make_plan
from loadgen.probe import GatewayProbe
from loadgen.requests import digest
from loadgen.traces import TraceError, TraceOptions, TraceRequest
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


def unshared(count, blocks=1, block_tokens=16):
    """Prompts of whole blocks of which no two share any."""
    return [
        TraceRequest(
            arrival_s=float(n),
            session=str(n),
            turn=0,
            prompt_tokens=blocks * block_tokens,
            output_tokens=1,
            hash_ids=tuple(range(n * blocks, (n + 1) * blocks)),
            block_tokens=block_tokens,
        )
        for n in range(count)
    ]


@pytest.mark.parametrize(("words", "count"), [(1, 2000), (2, 20_000), (3, 20_000)])
@pytest.mark.parametrize("blocks", [1, 3])
def test_blocks_that_look_alike_after_the_same_are_counted(words, count, blocks):
    writer = Writer("m", tokens_per_word=4.0)
    requests = unshared(count, blocks, block_tokens=4 * words)
    found = writer.confusion(requests)
    texts = [json.loads(writer.completion(request))["prompt"] for request in requests]
    begins = {text[: 4 * words * n] for text in texts for n in range(1, blocks + 1)}
    assert found.blocks == count * blocks
    assert found.confused == count * blocks - len(begins)
    assert (found.confused > 0) == (words == 1)


def test_blocks_of_four_words_are_never_alike():
    writer = Writer("m", tokens_per_word=4.0)
    requests = unshared(50_000)
    assert writer.confusion(requests).confused == 0
    assert len({writer.completion(request) for request in requests}) == 50_000


def bailian(tmp_path, prompts, **options):
    rows = [
        {
            "chat_id": i, "parent_chat_id": -1, "timestamp": i * 0.5, "input_length": 16,
            "output_length": 2, "type": "text", "turn": 1, "hash_ids": [i],
        }
        for i in range(prompts)
    ]  # fmt: skip
    path = tmp_path / "bailian.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return TraceSource(files=(str(path),), format="bailian", options=TraceOptions(**options))


async def test_blocks_too_short_to_be_told_apart_are_refused(tmp_path):
    """16 tokens × 0.25 are one word of a vocabulary of bytes: of these there are 256."""
    source = bailian(tmp_path, 2000, input_scale=0.25)
    with pytest.raises(TraceError, match=r"1,744 of 2,000 .* --input-scale to 1 or more"):
        await make_plan(Load(trace=source), Known(tokens_per_word=4.0), "", tmp_path)
    assert not (tmp_path / "workload.jsonl").exists()
    whole = bailian(tmp_path, 2000, input_scale=1.0)
    plan = await make_plan(Load(trace=whole), Known(tokens_per_word=4.0), "", None)
    assert len({body["prompt"] for body in bodies(plan)}) == 2000


async def test_few_blocks_that_look_alike_are_noted(tmp_path, monkeypatch):
    monkeypatch.setattr(plan_module, "MOST_CONFUSED", 0.9)
    source = bailian(tmp_path, 2000, input_scale=0.25)
    plan = await make_plan(Load(trace=source), Known(tokens_per_word=4.0), "", None)
    assert any("1,744 of 2,000 different ones" in note for note in plan.source.notes)
