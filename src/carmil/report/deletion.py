"""A picture of curves with their intervals, one panel per question: what happens as instances are removed."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from carmil.plot_style import COLOURS, STYLE, save_figure


@dataclass(frozen=True)
class Ribbon:
    """A curve over the share removed, 0 to 1, and its interval; without bounds a line alone. `colour` counts from 0."""

    label: str
    colour: int
    mean: Sequence[float | None]
    low: Sequence[float | None] = ()
    high: Sequence[float | None] = ()
    style: str = "-"


@dataclass(frozen=True)
class Panel:
    title: str
    ribbons: tuple[Ribbon, ...]


def draw_ribbons(rows: Sequence[Sequence[Panel]], path: Path, *, axis: str) -> None:
    """Rows of panels; `axis` says what the curves are of."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    columns = max(len(row) for row in rows)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(4.4 * columns, 3.2 * len(rows) + 0.8), layout="constrained")
        shown: dict[str, Line2D] = {}
        axes = figure.subplots(len(rows), columns, squeeze=False, sharex=True, sharey="row")
        for line, panels in zip(axes, rows, strict=True):
            for place, panel in zip(line, panels, strict=True):
                for ribbon in panel.ribbons:
                    colour = COLOURS[ribbon.colour % len(COLOURS)]
                    mean, low, high = (np.array(side, dtype=float) for side in (ribbon.mean, ribbon.low, ribbon.high))
                    gone = np.linspace(0, 100, len(mean))
                    (shown[ribbon.label],) = place.plot(gone, mean, ribbon.style, color=colour, linewidth=1.6)
                    if len(low):
                        place.fill_between(gone, low, high, color=colour, alpha=0.18, linewidth=0)
                place.set_title(panel.title)
                place.grid(True)
        figure.supxlabel("instances removed, most relevant first, per cent", fontsize=9)
        figure.supylabel(axis, fontsize=9)
        # One legend for all panels, above them, where it covers no curve.
        figure.legend(list(shown.values()), list(shown), loc="outside upper center", ncols=3, fontsize=8, frameon=False)
        save_figure(figure, path)
