"""Plots as SVG with the colours of the page, light or dark.

The SVG is in pages/plots.html; this module computes positions.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from carmil.report.page import PLOTS
from carmil.runs.facts import Calibration, Range
from carmil.statistics.intervals import wilson
from carmil.words import probability_text

COLOURS = 6  # colours of the page; a seventh line has the first colour again, dashed
MOST_POINTS = 500
SQUARE = {"size": 320, "left": 44, "right": 308, "bottom": 280, "top": 10}  # pixels; the ends of the axes
ROW = 15  # pixels between two rows of numbers below a plot

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Plot:
    """A plot of the report: key has a colour (or none) and words for each line; anchor is the plot's place on the page."""

    caption: str
    svg: str
    key: tuple[tuple[str, str], ...] = ()
    anchor: str = ""


@dataclass(frozen=True)
class Dot:
    """A dot, its vertical interval if it has one, and the words that appear when it is pointed at."""

    x: float
    y: float
    low: float = math.nan
    high: float = math.nan
    title: str = ""


@dataclass(frozen=True)
class Line:
    """A line of points, and the point of the decision rule; a control is grey.

    band: the corners of the area of its interval. ticks: short marks on the line. dots: one per group of cases.
    """

    points: Points
    dot: tuple[float, float] | None = None
    control: bool = False
    band: Points = ()
    ticks: Points = ()
    dots: Sequence[Dot] = ()


@dataclass(frozen=True)
class Axes:
    """The axes of a plot: their names, and the lowest and highest value of each."""

    x_label: str
    y_label: str
    x: tuple[float, float] = (0.0, 1.0)
    y: tuple[float, float] = (0.0, 1.0)

    @property
    def x_ticks(self) -> list[float]:
        return round_numbers(*self.x)

    @property
    def y_ticks(self) -> list[float]:
        return round_numbers(*self.y)

    def place(self, x: float, y: float) -> tuple[float, float]:
        """Return the pixels of a point, to a tenth."""
        across, up = ((value - low) / (high - low) for value, (low, high) in ((x, self.x), (y, self.y)))
        return (
            round(SQUARE["left"] + (SQUARE["right"] - SQUARE["left"]) * float(across), 1),
            round(SQUARE["bottom"] - (SQUARE["bottom"] - SQUARE["top"]) * float(up), 1),
        )

    def path(self, points: Points) -> str:
        """Return the path of a line, thinned to at most MOST_POINTS points."""
        step = max(1, math.ceil(len(points) / MOST_POINTS))
        places = (self.place(*point) for point in [*points[:-1:step], *points[-1:]])
        return " ".join(f"{x},{y}" for x, y in places)

    @property
    def drawn(self) -> dict[str, object]:
        """Return the values with which the template draws the axes."""
        (left, right), (low, high) = self.x, self.y
        return SQUARE | {
            "x_label": self.x_label,
            "y_label": self.y_label,
            "x_ticks": [(f"{tick:g}", self.place(tick, low)[0]) for tick in self.x_ticks if left <= tick <= right],
            "y_ticks": [(f"{tick:g}", self.place(left, tick)[1]) for tick in self.y_ticks if low <= tick <= high],
        }


def line_svg(
    axes: Axes,
    lines: Sequence[Line],
    *,
    guides: Sequence[Points] = (),
    below: Sequence[Sequence[str]] = (),
    below_label: str = "",
) -> str:
    """Draw lines; guides are dashed. below: rows of text below the ticks of x, one row per line, in its colour."""
    coloured = list(enumerate(line for line in lines if not line.control))
    layers = [
        {
            "colour": colour(i),
            "points": axes.path(line.points),
            "dot": line.dot and axes.place(*line.dot),
            "band": axes.path(line.band),
            "ticks": [axes.place(*tick) for tick in line.ticks],
            "dots": [_dot(axes, dot) for dot in line.dots],
        }
        for i, line in coloured
    ]
    rows = [(colour(i), SQUARE["size"] + ROW * (i + 1), texts) for i, texts in enumerate(below)]
    height = SQUARE["size"] + (ROW * (len(below) + 1) if below else 0)
    return PLOTS.lines(
        axes.drawn | {"height": height, "below": below_label},
        [axes.path(guide) for guide in guides if guide],
        [axes.path(line.points) for line in lines if line.control],
        layers,
        rows,
    )


