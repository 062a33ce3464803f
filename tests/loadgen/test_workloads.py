import itertools
import subprocess
import sys
from collections import Counter

import msgspec
import pytest

from loadgen import prose
from loadgen.arrivals import Arrivals, arrange
from loadgen.bodies import Writer
from loadgen.token_level import trace_of
from loadgen.workloads import (
    WORKLOADS,
    Agent,
    AnyWorkload,
    Chat,
    HotPrefix,
    NoSharing,
    Rag,
    SharedPrefix,
    WorkloadError,
    make_workload,
)

SMALL = {
    "shared_prefix": SharedPrefix(groups=3, users=2, turns=3, system_tokens=60, output_tokens=5),
    "chat": Chat(users=4, turns=3, system_tokens=50, input_tokens=20, output_tokens=9),
    "agent": Agent(tasks=3, steps=4, system_tokens=60, input_tokens=30, tool_tokens=40),
    "rag": Rag(num_prompts=12, documents=5, documents_a_prompt=2, document_tokens=40),
    "no_sharing": NoSharing(num_prompts=9, input_tokens=50),
    "hot_prefix": HotPrefix(num_prompts=20, prefix_tokens=60, input_tokens=20),
}
every_workload = pytest.mark.parametrize("name", list(SMALL))


def bodies(workload, seed=0):
    writer = Writer("m")
    return [writer.chat(arrival.asked) for arrival in arrange(workload, Arrivals(), seed)]


def contents(body):
    return [message["content"] for message in msgspec.json.decode(body)["messages"]]


def hit_ratio(workload, block_tokens=16, seed=0):
    """Of an infinite cache."""
    held, hit, total = set(), 0, 0
    for request in trace_of(arrange(workload, Arrivals(), seed), block_tokens):
        known = sum(1 for _ in itertools.takewhile(held.__contains__, request.hash_ids))
        hit += min(known * block_tokens, request.prompt_tokens)
        total += request.prompt_tokens
        held.update(request.hash_ids)
    return hit / total


def test_every_workload_is_tried_here():
    assert set(SMALL) == set(WORKLOADS)


@every_workload
def test_the_same_seed_gives_the_same_bytes_in_another_process(name):
    code = (
        "from tests.loadgen.test_workloads import SMALL, bodies; import hashlib;"
        f"print(hashlib.sha256(b''.join(bodies(SMALL[{name!r}]))).hexdigest())"
    )
    out = [
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            env={"PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("77", "78")
    ]
    assert out[0] == out[1]


def test_workloads_of_one_seed_have_no_text_in_common():
    made = [name for name in SMALL if name != "shared_prefix"]
    firsts = [{contents(body)[0][:40] for body in bodies(SMALL[name])} for name in made]
    for one, other in itertools.combinations(firsts, 2):
        assert one.isdisjoint(other)


@every_workload
def test_another_seed_gives_other_texts_from_the_first_word_on(name):
    firsts = [{contents(body)[0][:40] for body in bodies(SMALL[name], seed)} for seed in (1, 2)]
    assert firsts[0].isdisjoint(firsts[1])


@every_workload
def test_every_turn_extends_the_turn_before(name):
    for conversation in SMALL[name].conversations(0):
        for before, after in itertools.pairwise(conversation.turns):
            assert after.prompt[: len(before.prompt)] == before.prompt
            assert after.prompt[len(before.prompt)].role == "assistant"
            assert after.prompt[-1].role == "user"


@every_workload
def test_blocks_of_text_and_blocks_of_ids_say_the_same_about_sharing(name):
    arranged = arrange(SMALL[name], Arrivals(), 0)
    texts = ["\n".join(contents(body)) for body in bodies(SMALL[name])]
    ids = [request.hash_ids for request in trace_of(arranged, 1)]
    for (a, b), (i, j) in zip(
        itertools.combinations(texts, 2), itertools.combinations(ids, 2), strict=True
    ):
        shared = sum(
            1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(i, j, strict=False))
        )
        one_begins_other = a.startswith(b) or b.startswith(a)
        assert one_begins_other is (shared == min(len(i), len(j)))


