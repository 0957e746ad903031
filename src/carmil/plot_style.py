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


def picture_text(words: str, size: int, bold: bool = False) -> "tuple[str, FreeTypeFont]":
    """Return a text and the font to draw it with Pillow: an installed one where matplotlib's font lacks letters, such
    as Chinese ones.

    A letter that is in no font, or is invisible, is replaced by its number, such as ‹80C3›.
    """
    path = _own_font(bold)
    if lacking := _lacking(words, path):
        path = next((one for one in _installed_fonts() if not _lacking(lacking, one)), path)
        lacking = _lacking(words, path)
    shown = "".join(f"‹{ord(letter):04X}›" if letter in lacking else letter for letter in words)
    return shown, _font(path, size)


def _lacking(words: str, path: str) -> str:
    """Return the letters of a text that a font cannot show."""
    known = _letters(path)
    return "".join(letter for letter in words if ord(letter) not in known or not letter.isprintable())


def _own_font(bold: bool) -> str:
    import matplotlib

    return str(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / f"DejaVuSans{'-Bold' * bold}.ttf")


@lru_cache(maxsize=1)
def _installed_fonts() -> list[str]:
    from matplotlib import font_manager

    fonts = [
        font for font in font_manager.fontManager.ttflist if "LastResort" not in font.fname
    ]  # boxes for all letters
    upright = [font for font in fonts if font.style == "normal"]
    return [font.fname for font in sorted(upright, key=lambda font: font.weight not in (400, "normal", "regular"))]


@lru_cache(maxsize=256)
def _letters(path: str) -> frozenset[int]:
    from matplotlib.ft2font import FT2Font

    try:
        return frozenset(FT2Font(path).get_charmap())
    except (OSError, RuntimeError):  # a font that was uninstalled, or that FreeType cannot read
        return frozenset()


@lru_cache(maxsize=64)
def _font(path: str, size: int) -> "FreeTypeFont":
    from PIL import ImageFont

    return ImageFont.truetype(path, size)
