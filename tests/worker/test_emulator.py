"""The emulated accelerator: what a step costs, what it answers, how it is labelled."""

import math

import pytest
from tokenizers import Tokenizer

from cluster.blocks import pack_tokens
from cluster.protocol import Sampling
from cluster.settings import WorkerSettings
from tests.worker.tiny_models import item
from worker.build import build_engine
from worker.emulated_profiles import PROFILES, CostModel
from worker.emulator import EmulatedRunner
from worker.engine import EngineRequest
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