@every_workload
def test_token_level_requests_cover_their_prompts(name):
    arranged = arrange(SMALL[name], Arrivals(), 0)
    for arrival, request in zip(arranged, trace_of(arranged, 16), strict=True):
        assert request.prompt_tokens == sum(s.tokens for s in arrival.asked.prompt) > 0
        assert len(request.hash_ids) == -(-request.prompt_tokens // 16)
        assert request.output_tokens == arrival.asked.output_tokens


@every_workload
def test_parameters_are_read_back_from_a_summary(name):
    data = msgspec.json.encode(SMALL[name])
    assert msgspec.json.decode(data)["name"] == name
    assert msgspec.json.decode(data, type=AnyWorkload) == SMALL[name]


def test_made_texts_have_the_tokens_that_were_asked_for():
    workload = NoSharing(num_prompts=5, input_tokens=100)
    turns = [conversation.turns[0] for conversation in workload.conversations(0)]
    for turn in turns:
        (text,) = contents(Writer("m", tokens_per_word=4.0).chat(turn))
        assert len(text.split()) == round(turn.prompt_tokens / 4)


def test_nothing_is_shared_by_the_control():
    assert hit_ratio(SMALL["no_sharing"], block_tokens=1) == 0


def test_agents_share_most_of_what_they_read():
    assert hit_ratio(Agent()) > 0.85


def test_order_decides_what_retrieval_shares():
    kept, shuffled = hit_ratio(Rag(order="kept")), hit_ratio(Rag(order="shuffled"))
    assert kept > shuffled + 0.1


def test_popular_documents_come_more_often_the_higher_the_exponent():
    def most_common(zipf):
        drawn = Rag(zipf=zipf, documents_a_prompt=1, num_prompts=2000).conversations(0)
        return Counter(c.group for c in drawn).most_common(1)[0]

    assert most_common(1.0)[0] == "d0"
    # 1 / H(100) = 19 % of the draws.
    assert most_common(1.0)[1] == pytest.approx(2000 * 0.193, rel=0.15)
    assert most_common(0.0)[1] < 45


def test_groups_may_be_popular_too():
    even = Counter(c.group for c in SharedPrefix().conversations(0))
    assert set(even.values()) == {3}
    skewed = Counter(c.group for c in SharedPrefix(zipf=1.2, users=20).conversations(0))
    assert skewed.total() == 160
    assert skewed["g0"] > 2 * 20 > skewed["g7"]


def test_the_hot_share_is_hot():
    groups = Counter(c.group for c in HotPrefix(num_prompts=1000, hot_share=0.7).conversations(0))
    assert groups["hot"] == pytest.approx(700, abs=50)
    assert groups["cold"] == 1000 - groups["hot"]


def test_every_user_of_a_house_reads_its_rule_book():
    systems: dict[str, set] = {}
    openings = set()
    for conversation in SMALL["shared_prefix"].conversations(0):
        first = contents(Writer("m").chat(conversation.turns[0]))
        systems.setdefault(conversation.group, set()).add(first[0])
        openings.add(tuple(first))
    assert all(len(texts) == 1 for texts in systems.values())
    assert len(set.union(*systems.values())) == 3
    assert len(openings) == 6


@pytest.mark.parametrize("words", [80, 500, 3000])
def test_a_system_prompt_is_as_long_as_asked(words):
    workload = SharedPrefix(system_tokens=round(words / prose.WORDS_PER_TOKEN))
    system = workload.conversations(4)[0].turns[0].prompt[0].text
    assert words - 2 <= len(system.split()) < words + 40


def test_bodies_ask_for_a_stream_with_usage():
    turn = SMALL["shared_prefix"].conversations(0)[0].turns[0]
    body = msgspec.json.decode(Writer("some-model").chat(turn))
    assert body["model"] == "some-model"
    assert body["max_tokens"] == 5
    assert body["stream"] is True
    assert body["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    assert "ignore_eos" not in body


def test_names_stay_distinct_when_there_are_many():
    many = SharedPrefix(groups=400, users=2, turns=1, system_tokens=0)
    assert len({c.turns[0].prompt for c in many.conversations(0)}) == 800


def test_more_users_than_ways_to_begin_share_some():
    many = SharedPrefix(groups=1, users=100, turns=1, system_tokens=0).conversations(0)
    assert len({c.session for c in many}) == 100
    assert len({c.turns[0].prompt for c in many}) == 60


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("shared_prefix", {"groups": 0}),
        ("shared_prefix", {"system_tokens": -1}),
        ("shared_prefix", {"think_time_s": float("inf")}),
        ("chat", {"users": 0}),
        ("agent", {"tool_tokens": 0}),
        ("rag", {"documents_a_prompt": 101}),
        ("rag", {"order": "other"}),
        ("rag", {"zipf": -1.0}),
        ("no_sharing", {"num_prompts": 0}),
        ("hot_prefix", {"hot_share": 1.1}),
    ],
)
def test_impossible_parameters_are_named(name, wrong):
    with pytest.raises(WorkloadError, match=next(iter(wrong))):
        make_workload(name, wrong).conversations(0)


def test_unknown_names_are_told_what_there_is():
    with pytest.raises(WorkloadError, match="available: shared_prefix, chat"):
        make_workload("other", {})
    with pytest.raises(
        WorkloadError, match="rag has no parameter users; available: num_prompts, documents"
    ):
        make_workload("rag", {"users": 3})
