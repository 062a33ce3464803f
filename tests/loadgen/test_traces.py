import gzip
import itertools
import json
import lzma
import tarfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.traces import TraceError, TraceOptions, read_trace, trace_format
from loadgen.traces.shaping import spread_arrivals
from tests.trace_files import need_trace

MOONCAKE = [
    {"timestamp": 0, "input_length": 1000, "output_length": 5, "hash_ids": [0, 1]},
    {"timestamp": 250, "input_length": 1025, "output_length": 0, "hash_ids": [0, 2, 3]},
    {"timestamp": 9000, "input_length": 512, "output_length": 700, "hash_ids": [0]},
]
BAILIAN = [
    {"chat_id": 7, "parent_chat_id": -1, "timestamp": 1.5, "input_length": 40,
     "output_length": 9, "type": "text", "turn": 1, "hash_ids": [1, 2]},
    {"chat_id": 9, "parent_chat_id": 8, "timestamp": 2.0, "input_length": 32,
     "output_length": 9, "type": "image", "turn": 2, "hash_ids": [5, 6]},
    {"chat_id": 8, "parent_chat_id": 7, "timestamp": 3.5, "input_length": 50,
     "output_length": 9, "type": "text", "turn": 2, "hash_ids": [1, 2, 3, 4]},
]  # fmt: skip
AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2023-11-16 18:15:46.6805900,374,44\n"
    "2023-11-16 18:15:50.9951690,396,109\n"
)


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read(path, format="mooncake", **options):
    return read_trace([path], format, TraceOptions(**options))


def test_mooncake_requests_are_what_the_lines_say(tmp_path):
    trace = read(write(tmp_path / "t.jsonl", MOONCAKE))
    first, second, third = trace.requests
    assert (first.arrival_s, second.arrival_s, third.arrival_s) == (0, 0.25, 9)
    assert (first.prompt_tokens, first.output_tokens) == (1000, 5)
    assert (first.hash_ids, first.block_tokens) == ((0, 1), 512)
    assert len({request.session for request in trace.requests}) == 3
    assert second.output_tokens == 1, "an answer without tokens cannot be asked for"
    assert trace.notes == []


def test_bailian_sessions_are_trees_of_chats_counted_by_arrival(tmp_path):
    first, orphan, child = read(write(tmp_path / "t", BAILIAN), "bailian").requests
    assert (first.session, first.turn, first.arrival_s, first.kind) == ("c7", 0, 0, "text")
    assert (child.session, child.turn, child.arrival_s) == ("c7", 1, 2.0)
    assert (orphan.session, orphan.turn, orphan.kind) == ("c9", 0, "image")


def test_a_partial_block_without_an_id_gets_one_of_its_own(tmp_path):
    first, _, child = read(write(tmp_path / "t", BAILIAN), "bailian").requests
    assert first.hash_ids[:2] == (1, 2)
    assert first.hash_ids[2] > 6
    assert child.hash_ids == (1, 2, 3, 4), "50 tokens are three blocks and a partial one"


def test_azure_prompts_share_nothing(tmp_path):
    (tmp_path / "a.csv").write_text(AZURE)
    one, other = read(tmp_path / "a.csv", "azure").requests
    assert other.arrival_s == pytest.approx(4.314579)
    assert (one.prompt_tokens, one.output_tokens) == (374, 44)
    assert set(one.hash_ids).isdisjoint(other.hash_ids)
    assert len(one.hash_ids) == 24


def test_azure_rows_of_2024_carry_an_offset(tmp_path):
    rows = [
        "TIMESTAMP,ContextTokens,GeneratedTokens",
        "2024-05-10 00:00:00.009930+00:00,2162,5",
        "2024-05-10 00:00:01+00:00,10,7",
        "2024-05-10 02:00:02.5+02:00,11,8",
    ]
    (tmp_path / "a.csv").write_text("\n".join(rows))
    first, second, third = read(tmp_path / "a.csv", "azure").requests
    assert (first.prompt_tokens, first.output_tokens) == (2162, 5)
    assert second.arrival_s == pytest.approx(1 - 0.00993)
    assert third.arrival_s == pytest.approx(2.5 - 0.00993)


def test_lmcache_texts_share_ids_as_far_as_they_agree(tmp_path):
    rows = [
        {"timestamp": 5_000_000, "input": "x" * 200, "output": "yes", "session_id": 4},
        {"timestamp": 7_500_000, "input": "x" * 150 + "y" * 150, "output": "", "session_id": 4},
    ]
    trace = read(write(tmp_path / "t", rows), "lmcache")
    one, other = trace.requests
    assert (one.session, one.turn, other.turn, other.arrival_s) == ("s4", 0, 1, 2.5)
    assert one.text == "x" * 200
    assert (one.prompt_tokens, one.output_tokens, other.output_tokens) == (50, 1, 1)
    assert one.hash_ids[:2] == other.hash_ids[:2]
    assert set(one.hash_ids[2:]).isdisjoint(other.hash_ids[2:])
    assert any("4 characters a token" in note for note in trace.notes)