def cases_svg(axes: Axes, cases: Sequence[tuple[float, float, str]], *, guides: Sequence[Points] = ()) -> str:
    """Draw a dot per case, (x, y, words that appear when it is pointed at); guides are dashed."""
    points = [(*axes.place(x, y), title) for x, y, title in cases]
    return PLOTS.cases(axes.drawn, [axes.path(guide) for guide in guides], points)


def share_svg(lines: Sequence[Line], *, guide: Points = (), x_label: str, y_label: str) -> str:
    """Draw lines in the unit square; `guide` is the line of chance."""
    return line_svg(Axes(x_label, y_label), lines, guides=[guide])


def reliability_svg(calibration: Calibration) -> str:
    """Draw the accuracy of the most probable class (with its 95 % interval) by confidence; below, the number of cases."""
    axes = Axes("probability of the most probable class", "share of correct answers")
    most, edges = max(calibration.count), calibration.edges
    bins = []
    for i, count in enumerate(calibration.count):
        if count:
            confidence, accuracy = calibration.confidence[i], calibration.accuracy[i]
            (left, top), (right, _) = axes.place(edges[i], 0.2 * count / most), axes.place(edges[i + 1], 0)
            title = f"{count} cases: {probability_text(confidence)} sure, {100 * accuracy:.1f} % right"
            dot = _dot(axes, Dot(confidence, accuracy, *wilson(accuracy, count), title))
            bins.append({"count": count, "left": left, "right": right, "top": top} | dot)
    return PLOTS.reliability(axes.drawn, axes.path([(0, 0), (1, 1)]), bins)


def stacks_svg(rows: Sequence[tuple[str, Sequence[float]]], names: Sequence[str], *, label: str) -> str:
    """Draw one bar per row, divided into shares that sum to 1; the part of a later name is darker."""
    strength = [0.15 + 0.75 * i / max(1, len(names) - 1) for i in range(len(names))]
    bars = []
    for words, shares in rows:
        left, parts = 0.0, []
        for name, share, shade in zip(names, shares, strength, strict=True):
            parts.append({"name": name, "share": share, "left": left, "strength": shade})
            left += share
        bars.append((words, parts))
    return PLOTS.stacks(bars, label)


def bars_svg(bars: Sequence[tuple[str, Range, bool]], *, fails: float) -> str:
    """Draw a bar from 0 to each value between -1 and 1, with its interval; failing bars have the colour of refuting evidence."""
    return PLOTS.bars(bars, fails)


def colour(i: int) -> str:
    """Return the CSS classes of line i, for the plot and its legend."""
    return f"s{i % COLOURS}" + (" dashed" if i >= COLOURS else "")


def round_numbers(low: float, high: float) -> list[float]:
    """Return a few round numbers from low to high."""
    if not high > low:
        return [float(low)]
    fifth = (high - low) / 5
    unit = 10.0 ** math.floor(math.log10(fifth))
    step = next(unit * number for number in (1, 2, 5, 10) if unit * number >= fifth * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [i * step for i in range(first, last + 1)]


def _dot(axes: Axes, dot: Dot) -> dict[str, object]:
    """Return the values with which the template draws a dot."""
    whisker = not math.isnan(dot.low)
    low, high = (axes.place(dot.x, end)[1] if whisker else None for end in (dot.low, dot.high))
    return {"place": axes.place(dot.x, dot.y), "low": low, "high": high, "title": dot.title}
