import asyncio
import json
import math

import msgspec
import pytest

from loadgen import wording
from loadgen.admin import AdminError
from loadgen.arm import OptionError
from loadgen.arrivals import Arrivals
from loadgen.compare import CompareOptions, RunOptions, compare_arms, run_arm
from loadgen.goodput import GoodputOptions, search_policies
from loadgen.measures import Slo
from loadgen.plan import Load, TraceSource
from loadgen.requests import digest
from loadgen.slowest import WORST
from loadgen.workloads import SharedPrefix
from tests.loadgen.fake_gateway import FakeGateway, chunk, serving, whole_answer

SMALL = SharedPrefix(groups=3, users=2, turns=2, system_tokens=40, output_tokens=4)
REQUESTS = 12


def options(url, kind=CompareOptions, **changes):
    # The bound on client lag is wide: a test machine may be busy, and lag has its own tests.
    fields = {
        "url": url,
        "load": Load(workload=SMALL, arrivals=Arrivals(request_rate=100.0)),
        "num_warmups": 2,
        **({"repeats": 1} if kind is CompareOptions else {}),
        "quiet_timeout_s": 0.3,
        "max_client_lag_ms": 30_000.0,
    }
    return kind(**{**fields, **changes})


async def test_two_policies_on_the_same_bytes(tmp_path):
    gateway = FakeGateway()
    gateway.policy = "round_robin"
    async with serving(gateway) as url:
        summary = await compare_arms(
            options(
                url, out=tmp_path, policies=("locality", "round_robin"), slo=Slo(ttft_ms=60_000)
            )
        )
    assert summary.valid, summary.reasons
    arms = summary.arms
    assert list(arms) == ["locality", "round_robin"]
    assert [arms[name].requests for name in arms] == [REQUESTS, REQUESTS]
    assert arms["locality"].cached_token_ratio > arms["round_robin"].cached_token_ratio
    assert summary.paired["round_robin"].against == "locality"
    assert summary.paired["round_robin"].pairs == REQUESTS
    assert summary.paired["round_robin"].cached_token_ratio.difference < 0
    assert arms["locality"].cached_token_ratio <= summary.ideal.cached_token_ratio + 0.02

    counted = gateway.bodies[2:14], gateway.bodies[16:28]
    assert [policy for policy, _ in counted[0]] == ["locality"] * REQUESTS
    assert [policy for policy, _ in counted[1]] == ["round_robin"] * REQUESTS
    assert sorted(body for _, body in counted[0]) == sorted(body for _, body in counted[1])
    assert gateway.flushes == 2
    assert gateway.policy == "round_robin"

    stored = json.loads((tmp_path / "summary.json").read_text())
    assert stored["arms"]["locality"]["ttft_ms"].keys() == {"mean", "p50", "p90", "p99"}
    assert stored["source"]["sha256"] == digest((tmp_path / "workload.jsonl").read_bytes())
    assert stored["valid"] is True
    assert stored["reasons"] == []
    lines = [json.loads(line) for line in (tmp_path / "requests.jsonl").read_text().splitlines()]
    assert len(lines) == 2 * REQUESTS
    assert {(line["arm"], line["text"]) for line in lines} == {
        ("locality", "Good day."),
        ("round_robin", "Good day."),
    }
    assert all(line["sent_s"] >= line["intended_s"] for line in lines)
    assert (tmp_path / "report.html").stat().st_size > 5000


async def test_a_request_file_is_replayed_as_it_is(tmp_path):
    gateway = FakeGateway()
    async with serving(gateway) as url:
        first = await run_arm(options(url, RunOptions, out=tmp_path))
        before = list(gateway.bodies)
        gateway.bodies.clear()
        second = await run_arm(
            options(url, RunOptions, load=Load(requests=tmp_path / "workload.jsonl", seed=99))
        )
    assert first.source.sha256 == second.source.sha256
    assert sorted(gateway.bodies) == sorted(before)
    assert second.source.workload is None


async def test_run_keeps_policy_and_caches_unless_told():
    gateway = FakeGateway()
    async with serving(gateway) as url:
        summary = await run_arm(options(url, RunOptions))
        assert (gateway.flushes, gateway.policies_set) == (0, [])
        assert list(summary.arms) == ["locality"]
        assert summary.valid, summary.reasons
        assert not summary.cold
        assert "caches were not flushed" in wording.load_lines(summary)[0]
        assert len(gateway.bodies) == REQUESTS
        again = await run_arm(options(url, RunOptions, flush=True))
    assert gateway.flushes == 1
    assert again.valid, again.reasons
    assert again.cold
    assert len(gateway.bodies) == 2 * REQUESTS + 2


async def test_others_requests_make_it_invalid():
    gateway = FakeGateway()

    async def behave(gateway, request, body):
        gateway.requests_total += 1
        return await whole_answer(gateway, request, body)

    gateway.behave = behave
    async with serving(gateway) as url:
        summary = await compare_arms(options(url))
    assert not summary.valid
    assert f"locality: the gateway routed {REQUESTS} requests that were not ours" in summary.reasons


