import pytest

from loadgen.measures import Slo
from loadgen.paired import difference, pair
from loadgen.verdict import change, verdict, verdicts
from tests.loadgen.test_measures import outcome


def arm(ttft_ms, tpot_ms=10.0, count=200, noise=0.0):
    """Outcomes whose TTFT is spread from half to one and a half of `ttft_ms`."""
    outcomes = []
    for i in range(count):
        ttft = ttft_ms * (0.5 + i / count) + noise * ((i * 37) % 11 - 5)
        first = 1.0 + ttft / 1e3
        outcomes.append(outcome(f"r{i}", first_token_s=first, end_s=first + 5 * tpot_ms / 1e3))
    return outcomes


def said(base, other, repeats=3):
    paired = pair("round_robin", [base] * repeats, [other] * repeats, Slo(), seed=0)
    return verdict("locality", paired, repeats)


def test_faster_is_said_with_its_interval():
    text = said(arm(1000), arm(600))
    assert text.startswith("locality is faster than round_robin: TTFT p50 −40 % [−4")
    assert text.endswith("; no difference shown in TPOT p50 0 % [0, 0]")


def test_one_run_is_told_as_one_run():
    once = said(arm(1000), arm(600), repeats=1)
    assert once.startswith("in this one run locality was faster than round_robin: TTFT p50 −40 % [")
    mixed = said(arm(1000), arm(600, tpot_ms=20), repeats=1)
    assert mixed.startswith("in this one run locality against round_robin: faster in TTFT p50")
    alike = said(arm(1000), arm(1000), repeats=1)
    assert alike.startswith("in this one run locality against round_robin: no difference shown")


def test_slower_is_said_too():
    text = said(arm(1000), arm(1500))
    assert text.startswith("locality is slower than round_robin: TTFT p50 +50 % [+")


def test_what_wins_and_what_loses_are_both_said():
    text = said(arm(1000), arm(600, tpot_ms=20))
    assert text.startswith("locality against round_robin: faster in TTFT p50 −40 % [")
    assert ", slower in TPOT p50 +100 % [+100, +100]" in text


def test_no_difference_is_not_claimed_to_be_shown():
    text = said(arm(1000, count=30), arm(1000, count=30, noise=60))
    assert text.startswith("locality against round_robin: no difference shown, TTFT p50")


def test_nothing_in_common_is_nothing_to_compare():
    failed = [outcome("r0", status="failed")]
    assert said(failed, failed) == "locality against round_robin: nothing to compare"


def test_an_invalid_run_has_no_verdict():
    paired = {"locality": pair("round_robin", [arm(1000)], [arm(100)], Slo(), seed=0)}
    assert verdicts(paired, valid=False, repeats=3) == ["no verdict: the run is invalid"]
    assert len(verdicts(paired, valid=True, repeats=3)) == 1


def test_repeats_that_disagree_widen_the_interval():
    base = [[(100.0, 1.0)] * 50] * 4
    alike = [[(80.0, 1.0)] * 50] * 4
    unlike = [[(value, 1.0)] * 50 for value in (50.0, 70.0, 90.0, 110.0)]
    narrow = difference(list(zip(base, alike, strict=True)), seed=0)
    wide = difference(list(zip(base, unlike, strict=True)), seed=0)
    assert narrow.difference == wide.difference == -20
    assert narrow.low == narrow.high == -20
    assert wide.low < -35
    assert wide.high > -5


def test_a_quantile_is_of_the_values():
    base = [(float(value), 1.0) for value in range(101)]
    arm = [(2.0 * value, 1.0) for value in range(101)]
    found = difference([(base, arm)], seed=0, quantile=0.9)
    assert (found.base, found.arm, found.ratio) == (90.0, 180.0, 2.0)
    assert change(found) == "+100 % [+100, +100]"


def test_the_share_within_bounds_counts_failures_as_misses():
    base = [outcome("a"), outcome("b", status="failed"), outcome("c", first_token_s=9.0, end_s=9.5)]
    other = [outcome("a"), outcome("b"), outcome("c")]
    found = pair("x", [base], [other], Slo(ttft_ms=1000), seed=0)
    assert found.kept_share.base == pytest.approx(1 / 3)
    assert found.kept_share.arm == pytest.approx(1)
    assert pair("x", [base], [other], Slo(), seed=0).kept_share is None
