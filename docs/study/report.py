"""The study's tables and drawings, from its results."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from html import escape
from pathlib import Path
from typing import Any

Row = dict[str, Any]
FIELDS = ("workload", "load", "capacity", "workers", "delay_ms")
COLUMNS: dict[str, tuple[str, Callable[[Row], str]]] = {
    "TTFT mean s": ("ttft_s", lambda row: f"{row['ttft_s']:.2f}"),
    "TTFT p99 s": ("ttft_p99_s", lambda row: f"{row['ttft_p99_s']:.1f}"),
    "TPOT ms": ("tpot_ms", lambda row: f"{row['tpot_ms']:.1f}"),
    "E2E mean s": ("e2e_s", lambda row: f"{row['e2e_s']:.2f}"),
    "within SLO": ("kept", lambda row: f"{row['kept']:.1%}"),
    "hit": ("hit", lambda row: f"{row['hit']:.1%}"),
    "imbalance": ("imbalance", lambda row: f"{row['imbalance']:.2f}"),
    "failed": ("errors", lambda row: str(row["errors"])),
}
BOUNDS = {"ttft_s": 1.05, "e2e_s": 1.05, "ttft_p99_s": 1.10}
"""How far above the least `marginal` may be."""
KEPT_BOUND = 0.95


def write(folder: Path, results: Path) -> None:
    """results.md and one drawing a cell's mean TTFT, from the lines of `results`."""
    rows = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]
    cells: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        cells.setdefault(tuple(row[field] for field in FIELDS), []).append(row)
    parts = ["# Results\n", "Made by `study.py report`; see [README.md](README.md).\n"]
    parts.append(_verdicts(cells.values()))
    for index, found in enumerate(cells.values()):
        name = f"cell-{index:02d}.svg"
        title = _title(found[0])
        (folder / name).write_text(_bars(title, found), encoding="utf-8")
        parts += [f"\n## {title}\n", f"![mean TTFT]({name})\n", _table(found)]
    (folder / "results.md").write_text("\n".join(parts), encoding="utf-8")


def _title(row: Row) -> str:
    return (
        f"{row['workload']}, {row['load']:.0%} load, {row['capacity']} KV, {row['workers']} "
        f"workers, reports {row['delay_ms']:g} ms late"
    )


def _is_variant(row: Row) -> bool:
    return row["policy"].startswith("marginal, ")


def _table(rows: list[Row]) -> str:
    first = rows[0]
    ordered = sorted(rows, key=lambda row: (_is_variant(row), row["ttft_s"]))
    lines = [
        f"{first['requests']:,} requests at {first['offered_rate']:.2f} a second; an infinite "
        f"cache would reuse {first['ideal']:.1%}.\n",
        "| policy | " + " | ".join(COLUMNS) + " |",
        "|---|" + "---|" * len(COLUMNS),
    ]
    lines += [
        f"| {row['policy']} | " + " | ".join(tell(row) for _, tell in COLUMNS.values()) + " |"
        for row in ordered
    ]
    return "\n".join(lines) + "\n"


def _verdicts(cells: Iterable[list[Row]]) -> str:
    """Of each cell, the best policy by measure and where `marginal` and `locality` are."""
    lines = [
        "| cell | least mean TTFT | least mean E2E | least p99 TTFT | most within SLO | marginal "
        "against these | locality against these |",
        "|---|---|---|---|---|---|---|",
    ]
    for rows in cells:
        real = [row for row in rows if not _is_variant(row)]
        best = {field: min(real, key=lambda row, f=field: row[f]) for field in BOUNDS}
        kept = max(real, key=lambda row: row["kept"])
        told = [
            f"{best[f]['policy']} ({best[f][f]:.2f} s)" for f in ("ttft_s", "e2e_s", "ttft_p99_s")
        ]
        told.append(f"{kept['policy']} ({kept['kept']:.1%})")
        for policy in ("marginal", "locality"):
            mine = next((row for row in real if row["policy"] == policy), None)
            told.append("" if mine is None else _against(mine, best, kept))
        lines.append(f"| {_title(rows[0])} | " + " | ".join(told) + " |")
    return "\n".join(lines) + "\n"


def _against(mine: Row, best: dict[str, Row], kept: Row) -> str:
    parts = []
    for field, bound in BOUNDS.items():
        ratio = mine[field] / best[field][field]
        text = f"{ratio - 1:+.0%}"
        parts.append(text if ratio <= bound else f"**{text}**")
    ratio = mine["kept"] / kept["kept"] if kept["kept"] else 1.0
    text = f"{ratio - 1:+.0%}"
    parts.append(text if ratio >= KEPT_BOUND else f"**{text}**")
    return ", ".join(parts)


WIDTH, BAR, LEFT, TOP = 720, 20, 220, 44


def _bars(title: str, rows: list[Row]) -> str:
    """Horizontal bars of mean TTFT with a mark at its 99th percentile, least first."""
    real = sorted((row for row in rows if not _is_variant(row)), key=lambda row: row["ttft_s"])
    top = max(row["ttft_s"] for row in real) or 1.0
    scale = (WIDTH - LEFT - 90) / top
    height = TOP + BAR * len(real) + 10
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>',
        f'<text x="8" y="18" font-weight="bold">{escape(title)}</text>',
        '<text x="8" y="34" fill="#555">mean time to first token, seconds</text>',
    ]
    for index, row in enumerate(real):
        y = TOP + BAR * index
        colour = {"marginal": "#0b6e4f", "locality": "#1f5fa8"}.get(row["policy"], "#9aa5b1")
        parts += [
            f'<text x="{LEFT - 8}" y="{y + 14}" text-anchor="end">{escape(row["policy"])}</text>',
            f'<rect x="{LEFT}" y="{y + 3}" width="{row["ttft_s"] * scale:.1f}" '
            f'height="{BAR - 6}" fill="{colour}"/>',
            f'<text x="{LEFT + row["ttft_s"] * scale + 6:.1f}" y="{y + 14}">'
            f"{row['ttft_s']:.2f}</text>",
        ]
    return "\n".join([*parts, "</svg>"]) + "\n"
