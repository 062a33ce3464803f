"""Every metric as a page: `python -m ops.metrics_doc > docs/metrics.md`.

Names and meanings are those of the definitions in `router.metrics` and `worker.metrics`, so the
page cannot differ from what Prometheus is told.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

import router.metrics
import worker.metrics
from cluster.metric_definition import MetricDefinition, Section

INTRODUCTION = """# Metrics

Gateways and workers serve their metrics at `GET /metrics`, in Prometheus' text format and without
a key. Every gateway counts only what passes through it: sum counters over gateways.

The number of time series is bounded: label values are endpoints, HTTP statuses, reasons, states
and tiers, which are fixed, and the names of workers, models, tokenizers and policies in use. No
label depends on the content of a request. The unit is the end of the name. A histogram has the
series `…_bucket`, `…_sum` and `…_count`.
"""


def render() -> str:
    """The page in Markdown."""
    own = ", ".join(f"`{label}`" for label in worker.metrics.LABELS)
    return "\n".join(
        [
            INTRODUCTION,
            "## Gateway\n",
            *_tables(router.metrics.SECTIONS),
            f"## Worker\n\nAll metrics of a worker have the labels {own}.\n",
            *_tables(worker.metrics.SECTIONS),
        ]
    )


def _tables(sections: Iterable[Section]) -> Iterable[str]:
    for section in sections:
        rows = [_row(definition) for definition in section.definitions]
        yield "\n".join(
            [
                f"### {section.title}",
                "",
                "| metric | type | labels | unit | meaning |",
                "|---|---|---|---|---|",
                *rows,
                "",
            ]
        )


def _row(definition: MetricDefinition) -> str:
    labels = ", ".join(f"`{label}`" for label in definition.labels)
    return (
        f"| `{definition.name}` | {definition.kind} | {labels} | {definition.unit} "
        f"| {definition.meaning} |"
    )


if __name__ == "__main__":
    sys.stdout.write(render())
