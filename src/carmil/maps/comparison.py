"""A page of several maps, a grid with zooms; and a figure of the tiles with the highest and lowest values."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from carmil.files import atomic_file
from carmil.maps.colours import INK, OUTLINES, SOFT
from carmil.maps.legend import RESEARCH, colour_bar, draw_text, text_width, wrap_text
from carmil.maps.mosaic import Box, picture_size
from carmil.maps.painting import Painter
from carmil.maps.tile_maps import SMALL, TileMap, colour_limits, leading_map
from carmil.slides.slide import Picture, Slide, Tiles

PAGE = (2339, 1654)  # pixels of a page: A4 at 200 dpi, on its side
ANSWER, TITLE, LEGEND = 60, 40, 26  # pixels of its text: 8, 5 and 3 mm on paper; the first two are legible from a metre
TITLE_ROW, LINE = round(1.45 * TITLE), round(1.3 * LEGEND)  # height of a line
MOST_COLUMNS, LOWEST, SHARE = 5, 260, 0.42  # of a grid; pixels of a cell's pictures; largest share that a zoom takes
TILE = 200  # pixels of a side
MARGIN, WORDS, NOTE = 28, 24, 20  # pixels: margin, size of text, size of notes
NUMBER = WORDS // 2 + 4  # half the width of a zoom's number
ZOOMS, TILES_ACROSS = 2, 6  # default number of zooms, and their largest width in tiles


def draw_comparison(
    painter: Painter, path: Path, *, regions: Sequence[Box] | None = None, answers: Sequence[str] = ()
) -> Path:
    """Draw one page: the answer, then a grid of the slide and every map, each with the same zooms (boxes in level-0 pixels).

    By default the zooms show where the evidence for or against the answer is largest. answers: lines for the head of the
    page, with the answer, which is drawn large, and its decision rule.
    """
    slide, maps = painter.slide, painter.maps
    if regions is None:
        leading = leading_map(maps)
        plain = leading.negligible or leading.even  # no position is better than another
        sizes_of = np.abs(leading.values)
        counted = np.where(sizes_of >= SMALL * np.nanmax(sizes_of, initial=0.0), sizes_of, np.nan)
        regions = [] if plain else zoom_boxes(painter.tiles, counted, ZOOMS)
    boxes: list[Box] = [(0.0, 0.0, float(slide.width), float(slide.height)), *regions]
    wide, room = PAGE[0], PAGE[0] - 2 * MARGIN
    head = [
        (line, size)
        for words in answers
        for size in (ANSWER if "Answer: " in words else LEGEND,)
        for line in wrap_text(words, size, room)
    ]
    first = MARGIN + round(1.6 * TITLE + 1.35 * sum(size for _, size in head)) + MARGIN // 2
    notes = _notes(maps, painter, room)
    foot = LINE * (len(notes) + (1 if painter.outlined else 0))
    grid = _best_grid(boxes, maps, painter, (room, PAGE[1] - first - foot - MARGIN))
    page, draw = _page(wide, max(PAGE[1], first + grid.rows * (grid.height + MARGIN) + foot + MARGIN))
    draw_text(draw, (MARGIN, MARGIN), slide.name, TITLE, room=wide * 0.62, bold=True)
    draw_text(draw, (wide - MARGIN, MARGIN), RESEARCH, TITLE, room=wide * 0.3, bold=True, anchor="ra")
    y = MARGIN + 1.6 * TITLE
    for words, size in head:
        draw_text(draw, (MARGIN, y), words, size, room=room, bold=size == ANSWER)
        y += 1.35 * size
    cells = [
        (MARGIN + i % grid.columns * (grid.width + MARGIN), first + i // grid.columns * (grid.height + MARGIN))
        for i in range(1 + len(maps))
    ]
    for number, (box, (left, top, pixels)) in enumerate(zip(boxes, grid.panels, strict=True)):
        bare = slide.read(box[0], box[1], box[2] - box[0], box[3] - box[1], pixels)
        pictures = [painter.outline(bare, box, line=3), *painter.paint(box, pixels, line=3)]
        for (x, cell_top), picture in zip(cells, pictures, strict=True):
            at = (x + left, cell_top + TITLE_ROW + top)
            _paste(page, draw, picture, at)
            if number == 0:
                _mark(draw, at, regions, pixels[0] / slide.width)
            else:
                _number(draw, (at[0] + WORDS, at[1] + WORDS), number)
    titles = ["slide", *(one.title for one in maps)]
    size = min(TITLE, *(round(TITLE * grid.width / text_width(words, TITLE, bold=True)) for words in titles))
    for (x, top), words in zip(cells, titles, strict=True):
        draw_text(draw, (x, top + TITLE - size), words, max(size, LEGEND), room=grid.width, bold=True)
    for (x, top), one in zip(cells[1:], maps, strict=True):
        below = top + TITLE_ROW + grid.tall + MARGIN // 2
        _bar(page, draw, one, painter, (x, below, x + grid.width))
    y = page.height - foot - MARGIN / 2
    for words, colour in notes:
        draw_text(draw, (MARGIN, y), words, LEGEND, room=room, colour=colour)
        y += LINE
    _outlined(draw, painter, (MARGIN, y), wide - MARGIN)
    return _save(page, path)


@dataclass(frozen=True)
class _Grid:
    """Cells of `width` x `height` pixels, whose pictures are `tall` pixels high; panels: left, top and size of each picture in
    a cell, the whole slide first.
    """

    columns: int
    rows: int
    width: int
    height: int
    tall: int
    panels: Sequence[tuple[int, int, tuple[int, int]]]


def _best_grid(boxes: Sequence[Box], maps: Sequence[TileMap], painter: Painter, room: tuple[int, int]) -> _Grid:
    """Return the grid in which the slide is largest and every title fits its cell. Cells that would be too low for a picture
    make the page longer.
    """
    grids: list[_Grid] = []
    widest = max((text_width(one.title, LEGEND, bold=True) for one in maps), default=0.0)
    for columns in range(1, min(1 + len(maps), MOST_COLUMNS) + 1):
        rows = -(-(1 + len(maps)) // columns)
        width = (room[0] - (columns - 1) * MARGIN) // columns
        if grids and width < widest:
            break
        lines = max((1 + (_ends(one, painter, width)[0][0] == "low line") for one in maps), default=0)
        around = TITLE_ROW + MARGIN // 2 + round(1.3 * LEGEND) + LINE * lines
        panels = _arrange(boxes, width, max((room[1] - rows * MARGIN) // rows - around, LOWEST))
        tall = max(top + pixels[1] for _, top, pixels in panels)
        grids.append(_Grid(columns, rows, width, tall + around, tall, panels))
    fitting = [one for one in grids if one.rows * (one.height + MARGIN) <= room[1]] or grids[-1:]
    return max(fitting, key=lambda one: one.panels[0][2][0])


def _arrange(boxes: Sequence[Box], width: int, tall: int) -> list[tuple[int, int, tuple[int, int]]]:
    """Place the whole slide and its zooms: beside it, or below it if the slide is larger then."""
    gap, count = MARGIN // 2, len(boxes) - 1
    if not count:
        return [(0, 0, _fitted(boxes[0], width, tall))]
    beside = int(min((tall - gap * (count - 1)) / count, SHARE * width))
    below = int(min((width - gap * (count - 1)) / count, SHARE * tall))
    whole = [_fitted(boxes[0], width - beside - gap, tall), _fitted(boxes[0], width, tall - below - gap)]
    if whole[0][0] >= whole[1][0]:
        places = [(whole[0][0] + gap, i * (beside + gap)) for i in range(count)]
        side, first = beside, whole[0]
    else:
        places = [(i * (below + gap), whole[1][1] + gap) for i in range(count)]
        side, first = below, whole[1]
    zooms = [(*place, _fitted(box, side, side)) for place, box in zip(places, boxes[1:], strict=True)]
    return [(0, 0, first), *zooms]


def zoom_boxes(tiles: Tiles, values: NDArray[np.float64], count: int) -> list[Box]:
    """Return squares around the highest values that do not overlap and lie inside the slide.

    A side is at most a third of the slide's shorter side. None are returned for a slide whose shorter side is less than
    four tiles.
    """
    shorter = min(tiles.width, tiles.height)
    if 2 * tiles.size > shorter / 2:
        return []
    side = max(2 * tiles.size, min(TILES_ACROSS * tiles.size, shorter / 3))
    middles = tiles.corners + tiles.size / 2
    boxes: list[Box] = []
    left = np.where(np.isnan(values), -np.inf, values)
    while len(boxes) < count and np.isfinite(left).any():
        middle = middles[int(left.argmax())]
        x, y = np.clip(middle - side / 2, 0, np.array([tiles.width, tiles.height]) - side)
        boxes.append((float(x), float(y), float(x + side), float(y + side)))
        near = (np.abs(middles - (x + side / 2, y + side / 2)) < side + tiles.size / 2).all(1)
        left = np.where(near, -np.inf, left)
    return boxes


def draw_extreme_tiles(slide: Slide, tiles: Tiles, one: TileMap, path: Path, *, top: int) -> Path:
    """Draw the tiles of the slide with the highest and the lowest values, with value and coordinates below each."""
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
    """Return the `top` tiles with the highest and with the lowest values; for a signed map, only tiles for and tiles
    against.

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


