"""The results as CSV, for whoever draws their own plots."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from loadgen.observer import LoadSample, Observations
from loadgen.outcomes import Outcome, line_fields
from loadgen.summary import Summary


def arms_csv(summary: Summary) -> str:
    """One row an arm and repeat, with `repeat` "all" for the arm as a whole."""
    rows = []
    for name, arm in summary.arms.items():
        for repeat, figures in [("all", arm), *enumerate(arm.repeats, start=1)]:
            row: dict[str, object] = {"policy": name, "repeat": repeat}
            for measure in ("ttft_ms", "tpot_ms", "e2e_ms"):
                for statistic, value in msgspec.structs.asdict(getattr(figures, measure)).items():
                    row[f"{measure.removesuffix('_ms')}_{statistic}_ms"] = value
            for measure in ("cached_token_ratio", "goodput", "imbalance"):
                row[measure] = getattr(figures, measure)
            rows.append(row)
    return _csv(rows, list(rows[0]))


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


def _csv(rows: Iterable[Mapping[str, object]], columns: list[str]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
