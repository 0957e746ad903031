"""Plots of shares against shares as SVG that takes its colours from the page, light or dark. c bins."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from carmil.runs.facts import Calibration, Range
from carmil.statistics.intervals import wilson

SIZE = 320
LEFT, BOTTOM, TOP, RIGHT = 44, 40, 10, 12
COLOURS = 6  # that the page knows; a seventh line has the first colour again, dashed
MOST_POINTS = 500

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Line:
    """A line from share to share, and the point at which the answers are; a control is grey."""

    points: Points
    dot: tuple[float, float] | None = None
    control: bool = False


def share_svg(lines: Sequence[Line], *, guide: Points = (), x_label: str, y_label: str) -> str:
    """Draw lines in the unit square; `guide` is what chance would give."""
    parts = _frame(x_label, y_label)
    if guide:
        parts.append(f'<polyline class="guide" points="{_path(guide)}"/>')
    parts += [f'<polyline class="line control" points="{_path(line.points)}"/>' for line in lines if line.control]
    coloured = [line for line in lines if not line.control]
    parts += [f'<polyline class="line {colour(i)}" points="{_path(line.points)}"/>' for i, line in enumerate(coloured)]
    for i, line in enumerate(coloured):
        if line.dot is not None:
            x, y = line.dot
            parts.append(f'<circle class="dot {colour(i)}" cx="{_x(x):.1f}" cy="{_y(y):.1f}" r="4.5"/>')
    return "".join([*parts, "</svg>"])


def reliability_svg(calibration: Calibration) -> str:
    """Draw the accuracy of the most probable class (with its 95 % interval) by confidence; below, the number of cases."""
    parts = _frame("probability of the likeliest class", "share of right answers")
    parts.append(f'<polyline class="guide" points="{_path([(0, 0), (1, 1)])}"/>')
    edges, most = calibration.edges, max(calibration.count)
    bins = zip(calibration.count, calibration.confidence, calibration.accuracy, strict=True)
    for i, (count, confidence, accuracy) in enumerate(bins):
        if not count:
            continue
        left, width, high = _x(edges[i]), _x(edges[i + 1]) - _x(edges[i]), 0.2 * count / most
        parts.append(
            f'<rect class="mass" x="{left + 1:.1f}" width="{width - 2:.1f}" y="{_y(high):.1f}" '
            f'height="{_y(0) - _y(high):.1f}"><title>{count} cases</title></rect>'
        )
        low, up = wilson(accuracy, count)
        place = _x(confidence)
        parts.append(f'<line class="line s0" x1="{place:.1f}" x2="{place:.1f}" y1="{_y(low):.1f}" y2="{_y(up):.1f}"/>')
        parts.append(
            f'<circle class="dot s0" cx="{place:.1f}" cy="{_y(accuracy):.1f}" r="4.5">'
            f"<title>{count} cases: {confidence:.1%} sure, {accuracy:.1%} right</title></circle>"
        )
    return "".join([*parts, "</svg>"])


def bars_svg(bars: Sequence[tuple[str, Range, bool]], *, fails: float) -> str:
    """Draw a bar from 0 to each value between -1 and 1, with its interval; a failing one in the colour of refuting evidence."""
    left, right, row = 300, 700, 30
    bottom = row * len(bars) + 8

    def x(value: float) -> float:
        return left + (right - left) * (value + 1) / 2

    parts = [f'<svg viewBox="0 0 820 {bottom + 40}" role="img" aria-label="randomisation test" class="bars">']
    for tick in (-1.0, -0.5, 0.0, 0.5, 1.0):
        parts.append(f'<line class="{"grid" if tick else "zero"}" x1="{x(tick)}" x2="{x(tick)}" y1="0" y2="{bottom}"/>')
        parts.append(f'<text class="axis" x="{x(tick)}" y="{bottom + 16}" text-anchor="middle">{tick:g}</text>')
    parts.append(f'<line class="limit" x1="{x(fails)}" x2="{x(fails)}" y1="0" y2="{bottom}"/>')
    parts.append(f'<text class="axis" x="{x(0)}" y="{bottom + 34}" text-anchor="middle">went with the weights</text>')
    parts.append(
        f'<text class="axis" x="{x(1)}" y="{bottom + 34}" text-anchor="middle">the same map without them</text>'
    )
    for i, (name, found, failed) in enumerate(bars):
        middle, value = row * i + row / 2 + 4, found.value
        parts.append(f'<text x="{left - 10}" y="{middle + 4}" text-anchor="end">{escape(name)}</text>')
        if math.isnan(value):
            parts.append(f'<text x="{x(0) + 8}" y="{middle + 4}">no value: a map is constant</text>')
            continue
        begin, width = x(min(0.0, value)), abs(x(value) - x(0))
        kind = "bad" if failed else "good"
        parts.append(
            f'<rect class="{kind}" x="{begin:.1f}" y="{middle - 9}" width="{max(width, 1.5):.1f}" height="18"/>'
        )
        if not math.isnan(found.low):
            low, high = x(found.low), x(found.high)
            parts.append(f'<line class="whisker" x1="{low:.1f}" x2="{high:.1f}" y1="{middle}" y2="{middle}"/>')
        words = f"{value:.2f}" + " FAILS" * failed
        parts.append(
            f'<text class="{"verdict" if failed else "value"}" x="{right + 12}" y="{middle + 4}">{words}</text>'
        )
    return "".join([*parts, "</svg>"])


def colour(i: int) -> str:
    """The CSS classes of line i, for the plot and its legend."""
    return f"s{i % COLOURS}" + (" dashed" if i >= COLOURS else "")


def _frame(x_label: str, y_label: str) -> list[str]:
    parts = [f'<svg viewBox="0 0 {SIZE} {SIZE}" role="img" aria-label="{y_label} by {x_label}" class="plot">']
    middle_x, middle_y = _x(0.5), _y(0.5)
    for tick in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0):
        x, y = _x(tick), _y(tick)
        parts.append(f'<line class="grid" x1="{_x(0)}" x2="{_x(1)}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{_y(0)}" y2="{_y(1)}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>')
        parts.append(f'<text x="{x:.1f}" y="{SIZE - BOTTOM + 15}" text-anchor="middle">{tick:g}</text>')
    parts.append(f'<text x="{middle_x:.1f}" y="{SIZE - 6}" text-anchor="middle">{x_label}</text>')
    parts.append(f'<text transform="translate(12 {middle_y:.1f}) rotate(-90)" text-anchor="middle">{y_label}</text>')
    return parts


def _path(points: Points) -> str:
    """At most MOST_POINTS points."""
    step = max(1, math.ceil(len(points) / MOST_POINTS))
    kept = [*points[:-1:step], *points[-1:]]
    return " ".join(f"{_x(x):.1f},{_y(y):.1f}" for x, y in kept)


def _x(share: float) -> float:
    return LEFT + (SIZE - LEFT - RIGHT) * share


def _y(share: float) -> float:
    return SIZE - BOTTOM - (SIZE - BOTTOM - TOP) * share
