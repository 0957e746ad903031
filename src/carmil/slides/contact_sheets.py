"""Pictures for a visual check of tiles: one sheet per slide, and contact sheets of a cohort."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from carmil.files import atomic_file
from carmil.plot_style import picture_text
from carmil.slides.overview import OVERVIEW, Overview
from carmil.slides.slide import Slide, Tiles
from carmil.slides.tissue import Tissue

Colour = tuple[int, int, int]

# Okabe and Ito's colours, distinct for colour-blind readers.
_TISSUE: Colour = (0, 0, 0)
_KEPT: Colour = (0, 114, 178)
_LEFT_OUT: dict[str, Colour] = {"blank": (120, 120, 120), "pen": (230, 159, 0), "blurred": (213, 94, 0)}
_LONGEST = 1000  # pixels of the slide's picture
_MARGIN, _LINE = 20, 26
_WORDS = 7 * _LINE + _MARGIN  # height of the text below
_CELL, _ACROSS, _PAGE = 300, 6, 60  # contact sheet: pixels per slide, slides per row and per page


def write_sheet(
    path: Path, slide: Slide, overview: Overview, tissue: Tissue, tiles: Tiles, left_out: Mapping[str, Tiles]
) -> None:
    """Write the sheet of a slide: its picture with outlines of tissue and tiles, and numbers below."""
    picture = _draw_slide(slide, overview, tissue, tiles, left_out)
    width = max(picture.width, 700) + 2 * _MARGIN
    sheet = Image.new("RGB", (width, picture.height + _MARGIN + _WORDS), "white")
    sheet.paste(picture, ((width - picture.width) // 2, _MARGIN))
    pen = ImageDraw.Draw(sheet)
    for i, (words, colour) in enumerate(_words(slide, tissue, tiles, left_out)):
        text, font = picture_text(words, 15)
        pen.text((_MARGIN, picture.height + _MARGIN + 8 + i * _LINE), text, fill=colour, font=font)
    _save(sheet, path)


def write_contact_sheets(path: Path, cells: Sequence[tuple[str, str, Path | None]]) -> list[Path]:
    """Write sheets side by side, 60 per page. cells: name, words, and the sheet if there is one."""
    written = []
    for page, start in enumerate(range(0, len(cells), _PAGE)):
        here = cells[start : start + _PAGE]
        rows = -(-len(here) // _ACROSS)
        tall = _CELL + 2 * _LINE
        across = min(len(here), _ACROSS)
        contact = Image.new("RGB", (across * _CELL, rows * tall), "white")
        pen = ImageDraw.Draw(contact)
        for i, (name, words, sheet) in enumerate(here):
            x, y = i % _ACROSS * _CELL, i // _ACROSS * tall
            if sheet is not None:
                small = _picture_of(sheet)
                contact.paste(small, (x + (_CELL - small.width) // 2, y + (_CELL - small.height) // 2))
            for line, text in enumerate((name, words)):
                shown, font = picture_text(text, 13)
                pen.text((x + 8, y + _CELL + line * 20), _shorten(shown, font, _CELL - 16), fill="black", font=font)
        written.append(path if page == 0 else path.with_stem(f"{path.stem}_{page + 1}"))
        _save(contact, written[-1])
    return written


def _draw_slide(
    slide: Slide, overview: Overview, tissue: Tissue, tiles: Tiles, left_out: Mapping[str, Tiles]
) -> Image.Image:
    shown = Image.fromarray(overview.shown)
    scale = _LONGEST / max(shown.size)
    size = (max(1, round(shown.width * scale)), max(1, round(shown.height * scale)))
    picture = shown.resize(size, Image.Resampling.LANCZOS).convert("RGBA")
    zoom = overview.shown.shape[1] / overview.picture.shape[1]
    to_sheet = scale * zoom * slide.mpp / OVERVIEW
    above = Image.new("RGBA", size, (0, 0, 0, 0))
    pen = ImageDraw.Draw(above)
    for some, colour in ((tiles, _KEPT), *((left_out[name], _LEFT_OUT[name]) for name in left_out)):
        _draw_tiles(pen, some, to_sheet, colour)
    for region in tissue.regions:
        for outline, wide in ((region.outer, 3), *((hole, 2) for hole in region.holes)):
            pen.line([tuple(point) for point in np.asarray(outline * to_sheet)], fill=(*_TISSUE, 255), width=wide)
    return Image.alpha_composite(picture, above).convert("RGB")


def _draw_tiles(pen: ImageDraw.ImageDraw, tiles: Tiles, to_sheet: float, colour: Colour) -> None:
    side = tiles.size * to_sheet
    outlined = side >= 8  # smaller tiles are filled
    line, fill = ((*colour, 220), (*colour, 0 if colour == _KEPT else 90)) if outlined else (None, (*colour, 90))
    for x, y in tiles.corners * to_sheet:
        pen.rectangle((x, y, x + side - 1, y + side - 1), fill=fill, outline=line)


def _words(slide: Slide, tissue: Tissue, tiles: Tiles, left_out: Mapping[str, Tiles]) -> list[tuple[str, Colour]]:
    wide, high = slide.width * slide.mpp / 1000, slide.height * slide.mpp / 1000
    pieces, holes = len(tissue.regions), sum(len(region.holes) for region in tissue.regions)
    black = (0, 0, 0)
    gone = {name: len(some) for name, some in left_out.items()}
    return [
        (slide.name[:90], black),
        (f"{slide.width:,} x {slide.height:,} pixels at {slide.mpp:.4g} um/px, {wide:.1f} x {high:.1f} mm", black),
        (f"micrometres per pixel: {slide.mpp_from}"[:90], black),
        (
            f"tissue (black outline): {tissue.mm2:.2f} mm2, pieces: {pieces}, holes: {holes}, "
            f"saturation above {tissue.threshold} of 255",
            _TISSUE,
        ),
        (
            f"{len(tiles):,} tiles (blue) of {tiles.pixels} pixels at {tiles.mpp:.4g} um/px, {tiles.pixels * tiles.mpp:g} um wide",
            _KEPT,
        ),
        (
            "left out: " + (", ".join(f"{count} {name}" for name, count in gone.items()) or "nothing"),
            next((_LEFT_OUT[name] for name, count in gone.items() if count), black),
        ),
        ("research use only", black),
    ]


def _picture_of(sheet: Path) -> Image.Image:
    """Return a thumbnail of the picture on a sheet, without the text."""
    with Image.open(sheet) as opened:
        picture = opened.crop((_MARGIN, _MARGIN, opened.width - _MARGIN, opened.height - _WORDS)).convert("RGB")
    picture.thumbnail((_CELL - 16, _CELL - 16))
    return picture


def _shorten(text: str, font: ImageFont.FreeTypeFont, width: int) -> str:
    if font.getlength(text) <= width:
        return text
    while text and font.getlength(text + "…") > width:
        text = text[:-1]
    return text + "…"


def _save(picture: Image.Image, path: Path) -> None:
    with atomic_file(path) as aside:
        picture.save(aside, format="PNG", compress_level=4)
