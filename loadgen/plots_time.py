"""Plots over the time of a run: latencies, hits and the load of every worker."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from loadgen.plots import (
    Axis,
    arm_class,
    duration,
    grid_x,
    grid_y,
    latency_axis,
    linear_axis,
    svg,
    thousands,
    title,
    x_at,
    y_at,
)

DOTS = 1200
"""So many requests of an arm are drawn at most; the lines are made of all of them."""

LINE_POINTS = 400
WINDOWS = 16
"""A running median or ratio looks at one part in so many of the run."""

Point = tuple[float, float]


def over_time(arms: Mapping[str, Sequence[Point]], label: str) -> str:
    """Points of `(seconds, ms)` for each arm, with a running median."""
    everything = [point for points in arms.values() for point in points]
    time = _time_axis(everything)
    axis = latency_axis([value for _, value in everything])
    parts = _frame(time, axis, duration)
    for index, (name, points) in enumerate(arms.items()):
        ordered = sorted(points)
        for seconds, value in ordered[:: max(1, -(-len(ordered) // DOTS))]:
            x, y = x_at(time.place(seconds)), y_at(axis.place(value))
            parts.append(
                f'<circle class="dot {arm_class(index)}" cx="{x:.1f}" cy="{y:.1f}" r="2.6">'
                f"{title(f'{name}: {duration(round(value))} at {seconds:.1f} s')}</circle>"
            )
        medians = [
            (ordered[i][0], float(np.median([value for _, value in ordered[low:high]])))
            for i, low, high in _windows(len(ordered))
        ]
        parts.append(_line(medians, time, axis, index, f"{name}: running median"))
    return svg(parts, f"{label} over time")


def hits_over_time(arms: Mapping[str, Sequence[tuple[float, int, int]]]) -> str:
    """`(seconds, prompt tokens, cached tokens)` of each arm's requests, as a running ratio."""
    time = _time_axis([(row[0], 0.0) for rows in arms.values() for row in rows])
    axis = linear_axis(1.0)
    parts = _frame(time, axis, lambda share: f"{share * 100:.0f} %")
    for index, (name, rows) in enumerate(arms.items()):
        ordered = sorted(rows)
        prompt = np.concatenate(([0], np.cumsum([row[1] for row in ordered])))
        cached = np.concatenate(([0], np.cumsum([row[2] for row in ordered])))
        ratios = [
            (ordered[i][0], float((cached[high] - cached[low]) / (prompt[high] - prompt[low])))
            for i, low, high in _windows(len(ordered))
            if prompt[high] > prompt[low]
        ]
        parts.append(_line(ratios, time, axis, index, f"{name}: cached / prompt tokens"))
    return svg(parts, "Hits over time")


def load_over_time(workers: Mapping[str, Sequence[Point]], top: float, label: str) -> str:
    """A line a worker of `(seconds, load)`; `top` is the highest load of all charts together."""
    time = _time_axis([point for points in workers.values() for point in points])
    axis = linear_axis(top)
    parts = _frame(time, axis, thousands)
    for index, (name, points) in enumerate(workers.items()):
        parts.append(_line(_thin(points), time, axis, index, name, style="thin"))
    return svg(parts, label)


def _time_axis(points: Sequence[Point]) -> Axis:
    return linear_axis(max((seconds for seconds, _ in points), default=1.0))


def _frame(time: Axis, axis: Axis, form: Callable[[float], str]) -> list[str]:
    return [grid_x(time, lambda v: f"{v:g} s", "time in the run"), grid_y(axis, form)]


def _windows(count: int) -> list[tuple[int, int, int]]:
    """`(middle, low, high)` of windows along `count` ordered things."""
    reach = max(2, count // WINDOWS // 2)
    step = max(1, count // LINE_POINTS)
    return [(i, max(0, i - reach), min(count, i + reach + 1)) for i in range(0, count, step)]


def _thin(points: Sequence[Point]) -> list[Point]:
    """At most about `LINE_POINTS`, of each stretch the highest: peaks are what matters."""
    step = max(1, len(points) // LINE_POINTS)
    return [max(points[i : i + step], key=lambda p: p[1]) for i in range(0, len(points), step)]


def _line(
    points: Sequence[Point], time: Axis, axis: Axis, index: int, name: str, style: str = ""
) -> str:
    if len(points) < 2:
        return ""
    line = " ".join(
        f"{x_at(time.place(seconds)):.1f},{y_at(axis.place(value)):.1f}"
        for seconds, value in points
    )
    css = f"line {style} {arm_class(index)}"
    return f'<polyline class="{css}" points="{line}">{title(name)}</polyline>'
