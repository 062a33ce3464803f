"""`loadgen simulate`: what it takes, what it writes, how it ends."""

import json
from array import array

import msgspec
import pytest

from cluster.settings import WorkerSettings
from loadgen.cli import main
from loadgen.plan import Load, TraceSource
from loadgen.requests import Request, encode_requests
from loadgen.simulation.fleet import FleetOptions
from loadgen.simulation.prompts import packed_tokens
from loadgen.simulation.run import SimulateOptions, loads_of
from loadgen.simulation.source import sent_of
from loadgen.slowest import WORST
from loadgen.traces import TraceOptions
from router.openai_api import parse_either
from router.tokenization import Encoder
from worker.build import build_engine
from worker.emulated_profiles import CostModel, Profile

WORKLOAD = ["--workload", "rag", "--request-rate", "20", "--num-prompts", "40"]
SMALL = ["--workers", "3", "--policies", "round_robin,locality"]


def run(arguments):
    with pytest.raises(SystemExit) as ended:
        main(["simulate", *arguments])
    return ended.value.code


def summary_of(folder):
    return json.loads((folder / "summary.json").read_text())


def body(**fields):
    return msgspec.Raw(msgspec.json.encode({"model": "m", "stream": True} | fields))


def request_file(folder):
    path = folder / "file.jsonl"
    shared = {"role": "system", "content": "Grüße, 世界. " * 20}
    bodies = [
        body(messages=[shared, {"role": "user", "content": "one"}], max_tokens=5),
        body(messages=[shared, {"role": "user", "content": "other"}], max_completion_tokens=7),
    ]
    requests = [
        Request(id=f"r{n}", intended_at_s=float(n), session="s", turn=n, group="g", body=body)
        for n, body in enumerate(bodies)
    ]
    path.write_bytes(encode_requests(requests))
    return path, bodies


def test_the_summary_is_that_of_a_live_run_and_says_simulated(tmp_path):
    assert run([*WORKLOAD, *SMALL, "--goodput", "ttft:500", "--out", str(tmp_path)]) == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["command"], summary["emulated"], summary["valid"]) == ("simulate", True, True)
    assert {worker["device"] for worker in summary["fleet"]} == {"simulated:h100-llama3-8b"}
    assert any("no request was sent" in note for note in summary["source"]["notes"])
    locality = summary["arms"]["locality"]
    assert locality["requests"] == summary["source"]["requests"] > 0
    assert locality["cached_token_ratio"] <= summary["ideal"]["cached_token_ratio"]
    assert locality["ttft_ms"]["mean"] > 0
    assert "round_robin" in summary["paired"]["locality"]["against"]
    assert "<strong>simulated</strong>" in (tmp_path / "report.html").read_text()


def test_the_same_seed_writes_the_same_outcomes(tmp_path):
    for name in ("one", "other"):
        assert run([*WORKLOAD, *SMALL, "--seed", "3", "--out", str(tmp_path / name)]) == 0
    one, other = ((tmp_path / n / "requests.jsonl").read_bytes() for n in ("one", "other"))
    assert one == other


def test_the_slowest_requests_are_shown_with_the_decisions_that_were_taken(tmp_path):
    assert run([*WORKLOAD, *SMALL, "--out", str(tmp_path)]) == 0
    page = (tmp_path / "report.html").read_text()
    assert page.count("<details") == page.count("<th>of it coming</th>") == 2 * WORST
    assert page.count("<td>→ w00") == 2 * WORST
    assert "Decision not available" not in page


def test_repeats_have_other_seeds_and_the_first_is_the_run_without_them(tmp_path, capsys):
    flags = [*WORKLOAD, *SMALL, "--seed", "3"]
    assert run([*flags, "--out", str(tmp_path / "one")]) == 0
    assert "in this one run" in capsys.readouterr().out
    assert run([*flags, "--repeats", "3", "--out", str(tmp_path / "three")]) == 0
    assert "one run" not in capsys.readouterr().out
    one, three = (
        [json.loads(line) for line in (tmp_path / n / "requests.jsonl").read_text().splitlines()]
        for n in ("one", "three")
    )
    assert [line for line in three if line["repeat"] == 0] == one
    times = {
        tuple(o["intended_s"] for o in three if o["repeat"] == repeat and o["arm"] == "locality")
        for repeat in range(3)
    }
    assert len(times) == 3
    summary = summary_of(tmp_path / "three")
    assert (summary["repeats"], len(summary["arms"]["locality"]["repeats"])) == (3, 3)
    assert any("seeds 3 to 5" in note for note in summary["source"]["notes"])


def test_the_ideal_of_repeats_is_the_mean_of_their_seeds(tmp_path):
    flags = [*WORKLOAD, "--workers", "1", "--policies", "locality"]
    ideals = []
    for seed in (3, 4, 5):
        out = tmp_path / str(seed)
        assert run([*flags, "--seed", str(seed), "--out", str(out)]) == 0
        ideals.append(summary_of(out)["ideal"])
    out = tmp_path / "repeats"
    assert run([*flags, "--seed", "3", "--repeats", "3", "--out", str(out)]) == 0
    for name, value in summary_of(out)["ideal"].items():
        single = [ideal[name] for ideal in ideals]
        assert len(set(single)) == 3
        assert value == pytest.approx(sum(single) / 3, abs=0.5 if name == "distinct_tokens" else 0)