@pytest.mark.parametrize("form", ["gz", "xz", "tar", "folder"])
def test_packed_traces_are_read_like_plain_ones(tmp_path, form):
    plain = write(tmp_path / "t.jsonl", MOONCAKE)
    data = plain.read_bytes()
    if form == "gz":
        path = tmp_path / "t.jsonl.gz"
        path.write_bytes(gzip.compress(data))
    elif form == "xz":
        path = tmp_path / "t.jsonl.xz"
        path.write_bytes(lzma.compress(data))
    elif form == "tar":
        path = tmp_path / "t.tar.xz"
        with tarfile.open(path, "w:xz") as archive:
            archive.add(plain, "inner/t.jsonl")
    else:
        path = tmp_path / "folder"
        path.mkdir()
        plain.rename(path / "t.jsonl")
        plain = path / "t.jsonl"
    assert read(path) == read(plain)


@pytest.mark.parametrize(
    ("format", "line", "said"),
    [
        ("mooncake", '{"timestamp": 0}', "line 2: not a request of the mooncake format"),
        ("bailian", "no json", "line 2: not a request of the bailian format"),
        ("lmcache", '{"timestamp": 0}', "line 2: not a request of the lmcache format"),
        ("azure", "2023-11-16 18:15:46,12", "line 2: not a row of TIMESTAMP"),
        (
            "mooncake",
            '{"timestamp": 0, "input_length": 513, "output_length": 1, "hash_ids": []}',
            "line 2: 513 tokens in blocks of 512 need 1 full hash_ids and may have one partial",
        ),
        (
            "mooncake",
            '{"timestamp": 0, "input_length": 0, "output_length": 1, "hash_ids": []}',
            "at least 1 token",
        ),
        (
            "mooncake",
            '{"timestamp": -1, "input_length": 1, "output_length": 1, "hash_ids": [1]}',
            "must not be negative",
        ),
    ],
)
def test_a_bad_line_is_named_with_its_mend(tmp_path, format, line, said):
    good = {
        "mooncake": json.dumps(MOONCAKE[0]),
        "bailian": json.dumps(BAILIAN[0]),
        "lmcache": '{"timestamp": 1, "input": "a", "output": "b", "session_id": 1}',
        "azure": AZURE.splitlines()[0],
    }[format]
    (tmp_path / "t.txt").write_text(f"{good}\n{line}\n")
    with pytest.raises(TraceError, match=r"t\.txt line 2") as raised:
        read(tmp_path / "t.txt", format)
    assert said in str(raised.value)


def test_what_cannot_be_read_is_said(tmp_path):
    with pytest.raises(TraceError, match="cannot read the trace"):
        read(tmp_path / "none.jsonl")
    (tmp_path / "bad.xz").write_bytes(b"nothing")
    with pytest.raises(TraceError, match="cannot read the trace"):
        read(tmp_path / "bad.xz")
    (tmp_path / "empty").write_bytes(b"\n")
    with pytest.raises(TraceError, match="holds no requests"):
        read(tmp_path / "empty")
    with pytest.raises(TraceError, match="begins with the header"):
        read(tmp_path / "empty", "azure")
    with pytest.raises(TraceError, match="mooncake, bailian, lmcache, azure"):
        trace_format("other")


def test_quantised_times_are_spread_inside_their_quantum_and_stay_in_order():
    recorded = [0.0] * 4 + [3.0] * 5 + [6.001] * 3
    spread, quantum = spread_arrivals(recorded, seed=1)
    assert quantum == pytest.approx(3.0, abs=0.01)
    assert spread == sorted(spread)
    assert all(0 <= after - before <= 3.001 for before, after in zip(recorded, spread, strict=True))
    assert len(set(spread)) == 12
    assert spread == spread_arrivals(recorded, seed=1)[0]
    assert spread != spread_arrivals(recorded, seed=2)[0]


def test_times_that_are_not_quantised_stay():
    assert spread_arrivals([0.0, 0.1, 0.1, 0.9], seed=1) == ([0.0, 0.1, 0.1, 0.9], None)


