"""`/admin/explain`: the table behind a decision, without any effect of it."""

import json

import msgspec
import numpy as np
import pytest

from cluster.blocks import join_hashes
from cluster.protocol import HEADER_WORKER, ColdReport, Load
from router.dispatch import Dispatcher
from router.policies import Decision, Policy, available
from router.policies.base import NoParameters
from tests.router.deciding import dispatcher_of, prompt_of
from tests.router.support import NAMESPACE, Rig, card, report
from tests.router.test_forwarding import chain_of_text

TEXT = "a prompt of some blocks"  # 23 tokens: 5 blocks of 4
BODY = {"model": "tiny", "prompt": TEXT}


async def explained(rig, body=BODY):
    status, _, answer = await rig.post("/admin/explain", body)
    assert status == 200, answer
    return answer, {row["worker"]: row for row in answer["workers"]}


async def test_every_worker_is_shown_with_hit_load_and_cost():
    async with Rig(workers=3) as rig:
        rig.fleet.on_report(
            report("w1", stored=chain_of_text(TEXT)[:3], load=Load(running=1, free_blocks=1000))
        )
        rig.fleet.on_report(report("w2", load=Load(pending_prefill_tokens=10, free_blocks=9)))
        answer, rows = await explained(rig)
        assert (answer["kind"], answer["policy"]) == ("completion", "locality")
        assert (answer["prompt_tokens"], answer["blocks"], answer["block_size"]) == (23, 5, 4)
        # (pending + new) × (batch + 1)
        assert {name: row["cost"] for name, row in rows.items()} == {
            "w0": (0 + 23) * 1,
            "w1": (0 + 11) * 2,
            "w2": (10 + 23) * 1,
        }
        assert (rows["w1"]["hit_tokens"], rows["w1"]["coming_tokens"]) == (12, 0)
        assert rows["w1"]["new_tokens"] == 11
        assert (rows["w2"]["pending_tokens"], rows["w2"]["free_blocks"]) == (10, 9)
        assert (answer["chosen"], answer["second"]) == ("w1", "w0")
        assert answer["margin"] == 1
        assert answer["margin_share"] == pytest.approx(1 / 22)
        assert answer["reason"] == "hit"
        assert [row["worker"] for row in answer["workers"]] == ["w1", "w0", "w2"]
        assert [row["chosen"] for row in answer["workers"]] == [True, False, False]
        assert (await rig.complete(TEXT))[1][HEADER_WORKER] == answer["chosen"]


async def test_what_lies_in_cold_tiers_is_shown_apart_and_counts_by_its_credit():
    async with Rig(workers=2) as rig:
        chain = chain_of_text(TEXT)
        tiers = ColdReport(
            cpu_stored=join_hashes(chain), cpu_blocks=5, cpu_s_per_token=0.005, disk_s_per_token=0
        )
        load = Load(prefill_s_per_token=0.01, cached_blocks=1, free_blocks=1000)
        rig.fleet.on_report(report("w1", stored=chain[:1], load=load, cold=tiers))
        answer, rows = await explained(rig)
        row = rows["w1"]
        assert (row["hit_tokens"], row["cold_tokens"], row["coming_tokens"]) == (4 + 8, 16, 0)
        assert rows["w0"]["cold_tokens"] == 0
        assert answer["chosen"] == "w1"


def test_an_explanation_shows_the_costs_of_the_decision_that_follows():
    dispatcher = dispatcher_of([3, 5], "marginal", prefill_s_per_token=0.01)
    prompt = prompt_of(16)
    for number in range(3):  # from the second on it is known how long requests stay
        explanation = dispatcher.explain("tiny", "completion", prompt)
        placement = dispatcher.place("tiny", prompt, f"r{number}")
        assert (placement.candidates.stay_s > 0) == (number > 0)
        costs = {row.worker: row.cost for row in explanation.workers}
        assert [costs["w000"], costs["w001"]] == placement.decision.costs.tolist()


async def test_a_busy_holder_loses_and_the_reason_says_so():
    async with Rig(workers=2) as rig:
        rig.fleet.on_report(
            report("w0", stored=chain_of_text(TEXT), load=Load(running=9, free_blocks=1000))
        )
        answer, _ = await explained(rig)
        assert (answer["chosen"], answer["reason"]) == ("w1", "load")
        assert "another worker holds more" in answer["because"]


async def test_a_chat_is_explained_as_its_template_makes_it():
    async with Rig(workers=2) as rig:
        chat = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
        answer, _ = await explained(rig, chat)
        assert answer["kind"] == "chat"
        assert answer["prompt_tokens"] == len("<user>hi<assistant>")
        assert answer["reason"] == "cold"


async def test_workers_that_are_left_out_say_why():
    async with Rig() as rig:
        rig.fleet.on_card(card("drains", state="draining"))
        rig.fleet.on_card(card("other", model="large"))
        rig.fleet.on_card(card("away"))
        rig.fleet.trust.suspect("away", "it refused a connection")
        wrong = msgspec.structs.replace(NAMESPACE, block_size=8)
        rig.fleet.on_card(card("wide", namespace=wrong))
        answer, rows = await explained(rig)
        assert rows["drains"]["left_out"] == "it is draining"
        assert rows["other"]["left_out"] == "it serves large"
        assert "refused a connection" in rows["away"]["left_out"]
        assert "block_size 8 instead of 4" in rows["wide"]["left_out"]
        assert (rows["w0"]["left_out"], answer["chosen"]) == ("", "w0")
        assert (answer["reason"], answer["second"], answer["margin"]) == ("only", "", None)