def _mark(draw: ImageDraw.ImageDraw, at: tuple[int, int], regions: Sequence[Box], scale: float) -> None:
    """Draw the numbered zooms onto the whole slide."""
    for i, box in enumerate(regions, 1):
        x, y, right, bottom = (round(at[n % 2] + box[n] * scale) for n in range(4))
        draw.rectangle((x - 2, y - 2, right + 2, bottom + 2), outline="white", width=6)
        draw.rectangle((x, y, right, bottom), outline=INK, width=2)
        _number(draw, (max(x, at[0] + NUMBER), max(y, at[1] + NUMBER)), i)


def _number(draw: ImageDraw.ImageDraw, middle: tuple[int, int], number: int) -> None:
    x, y = middle
    draw.ellipse((x - NUMBER, y - NUMBER, x + NUMBER, y + NUMBER), fill="white", outline=INK)
    draw_text(draw, (x, y), str(number), WORDS - 6, room=2 * NUMBER, bold=True, anchor="mm")


def _bar(
    page: Image.Image, draw: ImageDraw.ImageDraw, one: TileMap, painter: Painter, at: tuple[int, int, int]
) -> None:
    """Draw the colour bar below a map, the meaning of its ends, and how colours are computed."""
    left, top, right = at
    page.paste(Image.fromarray(colour_bar(one, right - left, LEGEND)), (left, top))
    draw.rectangle((left, top, right, top + LEGEND), outline=SOFT)
    y = top + 1.3 * LEGEND
    for place, words in _ends(one, painter, right - left):
        x, anchor = (right, "ra") if place == "high" else ((left + right) / 2, "ma") if place == "0" else (left, "la")
        draw_text(draw, (x, y), words, LEGEND, room=right - left, anchor=anchor)
        y += LINE if place == "low line" else 0


