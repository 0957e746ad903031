"""Style of figures: the colours of the HTML pages, the font of drawn text, and saving of matplotlib figures."""

from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from carmil.files import atomic_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from PIL.ImageFont import FreeTypeFont

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
    """Write the figure atomically, on a white background."""
    with atomic_file(path) as aside:
        figure.savefig(aside, dpi=150, facecolor="white")


@lru_cache(maxsize=64)
def picture_font(size: int, bold: bool = False) -> "FreeTypeFont":
    """Return the font for text drawn with Pillow. Unlike Pillow's default font it has letters such as ü."""
    import matplotlib
    from PIL import ImageFont

    fonts = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    return ImageFont.truetype(str(fonts / f"DejaVuSans{'-Bold' * bold}.ttf"), size)
