"""The emulated accelerator: what a step costs, what it answers, how it is labelled."""

import math
from dataclasses import replace

import pytest
from tokenizers import Tokenizer

from cluster.blocks import pack_tokens
from cluster.protocol import Sampling
from cluster.settings import WorkerSettings
from tests.worker.tiny_models import item
from worker.build import build_engine
from worker.emulated_profiles import (
    H100_SXM,
    LLAMA3_8B,
    PROFILES,
    QWEN3_30B_A3B,
    CostModel,
    ProfileError,
    derive,
    profile_of,
)
from worker.emulator import EmulatedRunner
from worker.messages import EngineRequest
from worker.models import ModelError


class Clock:
    """A clock that only moves when somebody waits, or by `drift` at every look."""

    def __init__(self, drift=0.0):
        self.now, self.drift, self.waits = 100.0, drift, []

    def __call__(self):
        self.now += self.drift
        return self.now

    def wait(self, seconds):
        self.waits.append(seconds)
        self.now += seconds


COST = CostModel(step_s=1.0, prefill_token_s=0.1, prefill_pair_s=0.001, context_token_s=0.01)


def test_a_decode_costs_its_context():
    assert COST.seconds([(99, 1), (49, 1)]) == pytest.approx(1.0 + 0.01 * 150)


def test_a_prefill_costs_its_tokens_and_its_pairs():
    # Rows see 11, 12, 13 tokens.
    assert COST.seconds([(10, 3)]) == pytest.approx(1.0 + 0.3 + 0.001 * (11 + 12 + 13))


def test_chunks_cost_together_what_the_whole_costs_but_for_the_steps():
    whole = COST.seconds([(0, 100)])
    chunks = COST.seconds([(0, 60)]) + COST.seconds([(60, 40)])
    assert math.isclose(chunks, whole + COST.step_s)


def test_a_step_lasts_as_long_as_it_costs_its_own_work_included():
    clock = Clock(drift=0.25)
    runner = EmulatedRunner(CostModel(step_s=1.0), [5, 6], clock, clock.wait)
    began = clock.now
    runner.execute([item([1], 0, [1])])
    assert clock.now == pytest.approx(began + 1.25)  # 0.25 went by before the step began
    assert clock.waits == [pytest.approx(0.75)]


def test_what_the_loop_does_between_two_steps_of_a_sequence_is_hidden():
    clock = Clock()
    runner = EmulatedRunner(CostModel(step_s=1.0), [5], clock, clock.wait)
    runner.execute([item([1], 0, [1])])
    clock.now += 0.3
    runner.execute([item([2], 1, [1])])
    assert clock.waits == [pytest.approx(1.0), pytest.approx(0.7)]


def test_an_accelerator_that_was_idle_begins_when_it_is_asked():
    clock = Clock()
    runner = EmulatedRunner(CostModel(step_s=1.0), [5], clock, clock.wait)
    runner.execute([item([1], 0, [1])])
    clock.now += 0.3
    runner.execute([replace(item([2], 0, [1]), request_id="another")])
    assert clock.waits == [pytest.approx(1.0), pytest.approx(1.0)]


def test_a_stall_is_made_good_within_a_step_and_no_longer():
    clock = Clock()
    runner = EmulatedRunner(CostModel(step_s=1.0), [5], clock, clock.wait)
    runner.execute([item([1], 0, [1])])
    clock.now += 10.0
    for start in (1, 2):
        runner.execute([item([2], start, [1])])
    assert clock.waits == [pytest.approx(1.0), pytest.approx(1.0)]


def test_a_late_step_waits_no_more():
    clock = Clock(drift=2.0)
    EmulatedRunner(CostModel(step_s=1.0), [5], clock, clock.wait).execute([item([1], 0, [1])])
    assert clock.waits == []


def test_tokens_follow_from_the_sequence_not_from_how_it_was_computed():
    runner = EmulatedRunner(CostModel(step_s=0.0), list(range(26)))
    whole, nothing = runner.execute([item([7, 8, 9], 0, [1]), item([1, 2], 0, [2], sample=False)])
    assert nothing is None
    assert runner.execute([item([9], 2, [1])]) == [whole]
    following = {runner.execute([item([9], start, [1])])[0] for start in range(40)}
    assert len(following) > 10


