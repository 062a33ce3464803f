import re
from html.parser import HTMLParser

import msgspec
import pytest

from loadgen.arrivals import Arrivals
from loadgen.compare import CompareOptions, compare_arms
from loadgen.plan import Load
from loadgen.plots import cumulative, linear_axis, log_axis, ratio_bars, work_bars
from loadgen.plots_time import hits_over_time, load_over_time, over_time
from loadgen.report import question
from loadgen.requests import Request
from loadgen.workloads import SharedPrefix
from tests.loadgen.fake_gateway import FakeGateway, chunk, serving
from tests.loadgen.test_requests import line

EVIL = "<script>alert('x')</script>&\"<b>"


class Tags(HTMLParser):
    VOID = frozenset({"meta", "br", "link", "img"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict]] = []

    def handle_starttag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.fixture
async def page(tmp_path):
    gateway = FakeGateway()

    async def behave(gateway, request, body):
        worker, prompt, hit = gateway.route(body)
        response = await gateway.begin(request, worker, prompt, hit)
        usage = {"prompt_tokens": prompt, "prompt_tokens_details": {"cached_tokens": hit}}
        await response.write(chunk(EVIL, 1, **usage) + b"data: [DONE]\n\n")
        return response

    gateway.behave = behave
    workload = SharedPrefix(groups=2, users=2, turns=2, system_tokens=40)
    async with serving(gateway) as url:
        await compare_arms(
            CompareOptions(
                url=url,
                load=Load(workload=workload, arrivals=Arrivals(request_rate=200.0)),
                out=tmp_path,
                max_client_lag_ms=0.0,
            )
        )
    return (tmp_path / "report.html").read_text()


async def test_the_report_needs_no_network_and_no_script(page):
    tags = Tags()
    tags.feed(page)
    assert tags.open == []
    names = {tag for tag, _ in tags.seen}
    assert names.isdisjoint({"script", "link", "img", "iframe", "object"})
    for _, attributes in tags.seen:
        assert not {"src", "href", "srcset"} & attributes.keys()
        assert not any(name.startswith("on") for name in attributes)
    assert not re.search(r"url\(|@import", page)
    # The only address is the gateway's own, as text.
    assert set(re.findall(r"https?://[^\s<\"]+", page)) <= set(
        re.findall(r"http://127\.0\.0\.1:\d+", page)
    )


async def test_the_report_escapes_what_the_model_said(page):
    assert "<script>" not in page
    assert "&lt;script&gt;alert(" in page
    assert "is right: a &lt;test&gt;" in page


async def test_the_report_says_how_many_workers_a_decision_leaves_out(page):
    assert page.count("and 3 more workers") == page.count("<details") > 0


async def test_the_report_says_that_it_is_invalid_and_why(page):
    assert "Invalid run" in page
    assert "the client lagged" in page


async def test_the_report_has_its_plots_and_both_themes(page):
    labels = set(re.findall(r'aria-label="([^"]+)"', page))
    assert labels == {
        "Cumulative distribution of time to first token",
        "Cumulative distribution of time per output token",
        "Time to first token over time",
        "Hits over time",
        "Cached-token ratio",
        "Work per worker",
        "round_robin: requests",
        "round_robin: pending prefill tokens",
        "locality: requests",
        "locality: pending prefill tokens",
    }
    assert "prefers-color-scheme: dark" in page
    for policy in ("round_robin", "locality"):
        assert f"<td>{policy}" in page or f"</span> {policy}</td>" in page


def test_names_are_escaped_in_plots():
    for drawing in (
        cumulative({EVIL: [1.0, 2.0]}, EVIL),
        over_time({EVIL: [(0.0, 1.0), (1.0, 2.0)]}, EVIL),
        ratio_bars({EVIL: 0.5}, 0.9),
        work_bars({EVIL: []}),
        hits_over_time({EVIL: [(0.0, 5, 1), (1.0, 5, 2), (2.0, 5, 4)]}),
        load_over_time({EVIL: [(0.0, 1.0), (1.0, 2.0)]}, 2.0, EVIL),
    ):
        assert "<script>" not in drawing
        assert "<b>" not in drawing


def test_plots_of_nothing_are_drawn():
    assert cumulative({"a": []}, "x").startswith("<svg")
    assert over_time({"a": []}, "x").startswith("<svg")
    assert hits_over_time({"a": []}).startswith("<svg")
    assert load_over_time({}, 0.0, "x").startswith("<svg")
    assert "no usage" in ratio_bars({"a": None}, None)


@pytest.mark.parametrize("high", [0.003, 0.9, 1.0, 7.0, 86.0, 1234.0, 5e6])
def test_a_linear_axis_ends_at_or_just_above_its_data(high):
    axis = linear_axis(high)
    assert axis.ticks[0] == 0
    assert high <= axis.ticks[-1] * (1 + 1e-9) < 2 * high
    assert 4 <= len(axis.ticks) <= 9
    assert axis.place(axis.ticks[-1]) == pytest.approx(1)


@pytest.mark.parametrize(("low", "high"), [(1, 1), (3, 900), (20, 50_000), (0.1, 3)])
def test_a_logarithmic_axis_encloses_its_data(low, high):
    axis = log_axis(low, high)
    assert axis.ticks[0] <= low
    assert axis.ticks[-1] >= high
    assert axis.place(axis.ticks[0]) == 0
    assert axis.place(axis.ticks[-1]) == pytest.approx(1)


def test_a_curve_reaches_every_request():
    drawing = cumulative({"a": [100.0, 300.0]}, "x")
    path = re.search(r'd="(M[^"]+)"', drawing)
    assert path is not None
    # Up by one half at each of the two values, then to the right edge.
    assert len(re.findall(r"[ML]", path[1])) == 5


def test_large_runs_make_small_drawings():
    many = [(i / 10, float(i % 977)) for i in range(50_000)]
    drawings = (
        cumulative({"a": [value for _, value in many]}, "x"),
        over_time({"a": many}, "x"),
        hits_over_time({"a": [(seconds, 100, 50) for seconds, _ in many]}),
        load_over_time({"a": many}, 977.0, "x"),
    )
    assert all(len(drawing) < 250_000 for drawing in drawings)


def test_hits_are_a_running_ratio_of_tokens():
    drawing = hits_over_time({"a": [(float(i), 100, 0 if i < 50 else 100) for i in range(100)]})
    line = re.search(r'points="([^"]+)"', drawing)
    assert line is not None
    heights = [float(point.split(",")[1]) for point in line[1].split()]
    assert heights[0] == max(heights)
    assert heights[-1] == min(heights)
    assert heights == sorted(heights, reverse=True)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"messages": [{"role": "user", "content": "why?"}]}, "why?"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, '[{"type":"text"}]'),
        ({"prompt": "once upon"}, "once upon"),
    ],
)
def test_the_question_is_what_was_said_last(body, text):
    request = line(body=msgspec.Raw(msgspec.json.encode({"stream": True, **body})))
    assert isinstance(request, Request)
    assert question(request) == text
