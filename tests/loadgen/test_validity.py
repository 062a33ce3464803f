import pytest

from loadgen.admin import BusView, FleetView, WorkerView
from loadgen.observer import Observations
from loadgen.validity import ArmEvidence, reasons
from tests.loadgen.test_measures import outcome


def fleet(requests_total=0, epoch=1, **changes):
    worker = {"worker": "w0", "epoch": epoch}
    worker.update(
        {k: changes.pop(k) for k in ("running", "indexed_blocks", "cached_blocks") if k in changes}
    )
    fields = {"requests_total": requests_total, "in_flight": 0, "workers": [WorkerView(**worker)]}
    return FleetView(**{**fields, **changes})


def arm(outcomes=None, before=None, after=None, flushed=True, policy="locality"):
    outcomes = [outcome("a"), outcome("b")] if outcomes is None else outcomes
    return ArmEvidence(
        policy,
        outcomes,
        before or fleet(10),
        after or fleet(10 + len(outcomes)),
        flushed,
        Observations(),
    )


def found(evidence, requests=2):
    return reasons({"locality": [evidence]}, requests, max_client_lag_ms=100)


def test_a_clean_run_has_no_reasons():
    assert found(arm()) == []


@pytest.mark.parametrize(
    ("evidence", "reason"),
    [
        (arm([outcome("a"), outcome("b", sent_s=1.2)]), "locality: the client lagged"),
        (
            arm([outcome("a"), outcome("b", status="failed", error="HTTP 500: broken")]),
            "locality: 1 requests failed, mostly: HTTP 500: broken",
        ),
        (
            arm([outcome("a"), outcome("b", status="unfinished", error="cut")]),
            "locality: 1 requests did not finish, mostly: cut",
        ),
        (arm(after=fleet(13)), "locality: the gateway routed 1 requests that were not ours"),
        (arm(after=fleet(11)), "locality: the gateway routed only 1 of our 2 requests"),
        (
            arm([outcome("a"), outcome("b", sent_s=None)], after=fleet(11)),
            "locality: 1 of the file's 2 requests were sent",
        ),
        (
            arm(before=fleet(10, indexed_blocks=3)),
            "locality: caches were not empty at its start: 3 blocks were left",
        ),
        (
            arm(before=fleet(10, cached_blocks=2)),
            "locality: caches were not empty at its start: 2 blocks were left",
        ),
        (
            arm([outcome("a"), outcome("b", policy="round_robin")]),
            "locality: the policy was changed while it ran: 1 by round_robin",
        ),
        (
            arm([outcome("a"), outcome("b", cached_tokens=None)]),
            "locality: 1 answers carried no usage, so their token counts are unknown",
        ),
        (arm(before=fleet(10, in_flight=1)), "locality: other requests were running at its start"),
        (arm(after=fleet(12, running=1)), "locality: requests were still running after its end"),
        (arm(after=fleet(12, epoch=2)), "locality: workers came, went or lost their cache: w0"),
        (
            arm(after=fleet(12, bus=BusView(stale=True, reason="no reports for 5 s"))),
            "locality: the gateway's index was stale: no reports for 5 s",
        ),
    ],
)
def test_each_defect_is_named(evidence, reason):
    named = found(evidence)
    assert len(named) == 1
    assert named[0].startswith(reason)


def test_blocks_may_be_there_where_nothing_was_flushed():
    assert found(arm(before=fleet(10, indexed_blocks=3), flushed=False)) == []


def test_arms_of_unequal_size_are_named():
    arms = {"a": [arm([outcome("a")])], "b": [arm()]}
    assert "the arms are of unequal size: a 1, b 2 requests" in reasons(arms, 2, 100)


def test_each_repeat_is_looked_at():
    named = reasons({"x": [arm(), arm(before=fleet(10, in_flight=1))]}, 2, 100)
    assert named == ["x, repeat 2: other requests were running at its start"]


def test_arms_with_unequal_repeats_or_fleets_are_named():
    two_workers = FleetView(
        requests_total=10, in_flight=0, workers=[WorkerView(worker="w0"), WorkerView(worker="w1")]
    )
    after = FleetView(requests_total=12, in_flight=0, workers=two_workers.workers)
    named = reasons({"a": [arm(), arm()], "b": [arm(before=two_workers, after=after)]}, 2, 100)
    assert named == [
        "the arms are of unequal size: a 4, b 2 requests",
        "the arms are of unequal size: a 2, b 1 repeats",
        "the arms are of unequal size: a 1, b 2 workers",
    ]


def test_prompts_must_have_the_same_tokens_in_every_replay():
    other = arm([outcome("a"), outcome("b", prompt_tokens=101)])
    named = reasons({"a": [arm()], "b": [other]}, 2, 100)
    assert named == ["1 prompts had other token counts from one replay to another"]