async def test_blocks_on_their_way_are_told_apart_from_published_ones():
    async with Rig(workers=2) as rig:
        chain = chain_of_text(TEXT)
        rig.fleet.on_report(report("w0", stored=chain[:2]))
        slot = next(m.slot for m in rig.fleet.members() if m.card.worker == "w0")
        booking = rig.fleet.book(slot, "r", chain, 23, 8)
        _, rows = await explained(rig)
        assert (rows["w0"]["hit_tokens"], rows["w0"]["coming_tokens"]) == (20, 12)
        rig.fleet.release(booking)


async def test_explaining_changes_nothing():
    async with Rig(workers=3, policy="round_robin") as rig:
        first, _ = await explained(rig)
        again, _ = await explained(rig)
        assert first == again
        assert rig.fleet.in_flight == rig.fleet.requests_total == len(rig.fleet.coming) == 0
        assert not any(worker.requests for worker in rig.workers)
        assert (await rig.complete())[1][HEADER_WORKER] == first["chosen"]
        assert (await explained(rig))[0]["chosen"] != first["chosen"]


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (b"{", 400, "not valid JSON"),
        ({"model": "tiny"}, 400, "`prompt` is missing"),
        ({"model": "tiny", "messages": []}, 400, "`messages` is empty"),
        ({"model": "no", "prompt": "x"}, 404, "does not exist here"),
    ],
)
async def test_bodies_are_judged_as_those_of_real_requests(body, status, words):
    async with Rig() as rig:
        got, _, answer = await rig.post("/admin/explain", body)
        assert got == status
        assert words in answer["error"]["message"]


async def test_without_a_ready_worker_it_says_so():
    async with Rig(workers=0) as rig:
        rig.fleet.on_card(card("a", state="starting"))
        data = json.dumps(BODY).encode()
        status, _, answer = await rig.post("/admin/explain", data)
        assert (status, answer["error"]["code"]) == (503, "no_ready_worker")


async def test_a_full_worker_is_left_out_as_it_is_for_a_request():
    async with Rig(workers=2) as rig:
        full = Load(running=9, free_blocks=0)
        rig.fleet.on_report(report("w0", stored=chain_of_text(TEXT), load=full))
        answer, rows = await explained(rig)
        assert answer["chosen"] == "w1"
        assert "no room" in rows["w0"]["left_out"]
        assert (await rig.complete(TEXT))[1][HEADER_WORKER] == "w1"


PROMPT = prompt_of(64)


def where_the_last_holds_it(policy: str | Policy, batches: list[int]) -> Dispatcher:
    return dispatcher_of(batches, policy, stored={len(batches) - 1: PROMPT.chain})


@pytest.mark.parametrize(
    ("policy", "left_out", "words"),
    [
        ("aibrix", 1, "it is busy: its batch exceeds the mean"),
        ("power_of_two", 2, "not one of the two workers drawn at random"),
    ],
)
def test_a_worker_that_the_policy_leaves_out_says_why(policy, left_out, words):
    dispatcher = where_the_last_holds_it(policy, [0, 1, 3, 8])
    answer = dispatcher.explain("tiny", "completion", PROMPT)
    reasons = [row.left_out for row in answer.workers if row.cost is None]
    assert len(reasons) == left_out
    assert all(words in reason for reason in reasons)
    assert all(row.left_out == "" for row in answer.workers if row.cost is not None)
    # the holder was left out too
    assert answer.reason == "load"
    assert "costs more or is excluded" in answer.because


def test_the_holders_under_the_guard_say_that_it_left_them_out():
    dispatcher = where_the_last_holds_it("locality:guard=1", [0] * 4)
    for number in range(2):
        assert dispatcher.place("tiny", PROMPT, f"r{number}").worker == "w003"
    answer = dispatcher.explain("tiny", "completion", PROMPT)
    rows = {row.worker: row for row in answer.workers}
    assert rows["w003"].cost is None
    assert "a prefix that gets more requests than its holders' share" in rows["w003"].left_out
    assert (answer.reason, answer.chosen != "w003") == ("guard", True)
    assert "hotspot guard" in answer.because
    assert dispatcher.place("tiny", PROMPT, "r2").worker != "w003"
    lines = dispatcher._metrics.text().decode().splitlines()
    name = 'stemroute_gateway_decisions_total{policy="locality:guard=1",reason='
    assert f'{name}"guard"}} 1.0' in lines
    assert f'{name}"hit"}} 2.0' in lines


@pytest.mark.parametrize("policy", [*available(), "locality:guard=1", "dynamo:temperature=0.5"])
@pytest.mark.parametrize("batches", [[0] * 4, [0, 1, 3, 8], [0, 0, 0, 100]])
def test_whatever_the_policy_each_worker_has_a_cost_or_a_reason(policy, batches):
    dispatcher = where_the_last_holds_it(policy, batches)
    for number in range(4):
        answer = dispatcher.explain("tiny", "completion", PROMPT)
        for row in answer.workers:
            assert (row.cost is None) == bool(row.left_out), row
            assert row.left_out != "the policy left it out"
        dispatcher.place("tiny", PROMPT, f"r{number}")


def test_a_policy_that_does_not_say_why_it_leaves_a_worker_out():
    def never_the_first(candidates, parameters, state, rng):
        costs = np.arange(len(candidates.columns.slots), dtype=np.float64)
        costs[0] = np.inf
        return Decision(1, costs)

    mine = Policy("mine", never_the_first, NoParameters(), None)
    dispatcher = where_the_last_holds_it(mine, [0] * 3)
    answer = dispatcher.explain("tiny", "completion", PROMPT)
    assert [row.worker for row in answer.workers] == ["w001", "w002", "w000"]
    assert [row.left_out for row in answer.workers] == ["", "", "the policy left it out"]
