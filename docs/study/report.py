"""The study's tables and drawings, from its results."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import drawings
from results import Row, read

FIELDS = ("workload", "load", "capacity", "workers", "delay_ms")
BOUNDS = {"ttft_s": 1.05, "e2e_s": 1.05, "ttft_p99_s": 1.10}
"""How far above the least `marginal` may be."""
KEPT_BOUND = 0.95
WORKLOADS = (
    *("conversation", "whole conversation", "shared_prefix", "chat", "agent", "rag"),
    *("rag_shuffled", "no_sharing", "hot_prefix"),
)
"""In the order in which they are told."""
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


def write(folder: Path, file: Path) -> None:
    """results.md and the drawings, from the rows of `file`."""
    lines = read(file)
    cells: dict[tuple[Any, ...], list[Row]] = {}
    for row in over_seeds(lines):
        cells.setdefault(_cell(row), []).append(row)
    cells = dict(sorted(cells.items(), key=_order))
    parts = [
        "# Results\n",
        "Made by `study.py report`; see [README.md](README.md). Means over the seeds, in brackets "
        "the least and the greatest of them.\n",
        _counts(cells.values()),
        _verdicts(cells.values()),
    ]
    for old in folder.glob("*.svg"):
        old.unlink()
    every = list(cells.values())
    _draw(folder / "ratios.svg", _ratios(every))
    parts.append("\n![how far each policy is above the best](ratios.svg)\n")
    for workload, those in _over_load(every).items():
        name = f"load-{workload}.svg"
        _draw(folder / name, drawings.over_load(f"{workload}, 16 workers, medium KV", those))
        parts.append(f"\n![{workload} over the load]({name})\n")
    for found in every:
        parts += [f"\n## {_title(found[0])}\n", _table(found)]
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


def _cell(row: Row) -> tuple[Any, ...]:
    return tuple(row[field] for field in FIELDS)


def _order(cell: tuple[tuple[Any, ...], list[Row]]) -> tuple[Any, ...]:
    """The trace first, then by workload; loads of the first size, then the sizes."""
    workload, load, capacity, workers, delay_ms = cell[0]
    plain = (capacity, workers, delay_ms) == ("medium", 16, 0.0)
    sizes = ("tight", "medium", "ample").index(capacity)
    return (WORKLOADS.index(workload), not plain, workers, delay_ms, sizes, load)


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


def _draw(file: Path, drawing: str) -> None:
    file.write_text(drawing, encoding="utf-8")


def _over_load(cells: Iterable[list[Row]]) -> dict[str, dict[str, drawings.Series]]:
    """Of each workload that ran at several loads: measure, policy, (load, seconds)."""
    found: dict[str, list[Row]] = defaultdict(list)
    for rows in cells:
        if _plain(rows[0]):
            found[rows[0]["workload"]] += _policies(rows)
    drawn: dict[str, dict[str, drawings.Series]] = {}
    for workload, rows in found.items():
        if len({row["load"] for row in rows}) < 2:
            continue
        drawn[workload] = {
            words: {
                policy: sorted((r["load"], r[field]) for r in rows if r["policy"] == policy)
                for policy in drawings.COLOURS
            }
            for field, words in (("ttft_s", "mean TTFT"), ("e2e_s", "mean time to the end"))
        }
    return drawn


def _plain(row: Row) -> bool:
    return (row["capacity"], row["workers"], row["delay_ms"]) == ("medium", 16, 0.0)


def _ratios(cells: Sequence[list[Row]]) -> str:
    """All cells at a glance."""
    names = {"ttft_s": "mean TTFT", "e2e_s": "mean E2E", "ttft_p99_s": "p99 TTFT"}
    measures = {
        words: [
            drawings.Column(
                rows[0]["workload"].removeprefix("whole "),
                _varied(rows[0]),
                {row["policy"]: ratios(row, rows)[field] for row in _policies(rows)},
            )
            for rows in cells
        ]
        for field, words in names.items()
    }
    title = "Above the best policy of the cell by"
    return drawings.ratios(title, list(drawings.COLOURS), measures)


def _varied(row: Row) -> str:
    """What a cell differs in, such as "90 % tight"."""
    parts = [f"{row['load']:.0%}"]
    parts += ["whole"] if row["workload"].startswith("whole") else []
    parts += [row["capacity"]] if row["capacity"] != "medium" else []
    parts += [f"{row['workers']} w."] if row["workers"] != 16 else []
    parts += [f"{row['delay_ms']:g} ms"] if row["delay_ms"] else []
    return " ".join(parts)
