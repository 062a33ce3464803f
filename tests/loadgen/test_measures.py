import pytest

from loadgen.ideal import ideal, shared_shares
from loadgen.measures import (
    Slo,
    SloError,
    Spread,
    imbalance,
    keeps,
    measure,
    parse_slo,
    spread,
)
from loadgen.outcomes import Outcome
from loadgen.paired import difference, pair
from tests.loadgen.test_requests import line


def outcome(id="a", **changes):
    fields = {
        "arm": "x",
        "id": id,
        "session": "s",
        "turn": 0,
        "group": "g",
        "intended_s": 1.0,
        "sent_s": 1.01,
        "first_token_s": 1.5,
        "end_s": 2.0,
        "status": "ok",
        "prompt_tokens": 100,
        "cached_tokens": 40,
        "completion_tokens": 6,
        "worker": "w0",
    }
    return Outcome(**{**fields, **changes})


def test_times_count_from_the_intended_send_time():
    one = outcome(sent_s=1.4)
    assert one.lag_ms == pytest.approx(400)
    assert one.ttft_ms == pytest.approx(500)
    assert one.e2e_ms == pytest.approx(1000)
    assert one.tpot_ms == pytest.approx(500 / 5)


def test_one_token_has_no_time_per_output_token():
    assert outcome(completion_tokens=1).tpot_ms is None


def test_a_request_that_did_not_end_well_has_no_latency():
    assert outcome(status="failed").e2e_ms is None
    assert outcome(status="unfinished").tpot_ms is None


def test_spread_is_mean_and_linear_percentiles():
    assert spread([None, 10.0, 20.0, 30.0, 40.0]) == Spread(
        25.0, 25.0, pytest.approx(37.0), pytest.approx(39.7)
    )
    assert spread([None]) == Spread(None, None, None, None)


def test_an_arm_worked_by_hand():
    outcomes = [
        outcome("a", itl_ms=[10.0, 30.0]),
        outcome("b", intended_s=2.0, first_token_s=3.5, end_s=6.0, cached_tokens=60, worker="w1"),
        outcome("c", status="failed", end_s=3.0),
    ]
    arm = measure(outcomes, Slo(ttft_ms=1000), ["w0", "w1", "w2"])
    assert (arm.requests, arm.errors) == (3, 1)
    assert arm.ttft_ms.mean == pytest.approx((500 + 1500) / 2)
    assert arm.e2e_ms.mean == pytest.approx((1000 + 4000) / 2)
    assert arm.tpot_ms.mean == pytest.approx((100 + 500) / 2)
    assert arm.itl_ms.mean == pytest.approx(20)
    assert arm.cached_token_ratio == pytest.approx(100 / 200)
    assert arm.duration_s == pytest.approx(5.0)
    assert arm.goodput == pytest.approx(1 / 5)
    assert [(w.worker, w.requests, w.computed_tokens) for w in arm.workers] == [
        ("w0", 1, 60),
        ("w1", 1, 40),
        ("w2", 0, 0),
    ]
    assert arm.imbalance == pytest.approx(60 / (100 / 3))


def test_nothing_answered_gives_no_figures():
    arm = measure([outcome(status="failed", first_token_s=None)], Slo())
    assert arm.ttft_ms == Spread(None, None, None, None)
    assert arm.cached_token_ratio is None
    assert arm.imbalance is None
    assert arm.goodput == 0


@pytest.mark.parametrize(
    ("slo", "kept"),
    [
        (Slo(), True),
        (Slo(ttft_ms=500.1, tpot_ms=100.1, e2e_ms=1000.1), True),
        (Slo(ttft_ms=499), False),
        (Slo(tpot_ms=99), False),
        (Slo(e2e_ms=999), False),
    ],
)
def test_every_bound_must_be_kept(slo, kept):
    assert keeps(outcome(), slo) is kept


def test_errors_keep_no_bound():
    assert not keeps(outcome(status="unfinished"), Slo())


def test_bounds_are_read_as_users_write_them():
    assert parse_slo(["ttft:2000", "tpot:100"]) == Slo(ttft_ms=2000, tpot_ms=100)
    assert parse_slo(["e2el:9"]) == Slo(e2e_ms=9)


@pytest.mark.parametrize("text", ["ttft", "ttft:", "ttft:x", "ttft:-1", "ttft:nan", "speed:1"])
def test_other_bounds_are_refused(text):
    with pytest.raises(SloError, match="ttft:2000"):
        parse_slo([text])


def test_imbalance_is_one_when_even_and_n_when_all_is_on_one():
    assert imbalance([7, 7, 7]) == 1
    assert imbalance([30, 0, 0]) == 3


def test_a_constant_difference_has_an_interval_of_no_width():
    found = difference([([(10.0, 1.0), (20.0, 1.0)], [(15.0, 1.0), (25.0, 1.0)])], seed=0)
    assert (found.base, found.arm, found.difference) == (15.0, 20.0, 5.0)
    assert found.low == pytest.approx(5.0)
    assert found.high == pytest.approx(5.0)
    assert found.ratio == pytest.approx(4 / 3)


def test_the_interval_covers_the_difference_as_normal_theory_says():
    base = [(float(i % 10), 1.0) for i in range(400)]
    arm = [(float(i % 10) + (i % 4), 1.0) for i in range(400)]
    found = difference([(base, arm)], seed=3)
    # Differences 0..3, evenly: mean 1.5, standard deviation 1.118, n = 400.
    half = 1.96 * 1.118 / 20
    assert found.difference == pytest.approx(1.5)
    assert found.low == pytest.approx(1.5 - half, abs=0.02)
    assert found.high == pytest.approx(1.5 + half, abs=0.02)
    assert found == difference([(base, arm)], seed=3)


def test_pairs_are_requests_that_ended_well_in_both_arms():
    base = [outcome("a"), outcome("b", status="failed"), outcome("c")]
    arm = [outcome("a", first_token_s=1.25), outcome("b"), outcome("d")]
    found = pair("base", [base], [arm], Slo(), seed=0)
    assert found.pairs == 1
    assert found.ttft_ms.ratio == pytest.approx(0.5)
    assert found.cached_token_ratio.difference == 0


def test_an_infinite_cache_reuses_the_longest_earlier_prefix():
    import msgspec

    def chat(id, *contents):
        messages = [{"role": "u", "content": c} for c in contents]
        body = msgspec.json.encode({"stream": True, "messages": messages})
        return line(id=id, body=msgspec.Raw(body))

    # Each prompt as bytes is 4 for marks, role and quote, plus the content.
    requests = [chat("a", "x" * 16), chat("b", "x" * 36), chat("c", "y" * 16), chat("d", "x" * 16)]
    assert shared_shares(requests) == [0, 20 / 40, 4 / 20, 1]
    bound = ideal(requests, {"a": 100, "b": 200, "c": 100, "d": 100})
    assert bound.cached_token_ratio == pytest.approx((0 + 100 + 20 + 100) / 500)
    assert bound.distinct_tokens == 280
    assert ideal(requests, {}) is None