def test_repeats_of_given_requests_differ_in_the_chance_in_ties(tmp_path):
    path, _ = request_file(tmp_path)
    flags = ["--requests", str(path), "--workers", "50", "--policies", "random"]
    assert run([*flags, "--repeats", "3", "--out", str(tmp_path)]) == 0
    placed = {0: [], 1: [], 2: []}
    for line in (tmp_path / "requests.jsonl").read_text().splitlines():
        outcome = json.loads(line)
        placed[outcome["repeat"]].append(outcome["worker"])
    assert len({tuple(workers) for workers in placed.values()}) == 3


def test_each_repeat_of_a_trace_has_the_next_seed_for_texts_and_for_the_spread():
    taken = TraceOptions(speed_up=2.0, seed=7)
    trace = TraceSource(files=("t.jsonl",), format="mooncake", options=taken)
    profile = Profile(cost=CostModel(step_s=1.0), kv_tokens=1000, context_tokens=1000)
    options = SimulateOptions(
        load=Load(trace=trace, seed=7),
        policies=("random",),
        fleet=FleetOptions(workers=1, profile=profile, profile_name="any"),
        repeats=3,
    )
    loads = loads_of(options)
    assert [load.seed for load in loads] == [7, 8, 9]
    assert [load.trace.options.seed for load in loads] == [7, 8, 9]
    assert loads[0] == options.load
    assert {load.trace.options.speed_up for load in loads} == {2.0}


def test_a_fleet_that_cannot_serve_the_requests_is_invalid(tmp_path, capsys):
    assert run([*WORKLOAD, *SMALL, "--kv-tokens", "160", "--out", str(tmp_path)]) == 3
    assert "requests failed" in capsys.readouterr().out


def test_prompts_over_the_context_are_left_out_of_every_arm_and_counted(tmp_path, capsys):
    path, _ = request_file(tmp_path)
    lengths = [one.prompt_tokens for one in sent_of(Load(requests=path), 16).requests]
    context_tokens = max(lengths)  # one token short of what the longest prompt needs
    profile = tmp_path / "small.toml"
    profile.write_text(
        f"kv_tokens = 50_000\ncontext_tokens = {context_tokens}\n[cost]\nstep_s = 0.5\n"
    )
    flags = ["--requests", str(path), "--workers", "1", "--profile", str(profile)]
    assert run([*flags, "--out", str(tmp_path)]) == 3
    assert "--drop-over-context" in capsys.readouterr().out
    assert run([*flags, "--drop-over-context", "--out", str(tmp_path)]) == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    left = sum(length < context_tokens for length in lengths)
    assert {arm["requests"] for arm in summary["arms"].values()} == {left}
    note = f"{len(lengths) - left} of {len(lengths)} requests left out"
    assert any(note in text for text in summary["source"]["notes"])


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--policies", "greedy"], "there is no policy"),
        (["--policies", "random,random"], "once each"),
        (["--profile", "abacus"], "h100-llama3-8b"),
        (["--kv-tokens", "3"], "capacity_blocks"),
        (["--repeats", "0"], "--repeats"),
    ],
)
def test_wrong_usage_is_said_in_words(flags, said, tmp_path, capsys):
    assert run([*WORKLOAD, *flags, "--out", str(tmp_path)]) == 2
    assert said in capsys.readouterr().err


def test_a_profile_may_be_a_file(tmp_path):
    profile = tmp_path / "mine.toml"
    profile.write_text("kv_tokens = 50_000\ncontext_tokens = 9000\n[cost]\nstep_s = 0.5\n")
    assert run([*WORKLOAD, *SMALL, "--profile", str(profile), "--out", str(tmp_path)]) == 0
    arm = json.loads((tmp_path / "summary.json").read_text())["arms"]["locality"]
    assert arm["tpot_ms"]["mean"] == pytest.approx(500)


def test_a_request_file_is_simulated_with_the_tokens_of_an_emulated_worker(tmp_path):
    path, bodies = request_file(tmp_path)
    one, other = sent_of(Load(requests=path), 16).requests
    _, info = build_engine(WorkerSettings(model="emulated:steady-25ms", kv_blocks=8))
    encoder = Encoder(info.model)
    packed = [encoder.encode(encoder.render(parse_either(bytes(b))), bos=False) for b in bodies]
    ids = [array("I", tokens).tolist() for tokens in packed]
    assert [one.prompt_tokens, other.prompt_tokens] == list(map(len, ids))
    assert [one.output_tokens, other.output_tokens] == [5, 7]
    common = next(i for i, (a, b) in enumerate(zip(*ids, strict=False)) if a != b)
    assert common > 100
    shared = sum(a == b for a, b in zip(one.hash_ids, other.hash_ids, strict=False))
    assert shared == common // 16
    assert packed_tokens(one)[: 64 * shared] == packed_tokens(other)[: 64 * shared]