async def test_failed_requests_make_it_invalid():
    gateway = FakeGateway()

    async def behave(gateway, request, body):
        response = await gateway.begin(request)
        await response.write(b'data: {"error": {"message": "no memory"}}\n\n')
        return response

    gateway.behave = behave
    async with serving(gateway) as url:
        summary = await compare_arms(options(url))
    assert f"locality: {REQUESTS} requests failed, mostly: no memory" in summary.reasons
    assert summary.ideal is None
    assert summary.arms["locality"].goodput == 0


async def test_unfinished_requests_make_it_invalid():
    gateway = FakeGateway()

    async def behave(gateway, request, body):
        response = await gateway.begin(request)
        await response.write(chunk("a", 1))
        return response

    gateway.behave = behave
    async with serving(gateway) as url:
        summary = await compare_arms(options(url))
    assert any("did not finish" in reason for reason in summary.reasons)


async def test_caches_that_do_not_empty_make_it_invalid():
    gateway = FakeGateway()
    gateway.left_blocks = 5
    async with serving(gateway) as url:
        summary = await compare_arms(options(url))
    assert "locality: caches were not empty at its start: 10 blocks were left" in summary.reasons


async def test_a_gateway_that_is_never_quiet_makes_it_invalid():
    gateway = FakeGateway()
    gateway.running = 1
    async with serving(gateway) as url:
        summary = await compare_arms(options(url, quiet_timeout_s=0.1))
    assert "locality: other requests were running at its start" in summary.reasons


async def test_a_lagging_client_makes_it_invalid():
    async with serving(FakeGateway()) as url:
        summary = await compare_arms(options(url, max_client_lag_ms=0.0))
    assert any("the client lagged" in reason for reason in summary.reasons)


async def test_the_policy_is_put_back_when_interrupted():
    gateway = FakeGateway()
    gateway.policy = "locality"
    held, begun = asyncio.Event(), asyncio.Event()

    async def behave(gateway, request, body):
        begun.set()
        await held.wait()
        return await whole_answer(gateway, request, body)

    gateway.behave = behave
    async with serving(gateway) as url:
        task = asyncio.create_task(
            compare_arms(options(url, policies=("round_robin",), num_warmups=0))
        )
        await begun.wait()
        assert gateway.policy == "round_robin"
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert gateway.policy == "locality"
        held.set()


async def test_an_unknown_policy_is_named_before_anything_changes():
    gateway = FakeGateway()
    async with serving(gateway) as url:
        with pytest.raises(OptionError, match="no policy magic; available: round_robin, locality"):
            await compare_arms(options(url, policies=("round_robin", "magic")))
    assert gateway.policies_set == []


@pytest.mark.parametrize("kind", [CompareOptions, GoodputOptions])
async def test_a_bad_parameter_of_the_last_policy_is_told_before_anything_is_sent(kind, tmp_path):
    gateway = FakeGateway()
    gateway.policy = "locality:tie=0.2"
    asked = ("round_robin", "locality:bad=2")
    given = options("", kind, policies=asked, slo=Slo(ttft_ms=9.0), out=tmp_path / "out")
    async with serving(gateway) as url:
        given = msgspec.structs.replace(given, url=url)
        work = compare_arms(given) if kind is CompareOptions else search_policies(given)
        with pytest.raises(OptionError, match="locality:bad=2: there is no parameter bad"):
            await work
    assert gateway.requests_total == gateway.probes == gateway.flushes == 0
    assert gateway.policy == "locality:tie=0.2"
    assert not (tmp_path / "out").exists()


def test_a_comparison_is_of_three_runs_of_each_policy_unless_told():
    assert CompareOptions(url="").repeats == 3


@pytest.mark.parametrize("policies", [(), ("locality", "locality")])
async def test_policies_must_differ(policies):
    with pytest.raises(OptionError, match="each policy once"):
        await compare_arms(options("http://127.0.0.1:1", policies=policies))


async def test_a_refused_key_says_which_flag_to_set():
    gateway = FakeGateway()
    gateway.admin_key = "right"
    async with serving(gateway) as url:
        with pytest.raises(AdminError, match="--admin-key"):
            await compare_arms(options(url, admin_key="wrong"))
        assert (await compare_arms(options(url, admin_key="right"))).valid


async def test_an_empty_fleet_is_told():
    async with serving(FakeGateway(workers=0)) as url:
        with pytest.raises(AdminError, match="no workers"):
            await run_arm(options(url, RunOptions))


async def test_repeats_are_interleaved_cold_and_pooled(tmp_path):
    gateway = FakeGateway()
    async with serving(gateway) as url:
        summary = await compare_arms(options(url, repeats=3, num_warmups=0, out=tmp_path))
    assert summary.valid, summary.reasons
    assert gateway.flushes == 6
    ran = [policy for policy, _ in gateway.bodies[::REQUESTS]]
    assert ran == [
        "round_robin", "locality", "locality", "round_robin", "round_robin", "locality",
    ]  # fmt: skip
    bodies = {name: [body for policy, body in gateway.bodies if policy == name] for name in ran}
    assert sorted(bodies["locality"]) == sorted(bodies["round_robin"])
    arm = summary.arms["locality"]
    assert arm.requests == 3 * REQUESTS
    assert len(arm.repeats) == 3
    assert summary.paired["locality"].pairs == 3 * REQUESTS
    lines = (tmp_path / "arms.csv").read_text().splitlines()
    assert [line.split(",")[:2] for line in lines[1:]] == [
        [policy, repeat]
        for policy in ("round_robin", "locality")
        for repeat in ("all", "1", "2", "3")
    ]
    assert "Each repeat" in (tmp_path / "report.html").read_text()


