"""The style of all matplotlib pictures: the pages' colours, in light, and how a figure is saved."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from carmil.files import whole_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK, SOFT, GRID = "#1c2330", "#5b6474", "#dfe3ea"
COLOURS = ("#1464c8", "#c85a00", "#8050aa", "#0b7f69", "#c2317e", "#6f6c0c")
STYLE: dict[Any, Any] = {
    "font.size": 9,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": GRID,
    "axes.titlesize": 10,
    "axes.axisbelow": True,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "grid.color": GRID,
}


def save_figure(figure: "Figure", path: Path) -> None:
    """Write the figure on white; the file appears whole or not at all."""
    with whole_file(path) as aside:
        figure.savefig(aside, dpi=150, facecolor="white")