def test_the_summary_is_told_of_the_spread_or_of_its_absence(tmp_path):
    rows = [{**MOONCAKE[0], "timestamp": 3000 * (i // 4)} for i in range(16)]
    path = write(tmp_path / "t", rows)
    spread = read(path, seed=3)
    assert (
        "in steps of 3 s; arrivals are spread at random within a step (seed 3)" in spread.notes[0]
    )
    together = read(path, spread_timestamps=False)
    assert "requests of a step are sent together" in together.notes[0]
    assert [request.arrival_s for request in together.requests] == [3 * (i // 4) for i in range(16)]


def test_speed_limit_and_cuts_are_done_and_told(tmp_path):
    trace = read(
        write(tmp_path / "t", MOONCAKE),
        num_prompts=2,
        speed_up=5,
        max_input_tokens=600,
        max_output_tokens=3,
    )
    first, second = trace.requests
    assert second.arrival_s == pytest.approx(0.05)
    assert (first.prompt_tokens, first.hash_ids, first.output_tokens) == (600, (0, 1), 3)
    assert second.hash_ids == (0, 2)
    told = "; ".join(trace.notes)
    assert "first 2 of the trace's 3 requests" in told
    assert "5 times as fast" in told
    assert "2 of 2 prompts were cut to 600 tokens" in told
    assert "1 of 2 answers were cut to 3 tokens" in told


@given(
    lengths=st.lists(st.integers(1, 5000), min_size=1, max_size=20),
    scale=st.sampled_from([0.01, 0.0625, 0.3, 1.0, 2.5]),
    cut=st.one_of(st.none(), st.integers(1, 4000)),
)
def test_ids_cover_every_prompt_whatever_its_scale(tmp_path_factory, lengths, scale, cut):
    rows = [
        {
            "timestamp": i,
            "input_length": n,
            "output_length": 1,
            "hash_ids": list(range(-(-n // 512))),
        }
        for i, n in enumerate(lengths)
    ]
    path = write(tmp_path_factory.mktemp("trace") / "t", rows)
    for request in read(path, input_scale=scale, max_input_tokens=cut).requests:
        assert len(request.hash_ids) == -(-request.prompt_tokens // request.block_tokens)
        assert request.prompt_tokens >= 1


@pytest.mark.parametrize(
    "wrong", [{"speed_up": 0}, {"input_scale": -1}, {"num_prompts": 0}, {"max_input_tokens": 0}]
)
def test_impossible_options_are_named(tmp_path, wrong):
    with pytest.raises(TraceError, match=next(iter(wrong))):
        read(write(tmp_path / "t", MOONCAKE), **wrong)


def test_texts_are_not_scaled(tmp_path):
    row = {"timestamp": 1, "input": "a" * 400, "output": "b", "session_id": 1}
    path = write(tmp_path / "t", [row])
    with pytest.raises(TraceError, match="max-input-tokens"):
        read(path, "lmcache", input_scale=0.5)
    assert read(path, "lmcache", max_input_tokens=10).requests[0].text == "a" * 40


def test_the_mooncake_conversation_trace_is_read_whole():
    trace = read(need_trace("mooncake_conversation.jsonl"))
    requests = trace.requests
    assert len(requests) == 12_031
    assert sum(r.prompt_tokens for r in requests) / len(requests) == pytest.approx(12_035, abs=1)
    assert sum(r.output_tokens for r in requests) / len(requests) == pytest.approx(343, abs=1)
    arrivals = [request.arrival_s for request in requests]
    assert arrivals == sorted(arrivals)
    assert len(set(arrivals)) > 12_000
    assert 3_530 < arrivals[-1] < 3_541
    held: set[int] = set()
    hit = 0
    for request in requests:
        known = itertools.takewhile(held.__contains__, request.hash_ids)
        hit += min(512 * sum(1 for _ in known), request.prompt_tokens)
        held.update(request.hash_ids)
    assert hit / sum(r.prompt_tokens for r in requests) == pytest.approx(0.374, abs=0.005)


def test_the_azure_trace_is_read_whole():
    trace = read(need_trace("azure2023_conv.csv"), "azure")
    assert len(trace.requests) == 19_366


def test_short_agent_sessions_are_read_whole():
    trace = read(need_trace("lmcache_taubench.tar.xz"), "lmcache")
    assert len({request.session for request in trace.requests}) == 24, "one of 25 files is empty"


def test_coding_agents_prompts_grow_turn_by_turn():
    trace = read(need_trace("lmcache_miniswe_10.tar.xz"), "lmcache")
    sessions: dict[str, list] = {}
    for request in trace.requests:
        sessions.setdefault(request.session, []).append(request)
    grown = [
        after.text.startswith(before.text[:100])
        for turns in sessions.values()
        for before, after in itertools.pairwise(turns)
    ]
    assert len(grown) > 5
    assert sum(grown) > 0.9 * len(grown)