def _ends(one: TileMap, painter: Painter, width: int) -> list[tuple[str, str]]:
    """Return the texts of the ends of a colour bar with their places: they share a line if there is room."""
    low, high = (f"{end} {value}" for end, value in zip(one.ends, colour_limits(one, painter.scale), strict=True))
    together = max(text_width(words, LEGEND) for words in (low, high)) <= 0.46 * width
    zero = [("0", "0")] if one.signed and together else []
    return [("low" if together else "low line", low), *zero, ("high", high)]


def _notes(maps: Sequence[TileMap], painter: Painter, room: int) -> list[tuple[str, tuple[int, int, int]]]:
    """Return the lines at the foot of the page, with their colours: the meaning of values and colours, once for all
    maps that share it, and the cautions.
    """
    titles: dict[str, list[str]] = {}
    for one in maps:
        total = one.words.total(one.name)  # names the class of evidence
        meaning = one.meaning.replace(total, one.words.total("the class"))
        titles.setdefault(f"{meaning}. Colours: {one.scaling(painter.scale)}", []).append(one.title)
    notes = [(f"{', '.join(of)}: {told}", SOFT) for told, of in titles.items()]
    notes += [(one.why_uniform, INK) for one in maps if one.why_uniform]
    return [(line, colour) for words, colour in notes for line in wrap_text(words, LEGEND, room)]


def _outlined(draw: ImageDraw.ImageDraw, painter: Painter, at: tuple[float, float], right: float) -> None:
    x, y = at
    for i, name in enumerate(painter.outlined):
        if right - x < 6 * WORDS:
            return
        draw.line((x, y + 0.5 * WORDS, x + 1.5 * WORDS, y + 0.5 * WORDS), fill=OUTLINES[i % len(OUTLINES)], width=4)
        x += 2 * WORDS
        x += draw_text(draw, (x, y), f"annotated: {name}", NOTE, room=right - x) + WORDS


def _page(width: int, height: int) -> tuple[Image.Image, ImageDraw.ImageDraw]:
    page = Image.new("RGB", (width, height), "white")
    return page, ImageDraw.Draw(page)


def _paste(page: Image.Image, draw: ImageDraw.ImageDraw, picture: Picture, at: tuple[int, int]) -> None:
    page.paste(Image.fromarray(picture), at)
    draw.rectangle((*at, at[0] + picture.shape[1] - 1, at[1] + picture.shape[0] - 1), outline=SOFT)


def _save(page: Image.Image, path: Path) -> Path:
    with atomic_file(path) as aside:
        page.save(aside, format="PNG", compress_level=2)
    return path
