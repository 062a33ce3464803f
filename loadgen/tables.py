"""The results as CSV, for whoever draws their own plots."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from loadgen.goodput_summary import GoodputSummary
from loadgen.measures import ArmMeasures, RepeatMeasures
from loadgen.observer import LoadSample, Observations
from loadgen.outcomes import Outcome, line_fields
from loadgen.summary import Summary


def arms_csv(summary: Summary) -> str:
    """One row an arm and repeat, with `repeat` "all" for the arm as a whole."""
    rows: list[dict[str, object]] = []
    for name, arm in summary.arms.items():
        rows.append({"policy": name, "repeat": "all", **_figures(arm)})
        rows += [
            {"policy": name, "repeat": repeat, **_figures(one)}
            for repeat, one in enumerate(arm.repeats, start=1)
        ]
    return _csv(rows, list(rows[0]))


def trials_csv(summary: GoodputSummary) -> str:
    """One row a policy and trial, in the order they ran."""
    columns = ["policy", "rate", "met", "kept_share", "errors"]
    rows: list[dict[str, object]] = [
        {
            "policy": name,
            "rate": trial.rate,
            "met": trial.met,
            "kept_share": trial.measures.kept_share,
            "errors": trial.measures.errors,
            **_figures(trial.measures),
        }
        for name, found in summary.policies.items()
        for trial in found.trials
    ]
    return _csv(rows, list(rows[0]) if rows else columns)


def requests_csv(outcomes: Sequence[Outcome]) -> str:
    """One row a request: the fields of `requests.jsonl` without the text."""
    rows = [line_fields(outcome) for outcome in outcomes]
    return _csv(rows, [name for name in rows[0] if name != "text"])


def load_csv(seen: Mapping[str, Sequence[Observations]]) -> str:
    """One row a worker and moment."""
    rows = [
        {"policy": arm, "repeat": repeat, **msgspec.structs.asdict(sample)}
        for arm, repeats in seen.items()
        for repeat, observations in enumerate(repeats, start=1)
        for sample in observations.samples
    ]
    return _csv(rows, ["policy", "repeat", *LoadSample.__struct_fields__])


def _figures(measures: ArmMeasures | RepeatMeasures) -> dict[str, object]:
    """The columns that every table of measures has."""
    row: dict[str, object] = {}
    for name in ("ttft_ms", "tpot_ms", "e2e_ms"):
        for statistic, value in msgspec.structs.asdict(getattr(measures, name)).items():
            row[f"{name.removesuffix('_ms')}_{statistic}_ms"] = value
    for name in ("cached_token_ratio", "goodput", "imbalance"):
        row[name] = getattr(measures, name)
    return row


def _csv(rows: Iterable[Mapping[str, object]], columns: list[str]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
