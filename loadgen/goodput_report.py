"""The results of a search for the highest rate on disk: JSON, CSV and a page."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
from markupsafe import Markup

from loadgen import plots, plots_rate, wording
from loadgen.goodput_summary import GoodputSummary, Trial, findings
from loadgen.pages import page
from loadgen.report import REPORT_FILE, parameters
from loadgen.tables import trials_csv

GOODPUT_FILE = "goodput.json"
TRIALS_FILE = "goodput.csv"

COLUMNS = ("policy", "requests /s", "failed at /s", "within bounds", "goodput /s", "trials")


def write_goodput(folder: Path, summary: GoodputSummary) -> None:
    """Write all files into `folder`, which is made where it is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    data = msgspec.json.format(msgspec.json.encode(summary), indent=2)
    (folder / GOODPUT_FILE).write_bytes(data + b"\n")
    (folder / TRIALS_FILE).write_text(trials_csv(summary), encoding="utf-8")
    (folder / REPORT_FILE).write_text(render_goodput(summary), encoding="utf-8")


def goodput_rows(summary: GoodputSummary) -> list[list[str]]:
    """A row a policy, in the order of `COLUMNS`."""
    rows = []
    for name, found in summary.policies.items():
        best = found.best
        rows.append(
            [
                name,
                wording.number(found.rate),
                wording.number(found.too_much),
                wording.percent(best.measures.kept_share if best else None),
                wording.number(best.measures.goodput if best else None),
                str(len(found.trials)),
            ]
        )
    return rows


def render_goodput(summary: GoodputSummary) -> str:
    """One HTML page that needs nothing else: no network, no script."""

    def curves(value: Callable[[Trial], float | None]) -> plots_rate.Curves:
        return {
            name: [
                (trial.rate, known, trial.met)
                for trial in sorted(found.trials, key=lambda t: t.rate)
                if (known := value(trial)) is not None
            ]
            for name, found in summary.policies.items()
        }

    drawings = {
        "kept": plots_rate.share_at_rate(
            curves(lambda trial: trial.measures.kept_share),
            "Requests within the bounds",
            needed=summary.attainment,
        ),
        "ttft_p50": plots_rate.latency_at_rate(
            curves(lambda trial: trial.measures.ttft_ms.p50), "Time to first token, median"
        ),
        "ttft_p99": plots_rate.latency_at_rate(
            curves(lambda trial: trial.measures.ttft_ms.p99), "Time to first token, p99"
        ),
        "tpot_p50": plots_rate.latency_at_rate(
            curves(lambda trial: trial.measures.tpot_ms.p50), "Time per output token, median"
        ),
        "e2e": plots_rate.latency_at_rate(
            curves(lambda trial: trial.measures.e2e_ms.mean), "End to end, mean"
        ),
        "hits": plots_rate.share_at_rate(
            curves(lambda trial: trial.measures.cached_token_ratio), "Prompt tokens from a cache"
        ),
    }
    return page(
        "goodput_page.html",
        summary=summary,
        findings=findings(summary),
        columns=COLUMNS,
        rows=goodput_rows(summary),
        slo=wording.slo_text(summary.slo),
        parameters=parameters(summary.source),
        colour_of={name: index % plots.COLOURS for index, name in enumerate(summary.policies)},
        plots={name: Markup(drawing) for name, drawing in drawings.items()},
    )
