"""The study's tables and drawings, from its results."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from html import escape
from pathlib import Path
from statistics import mean
from typing import Any

Row = dict[str, Any]
FIELDS = ("workload", "load", "capacity", "workers", "delay_ms")
BOUNDS = {"ttft_s": 1.05, "e2e_s": 1.05, "ttft_p99_s": 1.10}
"""How far above the least `marginal` may be."""
KEPT_BOUND = 0.95
BEFORE = "marginal, as it was"
COMPARED = (
    *("marginal", BEFORE, "locality", "ttft", "additive", "least_tokens", "llmd", "sglang"),
    *("aibrix", "dynamo"),
)
"""Of these it is told in how many cells they stay within the bounds."""


def _ranged(field: str, digits: int) -> Callable[[Row], str]:
    """The mean over the seeds, and from where to where they go where there are several."""

    def tell(row: Row) -> str:
        low, high = row["ranges"][field]
        text = f"{row[field]:.{digits}f}"
        return text if row["seeds"] == 1 else f"{text} ({low:.{digits}f}–{high:.{digits}f})"

    return tell


COLUMNS: dict[str, tuple[str, Callable[[Row], str]]] = {
    "TTFT mean s": ("ttft_s", _ranged("ttft_s", 2)),
    "TTFT p99 s": ("ttft_p99_s", _ranged("ttft_p99_s", 1)),
    "TPOT ms": ("tpot_ms", lambda row: f"{row['tpot_ms']:.1f}"),
    "E2E mean s": ("e2e_s", _ranged("e2e_s", 2)),
    "within SLO": ("kept", lambda row: f"{row['kept']:.1%}"),
    "hit": ("hit", lambda row: f"{row['hit']:.1%}"),
    "imbalance": ("imbalance", lambda row: f"{row['imbalance']:.2f}"),
    "failed": ("errors", lambda row: f"{row['errors']:.0f}"),
    "seeds": ("seeds", lambda row: str(row["seeds"])),
}


def write(folder: Path, results: Path) -> None:
    """results.md and one drawing a cell's mean TTFT, from the lines of `results`."""
    lines = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]
    cells: dict[tuple[Any, ...], list[Row]] = {}
    for row in over_seeds(lines):
        cells.setdefault(tuple(row[field] for field in FIELDS), []).append(row)
    parts = [
        "# Results\n",
        "Made by `study.py report`; see [README.md](README.md). Means over the seeds, in brackets "
        "the least and the greatest of them.\n",
        _counts(cells.values()),
        _verdicts(cells.values()),
    ]
    for old in folder.glob("cell-*.svg"):
        old.unlink()
    for index, found in enumerate(cells.values()):
        name = f"cell-{index:02d}.svg"
        title = _title(found[0])
        (folder / name).write_text(_bars(title, found), encoding="utf-8")
        parts += [f"\n## {title}\n", f"![mean TTFT]({name})\n", _table(found)]
    (folder / "results.md").write_text("\n".join(parts), encoding="utf-8")


def over_seeds(lines: Iterable[Row]) -> list[Row]:
    """One row for each cell and policy: the mean of its seeds, and their ranges."""
    found: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for line in lines:
        found[(*(line[field] for field in FIELDS), line["policy"])].append(line)
    rows = []
    for (*cell, policy), same in found.items():
        measured = [name for name, value in same[0].items() if isinstance(value, float | int)]
        values = {name: [line[name] for line in same] for name in measured if name not in FIELDS}
        rows.append(
            {
                **dict(zip(FIELDS, cell, strict=True)),
                **{name: mean(each) for name, each in values.items()},
                "policy": policy,
                "seeds": len(same),
                "ranges": {name: (min(each), max(each)) for name, each in values.items()},
            }
        )
    return rows


def _title(row: Row) -> str:
    return (
        f"{row['workload']}, {row['load']:.0%} load, {row['capacity']} KV, {row['workers']} "
        f"workers, reports {row['delay_ms']:g} ms late"
    )


def _is_variant(row: Row) -> bool:
    return bool(row["policy"].startswith("marginal, "))


