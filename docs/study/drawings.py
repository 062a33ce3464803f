"""The study's drawings: SVG files that need nothing else.

over_load(title, panels)        lines of policies over the load, one panel a measure
ratios(title, policies, cells)  how far each policy is above the best, cell by cell
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from itertools import groupby
from typing import NamedTuple

from loadgen.plots import log_axis

COLOURS = {
    "marginal": "#0b6e4f",
    "locality": "#1f5fa8",
    "ttft": "#d98200",
    "additive": "#8a6d3b",
    "least_tokens": "#6b7a8f",
    "dynamo": "#b3261e",
    "llmd": "#7b3fa0",
    "sglang": "#00808a",
    "aibrix": "#c2528b",
    "least_requests": "#9a9a9a",
    "round_robin": "#222222",
}
"""Of the policies that ran in every cell, in the order in which they are listed."""

EMPHASISED = ("marginal", "locality")

PANEL, GAP, HEIGHT, LEFT, TOP, BOTTOM, NAMES = 300, 60, 300, 48, 52, 36, 110
LINE = 13
"""Names of lines stand so far apart at least."""

Series = Mapping[str, Sequence[tuple[float, float]]]
"""(load, seconds) of each policy, by load."""


def over_load(title: str, panels: Mapping[str, Series]) -> str:
    """One panel for each measure, seconds (logarithmic) over the load."""
    width = LEFT + len(panels) * (PANEL + NAMES) + (len(panels) - 1) * GAP
    parts = [_text(8, 18, title, 'font-weight="bold"')]
    for place, (measure, series) in enumerate(panels.items()):
        parts += _panel(LEFT + place * (PANEL + NAMES + GAP), measure, series)
    return _svg(width, TOP + HEIGHT + BOTTOM, parts)


def _panel(left: float, measure: str, series: Series) -> Iterator[str]:
    values = [seconds for points in series.values() for _, seconds in points]
    axis = log_axis(min(values), max(values))
    loads = sorted({load for points in series.values() for load, _ in points})

    def x_at(load: float) -> float:
        return left + PANEL * (load - loads[0]) / (loads[-1] - loads[0])

    def y_at(seconds: float) -> float:
        return TOP + HEIGHT * (1 - axis.place(seconds))

    yield _text(left, TOP - 14, measure, 'fill="#555"')
    for tick in axis.ticks:
        y = y_at(tick)
        yield f'<path d="M{left} {y:.1f}h{PANEL}" stroke="#e3e3e3"/>'
        yield _text(left - 6, y + 4, f"{tick:g} s", 'text-anchor="end" fill="#555"')
    for load in loads:
        at = 'text-anchor="middle" fill="#555"'
        yield _text(x_at(load), TOP + HEIGHT + 18, f"{load:.0%}", at)
    for policy, points in series.items():
        path = "M" + "L".join(f"{x_at(load):.1f} {y_at(s):.1f}" for load, s in points)
        thick = 2.6 if policy in EMPHASISED else 1.3
        yield (f'<path d="{path}" fill="none" stroke="{COLOURS[policy]}" stroke-width="{thick}"/>')
    lowest = TOP + HEIGHT
    ends = sorted(series.items(), key=lambda each: -each[1][-1][1])
    wanted = [y_at(points[-1][1]) for _, points in ends]
    for (policy, _), y in zip(ends, _apart(wanted, lowest), strict=True):
        weight = 'font-weight="bold"' if policy in EMPHASISED else ""
        yield _text(left + PANEL + 6, y + 4, policy, f'fill="{COLOURS[policy]}" {weight}')


def _apart(wanted: Sequence[float], lowest: float) -> list[float]:
    """`wanted`, from above to below, moved until they are `LINE` apart and end at `lowest`."""
    found: list[float] = []
    for y in wanted:
        found.append(max(y, found[-1] + LINE) if found else y)
    for place in range(len(found) - 1, -1, -1):
        below = found[place + 1] - LINE if place + 1 < len(found) else lowest
        found[place] = min(found[place], below)
    return found


class Column(NamedTuple):
    """One cell of the study. `ratio`: of each policy that ran to the best, 1 or more."""

    group: str
    name: str
    ratio: Mapping[str, float]


STEPS = (
    (1.02, "#0b6e4f", "≤ 2 %"),
    (1.05, "#6db58f", "≤ 5 %"),
    (1.10, "#cfe6d4", "≤ 10 %"),
    (1.25, "#fbe6a2", "≤ 25 %"),
    (1.50, "#f4b860", "≤ 50 %"),
    (2.00, "#e07b39", "≤ 100 %"),
    (float("inf"), "#a3241b", "more"),
)
"""Above the best by so much at most: colour and words."""

BOX, ROW_NAMES, HEADS = 15, 110, 84
SQUARE = f"h{BOX - 1}v{BOX - 1}h{1 - BOX}z"


def ratios(title: str, policies: Sequence[str], measures: Mapping[str, Sequence[Column]]) -> str:
    """For each measure a field of boxes: policies downwards, cells across."""
    columns = next(iter(measures.values()))
    groups = [(name, len(list(those))) for name, those in groupby(columns, key=lambda c: c.group)]
    width = ROW_NAMES + BOX * len(columns) + 6 * len(groups)
    parts = [_text(8, 18, title, 'font-weight="bold"'), *_legend(8, 30)]
    top = 60.0
    for measure, each in measures.items():
        parts += _field(top, measure, policies, each)
        top += HEADS + BOX * len(policies) + 20
    return _svg(width, top, parts)


def _legend(x: float, y: float) -> Iterator[str]:
    for _, colour, words in STEPS:
        yield f'<rect x="{x}" y="{y}" width="12" height="12" fill="{colour}"/>'
        yield _text(x + 16, y + 10, words, 'fill="#555"')
        x += 80


def _field(
    top: float, measure: str, policies: Sequence[str], columns: Sequence[Column]
) -> Iterator[str]:
    yield _text(8, top + HEADS - 8, measure, 'font-weight="bold"')
    for row, policy in enumerate(policies):
        y = top + HEADS + BOX * row + 11
        yield _text(ROW_NAMES - 8, y, policy, 'text-anchor="end"')
    x, before = float(ROW_NAMES), ""
    boxes: defaultdict[str, str] = defaultdict(str)
    for column in columns:
        if before != column.group:
            x += 6 if before else 0
            yield _text(x, top + 8, column.group, 'fill="#555"')
            before = column.group
        turned = f'transform="rotate(-90 {x + 11:.0f} {top + HEADS - 4:.0f})" fill="#555"'
        yield _text(x + 11, top + HEADS - 4, column.name, turned, size=10)
        for row, policy in enumerate(policies):
            ratio = column.ratio.get(policy)
            if ratio is not None:
                colour = next(colour for most, colour, _ in STEPS if ratio <= most)
                boxes[colour] += f"M{x:.0f} {top + HEADS + BOX * row:.0f}{SQUARE}"
        x += BOX
    for colour, path in boxes.items():
        yield f'<path d="{path}" fill="{colour}"/>'


def _text(x: float, y: float, text: str, more: str = "", size: int = 12) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" {more}>{escape(text)}</text>'


def _svg(width: float, height: float, parts: Sequence[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" '
        'font-family="sans-serif">'
    )
    return "\n".join([head, '<rect width="100%" height="100%" fill="#fff"/>', *parts, "</svg>\n"])
