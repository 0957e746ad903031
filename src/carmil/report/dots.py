"""Plot figures with their intervals: one row per name, one dot per group."""

from collections.abc import Mapping
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from carmil.plot_style import COLOURS, SOFT, STYLE, save_figure
from carmil.statistics.bootstrap import Interval

APART = 0.36  # vertical distance between the first and the last group, as a share of a row


def write_dots(groups: Mapping[str, Mapping[str, Interval]], path: Path, *, axis: str, guide: float, note: str) -> None:
    """Plot groups: name -> row -> figure; a row may be missing in some groups.

    A dashed line is drawn at `guide`; `note` explains the line.
    """
    names = list(dict.fromkeys(name for figures in groups.values() for name in figures))
    place = {name: len(names) - 1 - i for i, name in enumerate(names)}
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(7, 1.4 + 0.3 * len(names)), layout="constrained")
        panel = figure.subplots()
        for i, (group, figures) in enumerate(groups.items()):
            rows = [place[name] + APART * (0.5 - i / max(1, len(groups) - 1)) for name in figures]
            colour = COLOURS[i % len(COLOURS)]
            panel.hlines(rows, [f.low for f in figures.values()], [f.high for f in figures.values()], color=colour)
            panel.plot([f.value for f in figures.values()], rows, "o", markersize=4.5, color=colour, label=group)
        panel.axvline(guide, color=SOFT, linestyle=(0, (4, 3)), linewidth=1.2, zorder=0, label=note)
        panel.set_yticks(list(place.values()), list(place))
        panel.set_xlabel(axis)
        panel.grid(True, axis="x")
        figure.legend(loc="outside upper center", ncols=len(groups) + 1, frameon=False)
        save_figure(figure, path)