def _seeds(rows: Iterable[Row]) -> int:
    """With how many seeds the cell ran."""
    return int(max(row["seeds"] for row in rows if not _is_variant(row)))


def _policies(rows: list[Row]) -> list[Row]:
    """What may be the best: policies of the router that ran with every seed of the cell."""
    return [row for row in rows if not _is_variant(row) and row["seeds"] == _seeds(rows)]


def _ran(policy: str, row: Row, rows: Iterable[Row]) -> bool:
    """Whether `row` is the policy's, with every seed of the cell."""
    return bool(row["policy"] == policy and row["seeds"] == _seeds(rows))


def _table(rows: list[Row]) -> str:
    first = rows[0]
    ordered = sorted(rows, key=lambda row: (_is_variant(row), row["ttft_s"]))
    lines = [
        f"{first['requests']:,.0f} requests at {first['offered_rate']:.2f} a second; an infinite "
        f"cache would reuse {first['ideal']:.1%}.\n",
        "| policy | " + " | ".join(COLUMNS) + " |",
        "|---|" + "---|" * len(COLUMNS),
    ]
    lines += [
        f"| {row['policy']} | " + " | ".join(tell(row) for _, tell in COLUMNS.values()) + " |"
        for row in ordered
    ]
    return "\n".join(lines) + "\n"


def ratios(mine: Row, rows: list[Row]) -> dict[str, float]:
    """To the best policy of the cell, measure by measure."""
    best = _policies(rows)
    most = max(row["kept"] for row in best)
    return {
        **{field: mine[field] / min(row[field] for row in best) for field in BOUNDS},
        "kept": mine["kept"] / most if most else 1.0,
    }


def _missed(found: dict[str, float]) -> list[str]:
    missed = [field for field, bound in BOUNDS.items() if found[field] > bound]
    return missed + (["kept"] if found["kept"] < KEPT_BOUND else [])


def _counts(cells: Iterable[list[Row]]) -> str:
    """In how many cells each policy stays within the bounds."""
    lines = [
        "Cells within 5 % of the best policy (99th percentile: 10 %):\n",
        "| policy | cells | all four | mean TTFT | mean E2E | p99 TTFT | within SLO |",
        "|---|---|---|---|---|---|---|",
    ]
    cells = list(cells)
    for policy in COMPARED:
        missed = [
            _missed(ratios(row, rows)) for rows in cells for row in rows if _ran(policy, row, rows)
        ]
        met = [sum(field not in one for one in missed) for field in (*BOUNDS, "kept")]
        told = [len(missed), sum(not one for one in missed), *met]
        lines.append(f"| {policy} | " + " | ".join(str(number) for number in told) + " |")
    return "\n".join(lines) + "\n"


def _verdicts(cells: Iterable[list[Row]]) -> str:
    """Of each cell, the best policy by measure and where some are against it."""
    shown = ("marginal", BEFORE, "locality")
    lines = [
        "| cell | least mean TTFT | least mean E2E | least p99 TTFT | most within SLO | "
        + " | ".join(f"{policy} against these" for policy in shown)
        + " |",
        "|---|---|---|---|---|" + "---|" * len(shown),
    ]
    for rows in cells:
        best = _policies(rows)
        told = []
        for field in BOUNDS:
            least = min(best, key=lambda row, f=field: row[f])  # type: ignore[misc]
            told.append(f"{least['policy']} ({least[field]:.2f} s)")
        kept = max(best, key=lambda row: row["kept"])
        told.append(f"{kept['policy']} ({kept['kept']:.1%})")
        for policy in shown:
            mine = next((row for row in rows if _ran(policy, row, rows)), None)
            told.append("" if mine is None else _against(ratios(mine, rows)))
        lines.append(f"| {_title(rows[0])} | " + " | ".join(told) + " |")
    return "\n".join(lines) + "\n"


def _against(found: dict[str, float]) -> str:
    missed = _missed(found)
    parts = []
    for field, ratio in found.items():
        text = f"{ratio - 1:+.0%}"
        parts.append(f"**{text}**" if field in missed else text)
    return ", ".join(parts)


WIDTH, BAR, LEFT, TOP = 720, 20, 220, 44


def _bars(title: str, rows: Sequence[Row]) -> str:
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
