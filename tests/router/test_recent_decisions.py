"""`/admin/decisions/{request id}`: the decision that was taken, for requests that asked."""

import asyncio
import json

import pytest

from cluster.protocol import HEADER_EXPLAIN, HEADER_REQUEST_ID, HEADER_WORKER, Load
from router.recent_decisions import MOST_WORKERS, RecentDecisions
from tests.router.deciding import dispatcher_of, prompt_of
from tests.router.support import Rig, report
from tests.router.test_forwarding import chain_of_text

TEXT = "a prompt of some blocks"  # 23 tokens: 5 blocks of 4
BODY = {"model": "tiny", "prompt": TEXT}
ASKING = {HEADER_EXPLAIN: "1"}
PROMPT = prompt_of(16)


async def told(rig, request_id):
    status, _, answer = await rig.get(f"/admin/decisions/{request_id}")
    assert status == 200, answer
    return answer, {row["worker"]: row for row in answer["workers"]}


def placed(dispatcher, request_id="r", excluded=()):
    """The placement, and what is kept of it."""
    dispatcher.recent.want(request_id, "completion")
    placement = dispatcher.place("tiny", PROMPT, request_id, excluded)
    return placement, json.loads(dispatcher.recent.find(request_id))


async def test_the_decision_of_a_request_is_shown_as_it_was_taken():
    async with Rig(workers=3) as rig:
        rig.fleet.on_report(
            report("w1", stored=chain_of_text(TEXT)[:3], load=Load(running=1, free_blocks=1000))
        )
        _, _, expected = await rig.post("/admin/explain", BODY)
        status, headers, _ = await rig.post("/v1/completions", BODY, headers=ASKING)
        assert status == 200
        # what is there now is no longer what was there then
        rig.fleet.on_report(report("w1", sequence=2, load=Load(running=50, free_blocks=3)))
        rig.fleet.on_gone("w2", "left")
        answer, rows = await told(rig, headers[HEADER_REQUEST_ID])
        assert answer == expected
        assert answer["chosen"] == headers[HEADER_WORKER] == "w1"
        assert rows["w1"]["hit_tokens"] == 12
        assert rows["w1"]["batch"] == 1, "without the request itself"


async def test_a_request_in_flight_can_be_asked_about():
    async with Rig() as rig:
        worker = rig.workers[0]
        released = asyncio.Event()
        whole = worker.say("hello")

        async def slow(request, generate):
            await released.wait()
            return await whole(request, generate)

        worker.answer = slow
        asking = asyncio.create_task(rig.post("/v1/completions", BODY, headers=ASKING))
        await worker.got_request.wait()
        answer, _ = await told(rig, worker.requests[0].request_id)
        assert answer["reason"] == "only"
        released.set()
        assert (await asking)[0] == 200


async def test_requests_that_do_not_ask_leave_nothing():
    async with Rig() as rig:
        _, headers, _ = await rig.post("/v1/completions", BODY)
        status, _, answer = await rig.get(f"/admin/decisions/{headers[HEADER_REQUEST_ID]}")
        assert (status, answer["error"]["code"]) == (404, "decision_not_kept")
        assert HEADER_EXPLAIN in answer["error"]["message"]
        recent = rig.gateway.dispatcher.recent
        assert (len(recent), len(recent.wanted)) == (0, 0)


async def test_a_second_attempt_shows_the_worker_that_failed():
    async with Rig(workers=2) as rig:
        first = rig.workers[0]
        first.answer = first.refuse(503)
        rig.fleet.on_report(report("w0", stored=chain_of_text(TEXT)))
        _, headers, _ = await rig.post("/v1/completions", BODY, headers=ASKING)
        answer, rows = await told(rig, headers[HEADER_REQUEST_ID])
        assert (answer["chosen"], answer["reason"]) == ("w1", "only")
        assert "failed this request before" in rows["w0"]["left_out"]
        assert rows["w0"]["hit_tokens"] == 20


async def test_the_admin_key_guards_it():
    async with Rig(admin_key="secret") as rig:
        status, _, _ = await rig.get("/admin/decisions/x")
        assert status == 401
        keyed = {"Authorization": "Bearer secret"}
        assert (await rig.get("/admin/decisions/x", headers=keyed))[0] == 404


async def test_a_refused_request_leaves_nothing_behind():
    async with Rig() as rig:
        rig.fleet.on_report(report("w0", load=Load(running=9, free_blocks=0)))
        assert (await rig.post("/v1/completions", BODY, headers=ASKING))[0] == 429
        recent = rig.gateway.dispatcher.recent
        assert (len(recent), len(recent.wanted)) == (0, 0)


def test_full_workers_are_shown_as_left_out():
    dispatcher = dispatcher_of(range(3), stored={0: PROMPT.chain})
    full = Load(running=5, free_blocks=0)
    dispatcher.fleet.on_report(report("w000", sequence=2, load=full))
    _, answer = placed(dispatcher)
    assert answer["chosen"] == "w001"
    last = answer["workers"][-1]
    assert last["worker"] == "w000"
    assert "no room" in last["left_out"]
    assert last["hit_tokens"] == 12


@pytest.mark.parametrize(("full", "shown", "others"), [(0, 16, 84), (3, 19, 81), (40, 32, 68)])
@pytest.mark.parametrize("policy", ["locality", "round_robin", "random"])
def test_of_many_workers_the_chosen_the_best_holder_and_the_cheapest_are_shown(
    policy, full, shown, others
):
    dispatcher = dispatcher_of(range(100), policy, stored={90: PROMPT.chain})
    for number in range(40, 40 + full):
        load = Load(running=number, free_blocks=0)
        dispatcher.fleet.on_report(report(f"w{number:03d}", sequence=2, load=load))
    placement, answer = placed(dispatcher)
    rows = {row["worker"]: row for row in answer["workers"]}
    assert (len(rows), answer["others"]) == (shown, others)
    left_out = [row["left_out"] for row in rows.values() if row["cost"] is None]
    assert len(left_out) == shown - MOST_WORKERS
    assert all("no room" in reason for reason in left_out)
    assert answer["chosen"] == placement.worker
    assert [name for name, row in rows.items() if row["chosen"]] == [placement.worker]
    assert rows["w090"]["hit_tokens"] == 12
    costs = dict(
        zip(
            placement.candidates.columns.worker_keys.tolist(),
            placement.decision.costs.tolist(),
            strict=True,
        )
    )
    members = dispatcher.fleet.members()
    by_name = {m.card.worker: costs[m.key] for m in members if m.key in costs}
    assert {name: row["cost"] for name, row in rows.items()} == {n: by_name.get(n) for n in rows}
    if policy == "locality":
        cheapest = sorted(by_name, key=by_name.get)[: MOST_WORKERS - 2]
        assert set(cheapest) <= set(rows)


def test_ended_requests_are_forgotten_in_the_order_they_ended_and_running_ones_never():
    recent = RecentDecisions(most=2)
    dispatcher = dispatcher_of(range(2), recent=recent)
    for name in ("a", "b", "c", "d", "runs"):
        placed(dispatcher, name)
    for name in ("b", "a", "c", "d"):
        recent.ended(name)
    assert [name for name in ("a", "b", "c", "d", "runs") if recent.find(name)] == [
        "c",
        "d",
        "runs",
    ]
    assert list(recent.wanted) == ["runs"]
    recent.ended("unknown")
    assert len(recent) == 3
