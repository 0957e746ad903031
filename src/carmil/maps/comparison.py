"""A figure of several maps, one row each, with zooms; and a figure of the tiles with the highest and lowest values."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from carmil.files import atomic_file
from carmil.maps.colours import INK, OUTLINES, SOFT
from carmil.maps.legend import RESEARCH, colour_bar, draw_text, wrap_text
from carmil.maps.mosaic import Box, picture_size
from carmil.maps.painting import Painter
from carmil.maps.tile_maps import SMALL, TileMap, colour_limits, leading_map
from carmil.slides.slide import Picture, Slide, Tiles

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageDraw import ImageDraw

PANEL, TILE = 560, 200  # pixels of a side
MARGIN, WORDS, NOTE = 28, 24, 20  # pixels: margin, size of text, size of notes
NUMBER = WORDS // 2 + 4  # half the width of a zoom's number
NARROWEST = 900  # pixels of a figure's width
ZOOMS, TILES_ACROSS = 2, 6  # default number of zooms, and their largest width in tiles
WIDEST = 2.0  # largest width of the whole slide, in widths of a zoom


def draw_comparison(
    painter: Painter, path: Path, *, regions: Sequence[Box] | None = None, answers: Sequence[str] = ()
) -> Path:
    """Draw the paper's figure: the slide itself, then one row per map, each with the same zooms (boxes in level-0 pixels).

    By default the zooms show where the evidence for or against the answer is largest. answers: lines for the head of the figure,
    with the answer and its decision rule.
    """
    slide, maps = painter.slide, painter.maps
    if regions is None:
        leading = leading_map(maps)
        plain = leading.negligible or leading.even  # no place is better than another
        sizes_of = np.abs(leading.values)
        counted = np.where(sizes_of >= SMALL * np.nanmax(sizes_of, initial=0.0), sizes_of, np.nan)
        regions = [] if plain else zoom_boxes(painter.tiles, counted, ZOOMS)
    boxes: list[Box] = [(0.0, 0.0, float(slide.width), float(slide.height)), *regions]
    sizes = [_fitted(box, PANEL * (WIDEST if i == 0 else 1), PANEL) for i, box in enumerate(boxes)]
    lefts = np.cumsum([MARGIN, *(width + MARGIN for width, _ in sizes)])
    wide = max(int(lefts[-1]), NARROWEST)
    room = wide - 2 * MARGIN
    head = [line for words in answers for line in wrap_text(words, WORDS, room)]
    scalings = [wrap_text(f"Colours: {one.scaling(painter.scale)}", NOTE, room) for one in maps]
    title, tall, line = round(2.2 * WORDS), max(height for _, height in sizes), round(1.4 * WORDS)
    row, under = title + tall + MARGIN // 2, round(2.8 * WORDS) + line * max(map(len, scalings))
    first = 3 * WORDS + line * len(head)
    page, draw = _page(wide, first + row + (row + under) * len(maps) + (3 if painter.outlined else 1) * WORDS)
    draw_text(draw, (MARGIN, WORDS), slide.name, WORDS, room=wide * 0.6, bold=True)
    draw_text(draw, (wide - MARGIN, WORDS), RESEARCH, WORDS, room=wide * 0.35, bold=True, anchor="ra")
    for i, words in enumerate(head):
        draw_text(draw, (MARGIN, 2.6 * WORDS + line * i), words, WORDS, room=room)
    tops = [first, *(first + row + (row + under) * i for i in range(len(maps)))]
    for column, (box, pixels) in enumerate(zip(boxes, sizes, strict=True)):
        bare = slide.read(box[0], box[1], box[2] - box[0], box[3] - box[1], pixels)
        pictures = [painter.outline(bare, box, line=3), *painter.paint(box, pixels, line=3)]
        for top, picture in zip(tops, pictures, strict=True):
            at = (int(lefts[column]), top + title)
            _paste(page, draw, picture, at)
            if column == 0:
                _mark(draw, at, regions, pixels[0] / slide.width)
            else:
                _number(draw, (at[0] + WORDS, at[1] + WORDS), column)
    for top, words in zip(tops, ["slide", *(one.title for one in maps)], strict=True):
        draw_text(draw, (MARGIN, top + 0.6 * WORDS), words, WORDS, room=room, bold=True)
    for top, one, scaling in zip(tops[1:], maps, scalings, strict=True):
        _bar(page, draw, one, painter, (MARGIN, top + row, wide - MARGIN))
        for i, words in enumerate(scaling):
            draw_text(draw, (MARGIN, top + row + 2.5 * WORDS + line * i), words, NOTE, room=room, colour=SOFT)
    _outlined(draw, painter, (MARGIN, page.height - 2.2 * WORDS), wide - MARGIN)
    return _save(page, path)


def zoom_boxes(tiles: Tiles, values: NDArray[np.float64], count: int) -> list[Box]:
    """Return squares around the highest values that do not overlap and lie inside the slide.

    A side is at most a third of the slide's shorter side. A slide whose half is smaller than two tiles has none.
    """
    shorter = min(tiles.width, tiles.height)
    if 2 * tiles.size > shorter / 2:
        return []
    side = max(2 * tiles.size, min(TILES_ACROSS * tiles.size, shorter / 3))
    middles = tiles.corners + tiles.size / 2
    found: list[Box] = []
    left = np.where(np.isnan(values), -np.inf, values)
    while len(found) < count and np.isfinite(left).any():
        middle = middles[int(left.argmax())]
        x, y = np.clip(middle - side / 2, 0, np.array([tiles.width, tiles.height]) - side)
        found.append((float(x), float(y), float(x + side), float(y + side)))
        near = (np.abs(middles - (x + side / 2, y + side / 2)) < side + tiles.size / 2).all(1)
        left = np.where(near, -np.inf, left)
    return found


def draw_extreme_tiles(slide: Slide, tiles: Tiles, one: TileMap, path: Path, *, top: int) -> Path:
    """Draw the tiles with the highest and the lowest values as the slide shows them, with value and coordinates below each."""
    high, low = extreme_tiles(one, top)
    across, line = max(len(high), len(low), 4), round(1.25 * WORDS)
    row = 2 * line + TILE + 4 * line
    page, draw = _page(MARGIN + (TILE + MARGIN) * across, 2 * row + 3 * line)
    room = page.width - 2 * MARGIN
    for top_of_row, words, chosen in ((0, one.ends[1], high), (row, one.ends[0], low)):
        counted = {0: "no tile", 1: "one tile"}.get(len(chosen), f"{len(chosen)} tiles")
        draw_text(draw, (MARGIN, top_of_row + line * 0.7), f"{words}: {counted}", WORDS, room=room, bold=True)
        for place, i in enumerate(chosen):
            x, y = tiles.corners[i].tolist()
            left, below = MARGIN + (TILE + MARGIN) * place, top_of_row + 2 * line
            _paste(page, draw, slide.read(x, y, tiles.size, tiles.size, (TILE, TILE)), (left, below))
            for n, text in enumerate((f"{one.values[i]:+.3g}".replace("-", "−"), f"x {x:,}", f"y {y:,}")):
                draw_text(draw, (left, below + TILE + 8 + n * line), text, NOTE, room=TILE)
    a_tile = f"{tiles.size * tiles.slide_mpp:.0f} µm"
    words = f"{slide.name}: {one.title}; upper left corners in level-0 pixels; a tile is {a_tile} wide; {RESEARCH}"
    if one.negligible:
        words = f"{slide.name}: {one.title}; negligible: {one.why_negligible}; {RESEARCH}"
    draw_text(draw, (MARGIN, 2 * row + line), words, NOTE, room=room, colour=SOFT)
    return _save(page, path)


def extreme_tiles(one: TileMap, top: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the `top` tiles with the highest and with the lowest values; of a signed map only those for, and those against.

    Tiles that are neither (see `TileMap.signs`) are left out, and all tiles of a negligible map.
    """
    if one.negligible:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    known = np.flatnonzero(~np.isnan(one.values))
    order = known[np.argsort(one.values[known], kind="stable")]
    low, high = order[:top], order[::-1][:top]
    if one.signed:
        return high[one.signs[high] > 0], low[one.signs[low] < 0]
    return high, low


