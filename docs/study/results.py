"""The rows of results.csv: one policy in one cell with one seed."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

Row = dict[str, Any]

DIGITS = 5
"""Significant digits kept of what was measured."""

KINDS: dict[str, type] = {
    "workload": str,
    "load": float,
    "capacity": str,
    "workers": int,
    "delay_ms": float,
    "policy": str,
    "seed": int,
    "requests": int,
    "saturation_rate": float,
    "offered_rate": float,
    "ttft_s": float,
    "ttft_p99_s": float,
    "tpot_ms": float,
    "e2e_s": float,
    "kept": float,
    "hit": float,
    "ideal": float,
    "imbalance": float,
    "errors": int,
}
"""The columns: rates are requests a second; `kept` is the share of requests within the SLO, `hit`
and `ideal` are shares of prompt tokens."""

EXACT = "saturation_rate"
"""Whoever goes on with a cell takes its rate from here: it is kept as it was."""


def read(file: Path) -> list[Row]:
    """All rows; none where there is no file yet."""
    if not file.exists():
        return []
    with file.open(encoding="utf-8", newline="") as lines:
        return [
            {name: KINDS[name](text) for name, text in row.items()} for row in csv.DictReader(lines)
        ]


def append(file: Path, row: Row) -> None:
    """Add a row, with the head where it is the first."""
    is_first = not file.exists()
    with file.open("a", encoding="utf-8", newline="") as lines:
        writer = csv.DictWriter(lines, KINDS, lineterminator="\n")
        if is_first:
            writer.writeheader()
        writer.writerow({name: _told(name, row[name]) for name in KINDS})


def _told(name: str, value: Any) -> Any:
    if isinstance(value, float) and name != EXACT:
        return f"{value:.{DIGITS}g}"
    return value
