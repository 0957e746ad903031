"""The picture of a sweep: the key figure against a number, one line per value of a second setting, one panel per combination of
the others.

With alpha, lambda and the distance, it is the paper's sensitivity figure.
"""

import math
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any, cast

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from carmil.plot_style import COLOURS, INK, SOFT, STYLE, save_figure
from carmil.runs.facts import Spread
from carmil.runs.settings import Value
from carmil.studies.figures import SHOWN
from carmil.studies.sweep import Point, SweepResult, setting_name, value_text

MOST_PANELS, MOST_BARS = 12, 60
WIDE = 50  # the axis is logarithmic if the largest value is more than this multiple of the smallest


def write_picture(swept: SweepResult, best: int | None, path: Path) -> str:
    """Draw the picture, with a ring around the best point on validation bags; return its caption."""
    ringed = None if best is None else swept.sweep.points[best]
    with matplotlib.rc_context(STYLE):
        numeric = [name for name, values in swept.sweep.over.items() if all(map(_is_number, values))]
        figure, words = _lines(swept, numeric, ringed) if numeric else _bars(swept, ringed)
        save_figure(figure, path)
    ring = "" if ringed is None else " Ring: the point selected on validation bags."
    return f"{words} Means over the folds; {_spread(swept)}.{ring}"


def _lines(swept: SweepResult, numeric: Sequence[str], ringed: Point | None) -> tuple[Figure, str]:
    over, figures = swept.sweep.over, _figures(swept)
    across, *others = [*numeric, *(name for name in over if name not in numeric)]
    apart, rest = others[:1], others[1:]
    panels = list(product(*(over[name] for name in rest)))
    drawn_panels = panels[:MOST_PANELS]
    columns = min(3, len(drawn_panels))
    rows = math.ceil(len(drawn_panels) / columns)
    figure = Figure(figsize=(3.2 * columns + 1.7, 2.7 * rows + 0.4), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True).flatten()
    for panel, values in zip(axes, drawn_panels, strict=False):
        here = [p for p in swept.sweep.points if all(p.values[n] == v for n, v in zip(rest, values, strict=True))]
        for i, value in enumerate(over[apart[0]] if apart else [None]):
            points = [point for point in here if not apart or point.values[apart[0]] == value]
            _line(panel, across, points, figures, i, value_text(value) if apart else None)
        for point in here:
            if point is ringed:
                _ring(panel, cast("float", point.values[across]), figures[point.name])
        if plain := next((point for point in here if point.idle), None):
            dashes: dict[str, Any] = {"color": SOFT, "linestyle": (0, (4, 3)), "linewidth": 1.2, "zorder": 1.5}
            panel.axhline(figures[plain.name], label="plain model,\nidle branch", **dashes)
        panel.set_title(", ".join(f"{setting_name(n)} = {value_text(v)}" for n, v in zip(rest, values, strict=True)))
        panel.grid(True)
        _number_axis(panel, cast("list[float]", over[across]))
    for panel in axes[len(drawn_panels) :]:
        panel.remove()
    figure.supxlabel(setting_name(across), fontsize=9)
    figure.supylabel(f"{_name(swept)} of the test folds, per cent", fontsize=9)
    handles, labels = axes[0].get_legend_handles_labels()
    if handles:
        title = setting_name(apart[0]) if apart else None
        figure.legend(handles, labels, title=title, loc="outside right upper", frameon=False)
    left = f" The first {len(drawn_panels)} of {len(panels)} panels." if len(drawn_panels) < len(panels) else ""
    dashed = " Dashed: the plain model beside an idle branch." if any(p.idle for p in swept.sweep.points) else ""
    return figure, f"{_name(swept)} of the test folds by {setting_name(across)}.{dashed}{left}"


def _line(
    panel: Axes, across: str, points: Sequence[Point], figures: dict[str, float], i: int, label: str | None
) -> None:
    places = sorted((point.values[across], figures[point.name]) for point in points)
    style = "-" if i < len(COLOURS) else "--"
    colour = COLOURS[i % len(COLOURS)]
    panel.plot(*zip(*places, strict=True), style, marker="o", markersize=4.5, linewidth=1.8, color=colour, label=label)


def _ring(panel: Axes, x: float, y: float) -> None:
    panel.plot([x], [y], "o", markersize=11, markerfacecolor="none", markeredgecolor=INK)


def _number_axis(panel: Axes, values: Sequence[float]) -> None:
    if min(values) > 0 and max(values) / min(values) >= WIDE:
        panel.set_xscale("log")
    if len(values) <= 8:
        panel.set_xticks(sorted(values), [value_text(value) for value in sorted(values)], minor=False)
        panel.set_xticks([], minor=True)


def _bars(swept: SweepResult, ringed: Point | None) -> tuple[Figure, str]:
    """Draw one bar per point, if no setting is a number."""
    points, figures = swept.sweep.points[:MOST_BARS], _figures(swept)
    figure = Figure(figsize=(6.4, 0.9 + 0.32 * len(points)), layout="constrained")
    panel = figure.subplots()
    rows = range(len(points))
    panel.barh(rows, [figures[point.name] for point in points], height=0.6, color=COLOURS[0])
    names = [", ".join(value_text(value) for value in point.values.values()) for point in points]
    panel.set_yticks(rows, names)
    panel.invert_yaxis()
    for row, point in enumerate(points):
        value = figures[point.name]
        panel.annotate(f"{value:.1f}", (value, row), (9, 0), textcoords="offset points", va="center")
        if point is ringed:
            _ring(panel, value, row)
    panel.set(xlim=(0, 116), xlabel=f"{_name(swept)} of the test folds, per cent")
    panel.grid(True, axis="x")
    total = len(swept.sweep.points)
    return figure, f"{_name(swept)} of the test folds." + (
        f" The first {len(points)} of {total} points." * (len(points) < total)
    )


def _name(swept: SweepResult) -> str:
    """Return the name of the key figure in words."""
    return SHOWN[swept.runs[0].target.key_figure]


def _spreads(swept: SweepResult) -> list[Spread]:
    """Return the key figure of each run; NaN if undefined."""
    key = swept.runs[0].target.key_figure
    return [run.metrics.summary.get(key, Spread(math.nan, math.nan)) for run in swept.runs]


def _figures(swept: SweepResult) -> dict[str, float]:
    """Return the key figure in per cent, by the point's name."""
    pairs = zip(swept.sweep.points, _spreads(swept), strict=True)
    return {point.name: 100 * spread.mean for point, spread in pairs}


def _spread(swept: SweepResult) -> str:
    known = [100 * spread.std for spread in _spreads(swept) if not math.isnan(spread.std)]
    if not known:
        return "one fold, so no spread is known"
    return f"their standard deviation over the folds is {min(known):.1f} to {max(known):.1f}"


def _is_number(value: Value) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