async def test_a_closed_loop_keeps_its_bound_and_says_so(tmp_path):
    gateway = FakeGateway()
    running, most = 0, 0
    full = asyncio.Event()

    async def behave(gateway, request, body):
        nonlocal running, most
        running += 1
        most = max(most, running)
        if most == 3:
            full.set()
        await full.wait()
        response = await whole_answer(gateway, request, body)
        running -= 1
        return response

    gateway.behave = behave
    load = Load(workload=SMALL, arrivals=Arrivals(request_rate=float("inf")))
    async with serving(gateway) as url:
        summary = await run_arm(
            options(url, RunOptions, load=load, max_concurrency=3, out=tmp_path)
        )
    assert most == 3
    assert summary.valid, summary.reasons
    assert summary.max_concurrency == 3
    assert "closed loop, at most 3" in wording.load_lines(summary)[0]
    assert "<strong>closed loop</strong>" in (tmp_path / "report.html").read_text()


MOONCAKE = [
    {"timestamp": 0, "input_length": 40, "output_length": 2, "hash_ids": [5]},
    {"timestamp": 20, "input_length": 600, "output_length": 2, "hash_ids": [5, 9]},
]


async def test_a_trace_becomes_completions_of_its_blocks(tmp_path):
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in MOONCAKE))
    gateway = FakeGateway()
    gateway.tokens_per_word = 4
    source = TraceSource(files=(str(tmp_path / "t.jsonl"),), format="mooncake")
    async with serving(gateway) as url:
        summary = await run_arm(
            options(url, RunOptions, load=Load(trace=source), out=tmp_path / "out")
        )
    assert summary.valid, summary.reasons
    assert gateway.probes == 2
    assert any("4 tokens each" in note for note in summary.source.notes)
    one, other = sorted(
        (json.loads(body) for _, body in gateway.bodies), key=lambda body: len(body["prompt"])
    )
    assert one["max_tokens"] == 2
    assert one["ignore_eos"] is True
    assert len(one["prompt"].split()) == 10, "40 tokens at 4 a word"
    assert len(other["prompt"].split()) == 150
    assert other["prompt"].startswith(one["prompt"])
    assert summary.source.trace == source
    report = (tmp_path / "out" / "report.html").read_text()
    assert "format mooncake" in report


async def test_the_worst_requests_are_shown_with_the_decisions_that_were_taken(tmp_path):
    """All at once: no rate is too high for it."""
    gateway = FakeGateway()
    load = Load(workload=SMALL, arrivals=Arrivals(request_rate=math.inf))
    async with serving(gateway) as url:
        summary = await compare_arms(options(url, load=load, out=tmp_path))
    assert summary.valid, summary.reasons
    page = (tmp_path / "report.html").read_text()
    assert page.count("is right: a &lt;test&gt;") == 2 * WORST
    assert "Decision not available" not in page
    lines = [json.loads(line) for line in (tmp_path / "requests.jsonl").read_text().splitlines()]
    workers = {line["request_id"]: line["worker"] for line in lines}
    assert len(workers) == 2 * REQUESTS
    assert workers == gateway.decisions, "the warm-up did not ask"
    assert set(gateway.asked) <= set(workers)


async def test_decisions_that_cannot_be_had_do_not_harm_the_run(tmp_path):
    gateway = FakeGateway()
    gateway.no_decisions = True
    async with serving(gateway) as url:
        summary = await run_arm(options(url, RunOptions, out=tmp_path))
    assert summary.valid, summary.reasons
    page = (tmp_path / "report.html").read_text()
    assert page.count("Decision not available: GET") == WORST
    assert "none is kept" in page
    assert (tmp_path / "load.csv").read_text().count("\n") > 2


async def test_nothing_is_looked_at_where_that_is_asked_for(tmp_path):
    gateway = FakeGateway()
    async with serving(gateway) as url:
        await run_arm(options(url, RunOptions, out=tmp_path, explain=False, sample_interval_s=0.0))
    assert gateway.asked == []
    assert gateway.decisions == {}
    assert (tmp_path / "load.csv").read_text().count("\n") == 1
    assert "decisions were not asked for (--no-explain)" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize(
    ("wrong", "said"),
    [({"repeats": 0}, "repeats"), ({"max_concurrency": 0}, "max_concurrency")],
)
async def test_impossible_options_are_named(wrong, said):
    with pytest.raises(OptionError, match=said):
        await compare_arms(options("http://127.0.0.1:1", **wrong))
