"""The legend below a map: the meaning and scale of its colours, the class, and a scale bar."""

from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw

from carmil.maps.colours import INK, NOTHING, OUTLINES, SOFT, blend, colour_table
from carmil.maps.tile_maps import Scale, TileMap, colour_limits
from carmil.plot_style import picture_text
from carmil.slides.slide import Picture

RESEARCH = "research use only"
NARROWEST = 880  # pixels that the text needs
BAR_LENGTHS = (10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000)  # micrometres of a scale bar


def legend(one: TileMap, *, slide: str, scale: Scale, width: int, mpp: float, outlined: Sequence[str] = ()) -> Picture:
    """Return a band of `width` pixels. mpp: micrometres per pixel of the map above; outlined: classes of the contours on it."""
    size = max(13, min(width // 55, 64))
    line = round(size * 1.65)
    cautions = [one.why_uniform] if one.why_uniform else []
    band = Image.new("RGB", (width, round(line * (8.4 + len(cautions)))), "white")
    draw, margin = ImageDraw.Draw(band), size
    draw_text(draw, (margin, line * 0.5), one.title, size, room=width * 0.7, bold=True)
    draw_text(draw, (width - margin, line * 0.5), RESEARCH, size, room=width * 0.28, bold=True, anchor="ra")
    bar = (margin, round(line * 1.75), width - margin, round(line * 2.75))
    band.paste(Image.fromarray(colour_bar(one, bar[2] - bar[0], bar[3] - bar[1])), bar[:2])
    draw.rectangle(bar, outline=SOFT)
    low, high = colour_limits(one, scale)
    half = (width - 2 * margin) * (0.42 if one.signed else 0.49)
    draw_text(draw, (margin, line * 2.95), f"{one.ends[0]} {low}", size, room=half)
    draw_text(draw, (width - margin, line * 2.95), f"{one.ends[1]} {high}", size, room=half, anchor="ra")
    if one.signed:
        draw_text(draw, (width / 2, line * 2.95), "0", size, room=half, anchor="ma")
    words = f"{one.scaling(scale)}; overlapping tiles averaged; no colour: no tile"
    y = line * 4.1
    for note in (one.meaning, words, *cautions):
        draw_text(draw, (margin, y), note, size, room=width - 2 * margin, colour=INK if note in cautions else SOFT)
        y += line
    draw_text(draw, (margin, y), f"slide {slide}", size, room=width * 0.55, colour=SOFT)
    _scale_bar(draw, (width - margin, y), size, mpp, width * 0.3)
    at, y = float(margin), y + line
    for i, name in enumerate(outlined):
        middle = y + line * 0.45
        draw.line((at, middle, at + 2 * size, middle), fill=OUTLINES[i % len(OUTLINES)], width=max(2, size // 5))
        room = width - margin - (at + 2.5 * size)
        at += 2.5 * size + draw_text(draw, (at + 2.5 * size, y), f"annotated: {name}", size, room=room) + size
        if at > width - 8 * size:
            break
    return np.asarray(band)


def colour_bar(one: TileMap, width: int, height: int) -> Picture:
    """Return the colours from the lowest to the highest, over a light grey like tissue."""
    table = colour_table(signed=one.signed)[np.linspace(0, NOTHING - 1, width).round().astype(int)]
    tissue = np.full((height, width, 3), 225, np.uint8)
    return blend(tissue, np.broadcast_to(table, (height, width, 4)))


def wrap_text(words: str, size: int, room: float) -> list[str]:
    """Break text between words into lines that are at most `room` pixels wide."""
    lines: list[str] = []
    for word in words.split():
        if lines and text_width(f"{lines[-1]} {word}", size) <= room:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines


def text_width(words: str, size: int, *, bold: bool = False) -> float:
    shown, font = picture_text(words, size, bold)
    return float(font.getlength(shown))


def draw_text(
    draw: ImageDraw.ImageDraw,
    at: tuple[float, float],
    words: str,
    size: int,
    *,
    room: float,
    bold: bool = False,
    anchor: str = "la",
    colour: tuple[int, int, int] = INK,
) -> float:
    """Draw text, smaller if it is wider than `room` pixels, and return its width in pixels."""
    while size > 8 and text_width(words, size, bold=bold) > room:
        size -= 1
    while len(words) > 4 and text_width(words, size, bold=bold) > room:
        words = words[:-2] + "…"
    shown, font = picture_text(words, size, bold)
    draw.text(at, shown, font=font, fill=colour, anchor=anchor)
    return text_width(words, size, bold=bold)


def _scale_bar(draw: ImageDraw.ImageDraw, at: tuple[float, float], size: int, mpp: float, room: float) -> None:
    """Draw a bar of a round length, and the length."""
    length = max([um for um in BAR_LENGTHS if um / mpp <= room], default=BAR_LENGTHS[0])
    words = f"{length} µm" if length < 1000 else f"{length // 1000} mm"
    x, y = at
    draw.rectangle((x - length / mpp, y + size * 1.35, x, y + size * 1.6), fill=INK)
    draw_text(draw, (x, y), words, size, room=room, anchor="ra")