def _fitted(box: Box, width: float, height: float) -> tuple[int, int]:
    """Return the pixels of a panel that shows the box within this width and height."""
    across, down = box[2] - box[0], box[3] - box[1]
    return picture_size(across, down, round(min(width / across, height / down) * max(across, down)))


def _mark(draw: "ImageDraw", at: tuple[int, int], regions: Sequence[Box], scale: float) -> None:
    """Draw the numbered zooms onto the whole slide."""
    for i, box in enumerate(regions, 1):
        x, y, right, bottom = (round(at[n % 2] + box[n] * scale) for n in range(4))
        draw.rectangle((x - 2, y - 2, right + 2, bottom + 2), outline="white", width=6)
        draw.rectangle((x, y, right, bottom), outline=INK, width=2)
        _number(draw, (max(x, at[0] + NUMBER), max(y, at[1] + NUMBER)), i)


def _number(draw: "ImageDraw", middle: tuple[int, int], number: int) -> None:
    x, y = middle
    draw.ellipse((x - NUMBER, y - NUMBER, x + NUMBER, y + NUMBER), fill="white", outline=INK)
    draw_text(draw, (x, y), str(number), WORDS - 6, room=2 * NUMBER, bold=True, anchor="mm")


def _bar(page: "Image", draw: "ImageDraw", one: TileMap, painter: Painter, at: tuple[int, int, int]) -> None:
    """Draw the colour bar below a row, and what its ends mean."""
    from PIL import Image

    left, top, right = at
    page.paste(Image.fromarray(colour_bar(one, right - left, WORDS)), (left, top))
    draw.rectangle((left, top, right, top + WORDS), outline=SOFT)
    low, high = colour_limits(one, painter.scale)
    y, half = top + 1.3 * WORDS, (right - left) * 0.46
    draw_text(draw, (left, y), f"{one.ends[0]} {low}", NOTE, room=half)
    draw_text(draw, (right, y), f"{one.ends[1]} {high}", NOTE, room=half, anchor="ra")
    if one.signed:
        draw_text(draw, ((left + right) / 2, y), "0", NOTE, room=half, anchor="ma")


def _outlined(draw: "ImageDraw", painter: Painter, at: tuple[float, float], right: float) -> None:
    x, y = at
    for i, name in enumerate(painter.outlined):
        if right - x < 6 * WORDS:
            return
        draw.line((x, y + 0.5 * WORDS, x + 1.5 * WORDS, y + 0.5 * WORDS), fill=OUTLINES[i % len(OUTLINES)], width=4)
        x += 2 * WORDS
        x += draw_text(draw, (x, y), f"annotated: {name}", NOTE, room=right - x) + WORDS


def _page(width: int, height: int) -> tuple["Image", "ImageDraw"]:
    from PIL import Image, ImageDraw

    page = Image.new("RGB", (width, height), "white")
    return page, ImageDraw.Draw(page)


def _paste(page: "Image", draw: "ImageDraw", picture: Picture, at: tuple[int, int]) -> None:
    from PIL import Image

    page.paste(Image.fromarray(picture), at)
    draw.rectangle((*at, at[0] + picture.shape[1] - 1, at[1] + picture.shape[0] - 1), outline=SOFT)


def _save(page: "Image", path: Path) -> Path:
    with atomic_file(path) as aside:
        page.save(aside, format="PNG", compress_level=2)
    return path
