"""Plots over the request rate: what a policy still keeps as more is asked of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from loadgen.plots import (
    LEFT,
    RIGHT,
    WIDTH,
    Axis,
    arm_class,
    duration,
    grid_x,
    grid_y,
    latency_axis,
    linear_axis,
    log_axis,
    svg,
    title,
    x_at,
    y_at,
)

Curves = Mapping[str, Sequence[tuple[float, float, bool]]]
"""(requests a second, value, whether the bounds were met) of each policy, by rising rate."""


def share_at_rate(curves: Curves, label: str, needed: float | None = None) -> str:
    """Shares over the rate; `needed` is drawn as a dashed line."""
    axis = linear_axis(1.0)
    marks = []
    if needed is not None:
        y = y_at(axis.place(needed))
        marks.append(
            f'<line class="ideal" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}">'
            f"{title(f'asked for: {100 * needed:g} %')}</line>"
        )
    return _drawing(curves, axis, lambda share: f"{100 * share:.0f} %", label, marks)


def latency_at_rate(curves: Curves, label: str) -> str:
    """Milliseconds over the rate."""
    axis = latency_axis([value for points in curves.values() for _, value, _ in points])
    return _drawing(curves, axis, duration, label, [])


def _drawing(
    curves: Curves, axis: Axis, form: Callable[[float], str], label: str, marks: Sequence[str]
) -> str:
    rates = [rate for points in curves.values() for rate, _, _ in points]
    scale = log_axis(min(rates), max(rates)) if rates else linear_axis(1.0)
    parts = [
        grid_x(scale, lambda rate: f"{rate:g}", "requests a second"),
        grid_y(axis, form),
        *marks,
    ]
    for index, (name, points) in enumerate(curves.items()):
        places = [(x_at(scale.place(rate)), y_at(axis.place(v))) for rate, v, _ in points]
        if len(places) > 1:
            line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
            parts.append(
                f'<polyline class="line {arm_class(index)}" points="{line}">{title(name)}'
                "</polyline>"
            )
        for (x, y), (rate, value, met) in zip(places, points, strict=True):
            kept = "kept" if met else "not kept"
            told = f"{name} at {rate:.3g}/s: {form(round(value, 3))}, bounds {kept}"
            style = "trial met" if met else "trial"
            parts.append(
                f'<circle class="{style} {arm_class(index)}" cx="{x:.1f}" cy="{y:.1f}" r="4.5">'
                f"{title(told)}</circle>"
            )
    return svg(parts, f"{label}, by requests a second")
