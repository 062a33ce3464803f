"""Plots as inline SVG. Colours come from the page's style sheet, so one drawing suits both themes.

Arms have the classes `arm0`, `arm1`, …, in the order they ran. Every text is escaped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import NamedTuple

import numpy as np

from loadgen.measures import WorkerWork

WIDTH, HEIGHT = 560, 300
LEFT, RIGHT, TOP, BOTTOM = 52, 22, 12, 42
COLOURS = 8
"""Arms beyond these begin again with the first colour."""

CURVE_STEPS = 600


class Axis(NamedTuple):
    """A scale from data to the unit interval, with its ticks in data units."""

    place: Callable[[float], float]
    ticks: list[float]


def linear_axis(high: float) -> Axis:
    """From 0 to a round number at or above `high`, with four to eight steps."""
    high = high if high > 0 else 1.0
    power = 10.0 ** math.floor(math.log10(high / 5))
    step = next(power * factor for factor in (1, 2, 5, 10) if high / (power * factor) <= 7)
    count = math.ceil(high / step - 1e-9)
    top = count * step
    return Axis(lambda value: value / top, [step * i for i in range(count + 1)])


def log_axis(low: float, high: float) -> Axis:
    """From a 1-2-5 number at or below `low` to one at or above `high`; both must be positive."""
    numbers = [
        factor * 10.0**power
        for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        for factor in (1, 2, 5)
    ]
    first = max(i for i, number in enumerate(numbers) if number <= low * (1 + 1e-9))
    last = min(
        (i for i, number in enumerate(numbers) if number >= high * (1 - 1e-9)),
        default=len(numbers) - 1,
    )
    last = max(last, first + 1)
    ticks = numbers[first : last + 1]
    begin, span = math.log(ticks[0]), math.log(ticks[-1] / ticks[0])
    return Axis(lambda value: (math.log(max(value, ticks[0])) - begin) / span, ticks)


def latency_axis(values_ms: Sequence[float]) -> Axis:
    """Linear, or logarithmic where the values span more than a factor of 30."""
    if not values_ms:
        return linear_axis(1.0)
    low, high = max(float(np.percentile(values_ms, 2)), 0.1), max(values_ms)
    return log_axis(low, high) if high > 30 * low else linear_axis(high)


def duration(value_ms: float) -> str:
    """A tick or value, such as "250 ms" or "1.5 s"."""
    return f"{value_ms:g} ms" if value_ms < 1000 else f"{value_ms / 1000:g} s"


def cumulative(arms: Mapping[str, Sequence[float]], label: str) -> str:
    """Share of requests (y) that took at most so long (x), a step line for each arm."""
    axis = latency_axis([value for values in arms.values() for value in values])
    parts = [
        grid_x(axis, duration, label),
        grid_y(linear_axis(1.0), lambda v: f"{v * 100:.0f} %"),
    ]
    for index, (name, values) in enumerate(arms.items()):
        path: list[str] = []
        share = 0.0
        ordered = sorted(values)
        # Each step is a request, or several where there are more than can be seen.
        stride = max(1, len(ordered) // CURVE_STEPS)
        for rank in range(stride, len(ordered) + stride, stride):
            at = min(rank, len(ordered))
            x = x_at(axis.place(ordered[at - 1]))
            path.append(f"{'L' if path else 'M'}{x:.1f} {y_at(share):.1f}")
            share = at / len(ordered)
            path.append(f"L{x:.1f} {y_at(share):.1f}")
        if path:
            path.append(f"L{x_at(1):.1f} {y_at(1):.1f}")
            parts.append(
                f'<path class="line {arm_class(index)}" d="{"".join(path)}">{title(name)}</path>'
            )
    return svg(parts, f"Cumulative distribution of {label}")


def ratio_bars(arms: Mapping[str, float | None], ideal: float | None) -> str:
    """A bar for each arm's cached-token ratio, and the infinite cache's as a dashed line."""
    axis = linear_axis(1.0)
    left, bar, gap = 130, 26, 14
    height = TOP + len(arms) * (bar + gap) + BOTTOM

    def x(share: float) -> float:
        return left + axis.place(share) * (WIDTH - left - RIGHT)

    bottom = height - BOTTOM
    parts = [ticks_below(axis, x, bottom, lambda v: f"{v * 100:.0f} %", "cached / prompt tokens")]
    for index, (name, share) in enumerate(arms.items()):
        y = TOP + index * (bar + gap) + gap / 2
        parts.append(row_name(name, left, y + bar / 2))
        told = "no usage" if share is None else f"{100 * share:.1f} %"
        value = share or 0.0
        parts.append(
            f'<rect class="bar {arm_class(index)}" x="{left}" y="{y:.1f}" rx="2" '
            f'width="{x(value) - left:.1f}" height="{bar}">{title(f"{name}: {told}")}</rect>'
        )
        inside = value > 0.75
        style, anchor, shift = ("value inside", "end", -6) if inside else ("value", "start", 6)
        parts.append(
            f'<text class="{style}" text-anchor="{anchor}" x="{x(value) + shift:.1f}" '
            f'y="{y + bar / 2 + 4:.1f}">{told}</text>'
        )
    if ideal is not None:
        parts.append(
            f'<line class="ideal" x1="{x(ideal):.1f}" x2="{x(ideal):.1f}" y1="{TOP}" '
            f'y2="{bottom}">{title(f"infinite cache: about {100 * ideal:.1f} %")}</line>'
        )
    return svg(parts, "Cached-token ratio", height)


def work_bars(arms: Mapping[str, Sequence[WorkerWork]]) -> str:
    """Prompt tokens of each worker in each arm: computed (solid), then reused (pale)."""
    rows = [(index, name, share) for index, name in enumerate(arms) for share in arms[name]]
    totals = [share.computed_tokens + share.cached_tokens for _, _, share in rows]
    axis = linear_axis(max(totals, default=1))
    left, bar, gap = 130, (18 if len(rows) <= 12 else 9), (7 if len(rows) <= 12 else 3)
    space = 16
    height = TOP + len(rows) * (bar + gap) + len(arms) * space + BOTTOM

    def x(tokens: float) -> float:
        return left + axis.place(tokens) * (WIDTH - left - RIGHT)

    bottom = height - BOTTOM
    parts = [ticks_below(axis, x, bottom, thousands, "prompt tokens")]
    y = float(TOP)
    last = -1
    for index, name, share in rows:
        if index != last:
            y += space
            last = index
        middle = x(share.computed_tokens)
        end = x(share.computed_tokens + share.cached_tokens)
        told = f"{name}, {share.worker}: {share.requests} requests, "
        parts += [
            row_name(share.worker, left, y + bar / 2),
            f'<rect class="bar {arm_class(index)}" x="{left}" y="{y:.1f}" height="{bar}" '
            f'width="{middle - left:.1f}">{title(f"{told}{share.computed_tokens:,} computed")}'
            "</rect>",
            f'<rect class="bar pale {arm_class(index)}" x="{middle:.1f}" y="{y:.1f}" '
            f'height="{bar}" width="{end - middle:.1f}">'
            f"{title(f'{told}{share.cached_tokens:,} reused')}</rect>",
        ]
        y += bar + gap
    return svg(parts, "Work per worker", height)


def x_at(share: float) -> float:
    return LEFT + min(max(share, 0.0), 1.0) * (WIDTH - LEFT - RIGHT)


def y_at(share: float) -> float:
    return HEIGHT - BOTTOM - min(max(share, 0.0), 1.0) * (HEIGHT - BOTTOM - TOP)


def arm_class(index: int) -> str:
    return f"arm{index % COLOURS}"


def title(text: str) -> str:
    return f"<title>{escape(text)}</title>"


def thousands(tokens: float) -> str:
    return f"{tokens / 1000:g}k" if tokens >= 1000 else f"{tokens:g}"


def row_name(name: str, left: float, y: float) -> str:
    short = name if len(name) <= 18 else f"{name[:8]}…{name[-8:]}"
    return (
        f'<text class="row" x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">'
        f"{escape(short)}{title(name)}</text>"
    )


def ticks_below(
    axis: Axis, x: Callable[[float], float], bottom: float, form: Callable[[float], str], label: str
) -> str:
    lines = [
        f'<line class="grid" x1="{x(tick):.1f}" x2="{x(tick):.1f}" y1="{TOP}" y2="{bottom}"/>'
        f'<text class="tick" x="{x(tick):.1f}" y="{bottom + 16}" text-anchor="middle">'
        f"{form(tick)}</text>"
        for tick in axis.ticks
    ]
    middle = (x(axis.ticks[0]) + x(axis.ticks[-1])) / 2
    lines.append(
        f'<text class="label" x="{middle:.1f}" y="{bottom + 35}" text-anchor="middle">'
        f"{escape(label)}</text>"
    )
    return "".join(lines)


def grid_x(axis: Axis, form: Callable[[float], str], label: str) -> str:
    return ticks_below(axis, lambda tick: x_at(axis.place(tick)), HEIGHT - BOTTOM, form, label)


def grid_y(axis: Axis, form: Callable[[float], str]) -> str:
    return "".join(
        f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y_at(axis.place(tick)):.1f}" '
        f'y2="{y_at(axis.place(tick)):.1f}"/><text class="tick" x="{LEFT - 6}" '
        f'y="{y_at(axis.place(tick)) + 4:.1f}" text-anchor="end">{form(tick)}</text>'
        for tick in axis.ticks
    )


def svg(parts: Sequence[str], label: str, height: float = HEIGHT) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{escape(label)}">'
        f"{''.join(parts)}</svg>"
    )
