"""Definitions of metrics: what may not be defined, and the text that Prometheus gets."""

from __future__ import annotations

import pytest

import router.metrics
import worker.metrics
from cluster.metric_definition import MetricDefinition, Section, exposition, with_labels
from tests.exposed_metrics import definitions_of, needs_promtool, promtool_findings

GATEWAY = definitions_of(router.metrics.SECTIONS)
WORKER = definitions_of(worker.metrics.SECTIONS)


@pytest.mark.parametrize(
    ("kind", "name", "says"),
    [
        ("counter", "other_requests_total", "must begin with a_"),
        ("counter", "a_requests", "end in _total"),
        ("gauge", "a_requests_total", "end in _total"),
        ("gauge", "a_wait_ms", "no unit"),
        ("gauge", "a_wait", "no unit"),
        ("counter", "a_total", "no unit"),
    ],
)
def test_a_name_against_the_conventions_is_refused(kind: str, name: str, says: str) -> None:
    section = Section("Title", "a_")
    with pytest.raises(ValueError, match=says):
        getattr(section, kind)(name, "meaning")
    assert not section.definitions


@pytest.mark.parametrize(
    ("definitions", "prefix"),
    [(GATEWAY, "stemroute_gateway_"), (WORKER, "stemroute_worker_")],
    ids=["gateway", "worker"],
)
def test_every_metric_has_the_prefix_a_unit_and_a_meaning(
    definitions: list[MetricDefinition], prefix: str
) -> None:
    assert len({each.name for each in definitions}) == len(definitions) > 30
    for each in definitions:
        assert each.name.startswith(prefix)
        assert each.name.endswith("_total") == (each.kind == "counter")
        assert each.unit
        assert not each.meaning[0].islower()
        assert not each.meaning.endswith(".")


def test_gateway_and_worker_share_no_name() -> None:
    assert not {each.name for each in GATEWAY} & {each.name for each in WORKER}


def test_the_unit_is_the_longest_end_of_the_name() -> None:
    units = {
        "a_prefill_seconds_per_token": "seconds per token",
        "a_wait_seconds": "seconds",
        "a_hit_tokens_total": "tokens",
        "a_bus_up": "0 or 1",
    }
    assert {name: MetricDefinition(name, "gauge", "").unit for name in units} == units


SECTION = Section("Title", "a_")
ANSWERS = SECTION.counter("a_requests_total", "Answers", "status", "path")
QUEUE = SECTION.gauge("a_queued_requests", "Queue")
WAIT = SECTION.histogram("a_wait_seconds", "Wait")
TEXT = """\
# HELP a_requests_total Answers
# TYPE a_requests_total counter
a_requests_total{path="/x",status="200",worker="w\\"0"} 2.0
a_requests_total{path="/y",status="404",worker="w\\"0"} 1.0
# HELP a_queued_requests Queue
# TYPE a_queued_requests gauge
a_queued_requests{worker="w\\"0"} 3.0
# HELP a_wait_seconds Wait
# TYPE a_wait_seconds histogram
a_wait_seconds_bucket{le="0.5",worker="w\\"0"} 1.0
a_wait_seconds_bucket{le="2.0",worker="w\\"0"} 3.0
a_wait_seconds_bucket{le="+Inf",worker="w\\"0"} 6.0
a_wait_seconds_count{worker="w\\"0"} 6.0
a_wait_seconds_sum{worker="w\\"0"} 9.5
"""


def text() -> str:
    families = [
        ANSWERS.family({("200", "/x"): 2, ("404", "/y"): 1}),
        QUEUE.family(3),
        WAIT.histogram([0.5, 2.0], [1, 2, 3], 9.5),
    ]
    return exposition(with_labels(families, {"worker": 'w"0'})).decode()


def test_the_text_has_constant_labels_own_labels_and_cumulative_buckets() -> None:
    assert text() == TEXT


@pytest.mark.parametrize("samples", [{("200",): 1}, {("200", "/x", "y"): 1}, 1])
def test_wrong_labels_are_refused(samples: float | dict[tuple[str, ...], float]) -> None:
    with pytest.raises(ValueError, match="a_requests_total has the labels"):
        ANSWERS.family(samples)


@needs_promtool
def test_promtool_accepts_the_text_and_would_tell() -> None:
    assert not promtool_findings(text())
    wrong = "# HELP a_requests Answers\n# TYPE a_requests counter\na_requests 1\n"
    assert "_total" in promtool_findings(wrong)
