import itertools
import subprocess
import sys

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen import prose
from loadgen.arrivals import interleave, poisson_gaps_s
from loadgen.requests import decode_requests, digest, encode_requests
from loadgen.workloads import SharedPrefix, WorkloadError, shared_prefix

SMALL = SharedPrefix(groups=3, users=2, turns=3, system_tokens=60, output_tokens=5)


def file_of(parameters=SMALL, seed=0, rate=5.0):
    conversations = shared_prefix(parameters, "m", seed)
    gaps = poisson_gaps_s(rate, seed)
    return encode_requests(interleave(conversations, gaps, parameters.think_time_s, seed))


def test_the_same_seed_gives_the_same_file_in_another_process():
    code = (
        "from tests.loadgen.test_workloads import file_of; from loadgen.requests import digest;"
        "print(digest(file_of()))"
    )
    other = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONHASHSEED": "77"},
    )
    assert other.stdout.strip() == digest(file_of())


def test_another_seed_gives_other_texts_and_times():
    one, other = decode_requests(file_of(seed=1)), decode_requests(file_of(seed=2))
    assert {bytes(r.body) for r in one}.isdisjoint(bytes(r.body) for r in other)
    assert [r.intended_at_s for r in one] != [r.intended_at_s for r in other]


@settings(max_examples=25, deadline=None)
@given(
    groups=st.integers(1, 5),
    users=st.integers(1, 4),
    turns=st.integers(1, 7),
    system_tokens=st.integers(0, 100),
    think_time_s=st.sampled_from([0.0, 0.5, 30.0]),
    seed=st.integers(0, 1000),
)
def test_every_request_comes_once_in_time_and_extends_the_turn_before(
    groups, users, turns, system_tokens, think_time_s, seed
):
    parameters = SharedPrefix(
        groups=groups,
        users=users,
        turns=turns,
        system_tokens=system_tokens,
        think_time_s=think_time_s,
    )
    requests = decode_requests(file_of(parameters, seed))
    assert len(requests) == groups * users * turns
    sessions: dict[str, list] = {}
    for request in requests:
        sessions.setdefault(request.session, []).append(request)
    assert len(sessions) == groups * users
    systems: dict[str, set] = {}
    openings = set()
    for turns_of_one in sessions.values():
        assert [r.turn for r in turns_of_one] == list(range(turns))
        histories = [msgspec.json.decode(r.body)["messages"] for r in turns_of_one]
        for before, after in itertools.pairwise(turns_of_one):
            assert after.intended_at_s >= before.intended_at_s + think_time_s - 1e-9
        for turn, history in enumerate(histories):
            assert [m["role"] for m in history] == ["system"] + ["user", "assistant"] * turn + [
                "user"
            ]
            assert turn == 0 or history[: 2 * turn] == histories[turn - 1]
        systems.setdefault(turns_of_one[0].group, set()).add(histories[0][0]["content"])
        openings.add(tuple(m["content"] for m in histories[0]))
    assert all(len(texts) == 1 for texts in systems.values())
    assert len(set.union(*systems.values())) == groups
    assert len(openings) == groups * users


@pytest.mark.parametrize("words", [80, 500, 3000])
def test_a_system_prompt_is_as_long_as_asked(words):
    body = shared_prefix(SharedPrefix(system_tokens=round(words / prose.WORDS_PER_TOKEN)), "m", 4)
    system = msgspec.json.decode(body[0].turns[0])["messages"][0]["content"]
    assert words - 2 <= len(system.split()) < words + 40


def test_bodies_ask_for_a_stream_with_usage():
    body = msgspec.json.decode(shared_prefix(SMALL, "some-model", 0)[0].turns[0])
    assert body["model"] == "some-model"
    assert body["max_tokens"] == 5
    assert body["stream"] is True
    assert body["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    assert "ignore_eos" not in body


def test_names_stay_distinct_when_there_are_many():
    many = SharedPrefix(groups=400, users=2, turns=1, system_tokens=0)
    starts = {c.turns[0] for c in shared_prefix(many, "m", 0)}
    assert len(starts) == 800


def test_more_users_than_ways_to_begin_share_some():
    many = SharedPrefix(groups=1, users=100, turns=1, system_tokens=0)
    conversations = shared_prefix(many, "m", 0)
    assert len({c.session for c in conversations}) == 100
    assert len({c.turns[0] for c in conversations}) == 60


@pytest.mark.parametrize(
    "wrong",
    [{"groups": 0}, {"users": 0}, {"turns": 0}, {"system_tokens": -1}, {"think_time_s": -1}],
)
def test_impossible_sizes_are_named(wrong):
    with pytest.raises(WorkloadError, match=next(iter(wrong))):
        shared_prefix(SharedPrefix(**wrong), "m", 0)
