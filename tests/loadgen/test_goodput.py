import csv
import json
import math

import msgspec
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from loadgen.arm import OptionError
from loadgen.arrivals import Arrivals
from loadgen.goodput import GoodputOptions, search_policies
from loadgen.goodput_report import render_goodput
from loadgen.goodput_summary import Capacity, findings
from loadgen.measures import Slo
from loadgen.plan import Load
from loadgen.rate_search import RateSearch
from loadgen.workloads import NoSharing
from tests.loadgen.fake_gateway import FakeGateway, serving, whole_answer


@given(
    start=st.floats(0.1, 100),
    limit=st.floats(0.1, 100),
    precision=st.sampled_from([0.02, 0.1, 0.5]),
)
def test_the_search_closes_in_on_the_limit(start, limit, precision):
    search = RateSearch(start, precision, max_trials=60)
    trials = 0
    for rate in search.rates():
        trials += 1
        search.tell(met=rate <= limit)
    low, high = search.bracket
    assert low <= limit < high
    assert high <= low * (1 + precision)
    # Doublings to reach it, then halvings of the ratio.
    assert trials <= 2 + abs(math.log2(limit / start)) + math.log2(1 / math.log2(1 + precision)) + 2


def test_a_search_without_trials_left_tells_what_it_knows():
    search = RateSearch(1.0, 0.1, max_trials=3)
    rates = []
    for rate in search.rates():
        rates.append(rate)
        search.tell(met=True)
    assert rates == [1.0, 2.0, 4.0]
    assert search.bracket == (4.0, math.inf)


def options(url, **changes):
    fields = {
        "url": url,
        "load": Load(
            workload=NoSharing(num_prompts=10, input_tokens=5, output_tokens=2),
            arrivals=Arrivals(request_rate=50.0, burstiness=math.inf),
        ),
        "slo": Slo(ttft_ms=60_000),
        "num_warmups": 0,
        "quiet_timeout_s": 0.3,
        "max_client_lag_ms": 30_000.0,
    }
    return GoodputOptions(**{**fields, **changes})


class Limited(FakeGateway):
    """Refuses every request under the policies in `overloaded`, before it is routed."""

    def __init__(self, *overloaded):
        super().__init__()

        async def behave(gateway, request, body):
            if gateway.policy in overloaded:
                gateway.requests_total -= 1
                return web.json_response({"error": {"message": "full"}}, status=429)
            return await whole_answer(gateway, request, body)

        self.behave = behave


async def test_policies_are_searched_one_after_the_other(tmp_path):
    gateway = Limited("round_robin")
    gateway.policy = "round_robin"
    async with serving(gateway) as url:
        summary = await search_policies(options(url, max_trials=3, out=tmp_path))
    assert summary.valid, summary.reasons
    bad, good = summary.policies["round_robin"], summary.policies["locality"]
    assert [trial.rate for trial in good.trials] == [50, 100, 200]
    assert (good.rate, good.too_much) == (200, None)
    assert [trial.rate for trial in bad.trials] == [50, 25, 12.5]
    assert (bad.rate, bad.too_much) == (0, 12.5)
    assert bad.trials[0].measures.errors == 10
    assert gateway.flushes == 6
    assert gateway.policy == "round_robin"
    stored = json.loads((tmp_path / "goodput.json").read_text())
    assert stored["policies"]["locality"]["rate"] == 200
    rows = list(csv.DictReader((tmp_path / "goodput.csv").open()))
    assert [(row["policy"], float(row["rate"]), row["met"]) for row in rows] == [
        *(("round_robin", rate, "False") for rate in (50, 25, 12.5)),
        *(("locality", rate, "True") for rate in (50, 100, 200)),
    ]
    page = (tmp_path / "report.html").read_text()
    assert findings(summary) == [
        "locality met them up to 200.00/s, the highest that was tried, "
        "round_robin met the bounds at no rate that was tried: no ratio"
    ]
    assert f"L{findings(summary)[0][1:]}" in page
    assert page.count('class="trial met arm1"') == 6 * 3, "three trials in six plots"
    assert page.count('class="trial arm0"') == 1 * 3, "refused requests have no latency"
    bodies = [sorted(b for _, b in gateway.bodies[i : i + 10]) for i in range(0, 60, 10)]
    assert all(trial == bodies[0] for trial in bodies), "the same texts at every rate"


def capacity(rate, too_much):
    return Capacity(rate=rate, too_much=too_much, trials=[])


@pytest.mark.parametrize(
    ("base", "found", "said"),
    [
        (capacity(2, 2.5), capacity(4, 5), "locality sustains a higher rate, × 1.60 to × 2.50"),
        (capacity(4, 5), capacity(2, 2.5), "locality sustains a lower rate, × 0.40 to × 0.62"),
        (capacity(4, 5), capacity(4, 5), "no difference shown (× 0.80 to × 1.25)"),
        (capacity(2, 2.5), capacity(4, None), "locality sustains a higher rate, at least × 1.60"),
        (capacity(2, None), capacity(4, 5), "no difference shown (× 0.00 to × 2.50)"),
        (capacity(0, 1), capacity(4, 5), "no ratio"),
    ],
)
async def test_a_finding_says_no_more_than_the_brackets_show(base, found, said, tmp_path):
    async with serving(Limited()) as url:
        summary = await search_policies(options(url, max_trials=1))
    shown = msgspec.structs.replace(summary, policies={"round_robin": base, "locality": found})
    (sentence,) = findings(shown)
    assert sentence.endswith(f": {said}")
    refused = msgspec.structs.replace(shown, valid=False, reasons=["the client <lagged>"])
    assert findings(refused) == []
    page = render_goodput(refused)
    assert "the client &lt;lagged&gt;" in page
    assert 'class="conclusion"' not in page


async def test_a_request_file_is_stretched(tmp_path):
    gateway = Limited()
    async with serving(gateway) as url:
        await search_policies(options(url, max_trials=1, policies=("locality",), out=tmp_path))
        given_file = Load(requests=tmp_path / "workload.jsonl")
        summary = await search_policies(
            options(url, load=given_file, max_trials=2, policies=("locality",))
        )
    first, second = summary.policies["locality"].trials
    assert first.rate == pytest.approx(50)
    assert second.rate == pytest.approx(100)


async def test_what_makes_a_trial_invalid_ends_the_search():
    gateway = Limited()

    async def behave(gateway, request, body):
        gateway.requests_total += 1
        return await whole_answer(gateway, request, body)

    gateway.behave = behave
    async with serving(gateway) as url:
        summary = await search_policies(options(url, policies=("locality",)))
    assert not summary.valid
    assert summary.reasons == [
        "locality at 50/s: the gateway routed 10 requests that were not ours"
    ]
    assert summary.policies["locality"].trials == []


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"slo": Slo()}, "needs bounds"),
        ({"max_concurrency": 3}, "closed loop"),
        ({"attainment": 0.0}, "attainment"),
        ({"precision": 0.0}, "precision"),
        ({"load": Load(arrivals=Arrivals(request_rate=math.inf))}, "finite"),
        ({"load": Load(arrivals=Arrivals(ramp_up_strategy="linear"))}, "ramp"),
        ({"policies": ("magic",)}, "no policy magic"),
    ],
)
async def test_searches_that_make_no_sense_are_refused(wrong, said):
    async with serving(FakeGateway()) as url:
        with pytest.raises(OptionError, match=said):
            await search_policies(options(url, **wrong))
