"""Plot matrices side by side, with the figures in their cells."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Colormap, LinearSegmentedColormap
from matplotlib.figure import Figure
from numpy.typing import NDArray

from carmil.maps.colours import ATTENTION, SIGNED
from carmil.plot_style import INK, SOFT, STYLE, save_figure

CELL = 0.78  # minimum side of a cell, in inches


@dataclass(frozen=True, eq=False)
class Matrix:
    """values (rows, columns), NaN for empty cells; `cells` is the text of each. `across` is the title of the columns."""

    title: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    values: NDArray[np.float64]
    cells: tuple[tuple[str, ...], ...]
    across: str = ""
    down: str = ""
    note: str = ""


def draw_matrices(
    matrices: Sequence[Matrix], path: Path, *, low: float, high: float, bar: str, signed: bool = False
) -> Path:
    """Plot matrices in colours from low to high; a signed scale has 0 in its middle. `bar` is the title of the colour bar."""
    widths = [max(2.4, CELL * len(one.columns)) for one in matrices]
    tall = max(2.0, max(CELL * 0.8 * len(one.rows) for one in matrices))
    with matplotlib.rc_context(STYLE):
        size = (sum(widths) + 1.9 * len(matrices) + 1.0, tall + (2.2 if any(one.note for one in matrices) else 1.8))
        figure = Figure(figsize=size, layout="constrained")
        panels = figure.subplots(1, len(matrices), squeeze=False, width_ratios=widths)[0]
        for panel, one in zip(panels, matrices, strict=True):
            image = panel.imshow(one.values, cmap=map_colours(signed=signed), vmin=low, vmax=high, aspect="auto")
            _label(panel, one)
            for (y, x), value in np.ndenumerate(one.values):
                dark = not np.isnan(value) and _is_dark(image.cmap(image.norm(value)))
                panel.text(
                    x, y, one.cells[y][x], ha="center", va="center", color="white" if dark else INK, fontsize=8.5
                )
        colour_bar = figure.colorbar(image, ax=list(panels), shrink=0.85, pad=0.015)
        colour_bar.set_label(bar)
        colour_bar.outline.set_visible(False)
        save_figure(figure, path)
    return path


def _label(panel: Axes, one: Matrix) -> None:
    panel.set_xticks(range(len(one.columns)), one.columns)
    panel.set_yticks(range(len(one.rows)), one.rows)
    panel.set_title(one.title, pad=10)
    panel.set(xlabel=one.across + (f"\n{one.note}" if one.note else ""), ylabel=one.down, facecolor="#f3f4f7")
    panel.spines[:].set_visible(False)
    panel.set_xticks(np.arange(len(one.columns) + 1) - 0.5, minor=True)
    panel.set_yticks(np.arange(len(one.rows) + 1) - 0.5, minor=True)
    panel.grid(which="minor", color="white", linewidth=2)
    panel.tick_params(which="both", length=0, colors=SOFT)


def map_colours(*, signed: bool) -> Colormap:
    stops = SIGNED if signed else ATTENTION
    scaled = [((at + 1) / 2 if signed else at, tuple(part / 255 for part in shade)) for at, shade in stops]
    return LinearSegmentedColormap.from_list("maps", scaled)


def _is_dark(colour: Sequence[float]) -> bool:
    return 0.2126 * colour[0] + 0.7152 * colour[1] + 0.0722 * colour[2] < 0.5