def test_the_engine_answers_letters_and_says_that_it_is_emulated():
    core, info = build_engine(WorkerSettings(model="emulated:steady-25ms", kv_blocks=8))
    assert info.device == info.model.model == "emulated:steady-25ms"
    assert info.prefill == profile_of("steady-25ms").cost.first_speed(core.config.chunk_limit)
    tokenizer = Tokenizer.from_str(info.model.tokenizer_json)
    prompt = tokenizer.encode("Grüße, 世界\n").ids
    assert tokenizer.decode(prompt) == "Grüße, 世界\n"
    core.add(
        EngineRequest(
            request_id="r",
            token_ids=pack_tokens(prompt),
            namespace_root=info.model.namespace.root(),
            sampling=Sampling(max_tokens=3),
        )
    )
    tokens = []
    while core.has_work():
        for output in core.step():
            tokens += output.token_ids
    text = tokenizer.decode(tokens)
    assert len(text) == 3
    assert text.isalpha()
    assert text.islower()


def test_another_profile_is_another_namespace(monkeypatch):
    monkeypatch.setitem(PROFILES, "other", PROFILES["steady-25ms"])
    roots = {
        build_engine(WorkerSettings(model=f"emulated:{name}"))[1].model.namespace.root()
        for name in ("steady-25ms", "other")
    }
    assert len(roots) == 2


def test_an_unknown_profile_is_named():
    with pytest.raises(ModelError, match=r"'warp'.*steady-25ms"):
        build_engine(WorkerSettings(model="emulated:warp"))


def test_a_run_of_decodes_costs_what_its_steps_cost():
    cost = CostModel(step_s=1.0, decode_s=0.2, context_token_s=0.01)
    contexts = [5, 9]
    first_s, growth_s = cost.decode_seconds(len(contexts), sum(contexts))
    for step in range(4):
        parts = [(context - 1 + step, 1) for context in contexts]
        assert cost.seconds(parts) == pytest.approx(first_s + step * growth_s)


def test_a_derived_profile_follows_from_the_figures_of_chip_and_model():
    profile = derive(H100_SXM, LLAMA3_8B)
    assert profile == PROFILES["h100-llama3-8b"]
    # 16.06 GB at 2.68 TB/s, and a millisecond
    assert profile.cost.step_s == pytest.approx(0.001 + 16.06 / 2680)
    assert profile.cost.prefill_token_s == pytest.approx(2 * 8.03e9 / 494.5e12)
    assert profile.kv_tokens == int((72e9 - 16.06e9) / 131_072)


def test_a_mixture_of_experts_reads_the_experts_that_a_batch_takes():
    dense = QWEN3_30B_A3B.parameters - QWEN3_30B_A3B.expert_parameters
    read = QWEN3_30B_A3B.bytes_a_step / 2
    assert dense < QWEN3_30B_A3B.active < read < QWEN3_30B_A3B.parameters


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("p.toml", "kv_tokens = 64\ncontext_tokens = 32\n[cost]\nstep_s = 0.5\n"),
        ("p.json", '{"kv_tokens": 64, "context_tokens": 32, "cost": {"step_s": 0.5}}'),
    ],
)
def test_a_profile_is_read_from_a_file_and_served(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text)
    assert profile_of(str(path)).cost == CostModel(step_s=0.5)
    core, info = build_engine(WorkerSettings(model=f"emulated:{path}"))
    assert info.capacity_blocks == 4
    assert core.config.context_tokens == 32


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("kv_tokens = 64", "context_tokens|cost"),
        ("kv_tokens = 64\ncontext_tokens = 32\n[cost]\nstep = 0.5\n", "step"),
        ("kv_tokens = 64\ncontext_tokens = 32\n[cost]\nstep_s = -1.0\n", "negative"),
        ("kv_tokens = 0\ncontext_tokens = 32\n[cost]\nstep_s = 1.0\n", "at least 1"),
        ("no toml", "is invalid"),
    ],
)
def test_what_is_wrong_in_a_profile_is_said(tmp_path, text, said):
    path = tmp_path / "p.toml"
    path.write_text(text)
    with pytest.raises(ProfileError, match=said):
        profile_of(str(path))


def test_a_profile_that_is_not_there_is_said():
    with pytest.raises(ProfileError, match="cannot read the profile"):
        profile_of("/nowhere/p.toml")
