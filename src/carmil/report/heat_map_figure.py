"""The figure of heat maps: one column per map, the whole slide above its zooms, annotated tiles outlined. n tiles.

Maps are drawn over the slide if its file is found, and otherwise on an empty plane, with tiles as squares at their
positions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

import matplotlib
import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from numpy.typing import NDArray
from scipy.spatial import cKDTree

from carmil.errors import CarmilError
from carmil.files import atomic_file
from carmil.maps.comparison import draw_comparison
from carmil.maps.mosaic import Box, mosaic, picture_size, pixel_boxes, spacing
from carmil.maps.painting import Painter
from carmil.maps.regions import Region, top_regions
from carmil.maps.tile_maps import SCALES, TileMap, colour_limits
from carmil.plot_style import INK, SOFT, STYLE
from carmil.report.matrices import map_colours
from carmil.slides.slide import Level, Slide, Tiles
from carmil.slides.slide import Picture as Pixels

ANNOTATED = "annotated"
PAPER, LONGEST = 250, 620  # brightness of a plane; pixels of a panel's longer side
TISSUE, MARKED = np.array((226, 228, 233)), np.array((132, 142, 158))  # tiles on a plane, and annotated ones
LINE = 5  # pixels of a contour
NARROWEST, WIDEST = 6, 1 / 3  # a zoom is at least this many tiles wide, and at most this share of the slide
ROOM = 1.4  # width of a zoom, relative to the annotated region in it


@dataclass(frozen=True, eq=False)
class SlideMaps:
    """Maps of a slide: corners (n, 2) of its tiles in `unit`, their size if known, and a mask (n) of annotated tiles,
    if known.
    """

    slide: str
    corners: NDArray[np.float64]
    size: float | None
    unit: str
    maps: tuple[TileMap, ...]
    truth: NDArray[np.bool_] | None


class Plane(Slide):
    """A bright, empty slide that maps are drawn on if there is no slide file."""

    mpp, mpp_from = 1.0, "nothing"

    def __init__(self, name: str, width: int, height: int) -> None:
        self.path, self.width, self.height = Path(f"{name}.plane"), width, height
        self.levels = (Level(width, height, 1.0),)

    def read(self, x: float, y: float, width: float, height: float, pixels: tuple[int, int]) -> Pixels:
        return np.full((pixels[1], pixels[0], 3), PAPER, np.uint8)


def draw_heat_maps(slide_maps: SlideMaps, path: Path, slides: Path | None = None) -> list[tuple[Path, str]]:
    """Write the figure, and a large one if the slide's file was found; return each with its caption."""
    with _slide(slide_maps, slides) as slide:
        tiles = tiles_on(slide, slide_maps)
        contours = _contours(slide_maps, tiles)
        painter = Painter(slide, tiles, slide_maps.maps, annotations=contours, grey=True)
        boxes = zoom_boxes(tiles, slide_maps.truth)
        _draw(painter, boxes, path, slide_maps.truth)
        over = "a plane: there is no file of the slide" if isinstance(slide, Plane) else "the slide, in grey"
        caption = (
            f"{slide_maps.slide} over {over}; one column per method, the whole above its zooms. Violet: attention to a tile "
            f"({SCALES['minmax']}); blue supports the class, orange refutes it. {_zoom_text(boxes, slide_maps.truth)}"
        )
        figures = [(path, caption)]
        if not isinstance(slide, Plane):
            large = draw_comparison(painter, path.with_name(f"{path.stem}_large.png"), regions=boxes)
            figures.append((large, f"{slide_maps.slide}: the same maps, large, on one page."))
    return figures


def has_annotations(truth: NDArray[np.bool_] | None) -> TypeGuard[NDArray[np.bool_]]:
    """Return whether any tile is annotated."""
    return truth is not None and bool(truth.any())


def _zoom_text(boxes: Sequence[Box], truth: NDArray[np.bool_] | None) -> str:
    """Describe the outlines and the positions of the zooms, for the caption."""
    if not has_annotations(truth):
        return "No tile is known to be annotated: zoom 1 is the middle of the tissue."
    first = f"Lines: {ANNOTATED} tiles. Zoom 1 is around the largest annotated region"
    if len(boxes) == 1:
        return f"{first}; there is no place of the same size without an annotated tile."
    return f"{first}, zoom 2 the place of the same size without an annotated tile that is farthest from it."


def zoom_boxes(tiles: Tiles, truth: NDArray[np.bool_] | None) -> list[Box]:
    """Return a box around the largest annotated region, and one of the same size as far as possible from annotated
    tiles.

    Without annotated tiles, return one box in the middle of the tissue.
    """
    middles = tiles.corners + tiles.size / 2
    widest = WIDEST * max(np.ptp(middles, axis=0).max(), tiles.size)
    if not has_annotations(truth):
        return [_box(tiles, np.median(middles, axis=0), max(NARROWEST * tiles.size, widest / 2))]
    largest = top_regions(tiles, _as_map(truth), top=truth.mean(), most=1)[0].shape
    low, high = np.reshape(largest.bounds, (2, 2))
    side = float(np.clip((high - low).max() * ROOM, NARROWEST * tiles.size, max(widest, NARROWEST * tiles.size)))
    here = _box(tiles, (low + high) / 2, side)
    full = cKDTree(middles).query_ball_point(middles, side / 2, p=np.inf, return_length=True)
    free = cKDTree(middles[truth]).query(middles, p=np.inf)[0] > side / 2 + tiles.size / 2
    if not free.any():
        return [here]
    tissue = full >= 0.9 * full[free].max()
    far = np.where(free & tissue, np.abs(middles - (low + high) / 2).max(1), -1.0)
    return [here, _box(tiles, middles[int(far.argmax())], side)]


def _box(tiles: Tiles, middle: NDArray[np.float64], side: float) -> Box:
    """Return a square around a point, moved into the slide if it fits."""
    room = np.maximum(np.array([tiles.width, tiles.height]) - side, 0)
    x, y = np.clip(middle - side / 2, 0, room)
    return (float(x), float(y), float(x + side), float(y + side))


def _slide(slide_maps: SlideMaps, folder: Path | None) -> Slide:
    """Return the slide's file, found by name; otherwise a plane that contains all tiles."""
    if folder is not None:
        from carmil.slides.dicom_series import slide_name
        from carmil.slides.opening import find_slides, open_slide

        for path in find_slides([folder]):
            if slide_name(path) == slide_maps.slide:
                return open_slide(path)
        raise CarmilError(
            f"--slides {folder} has no file of the slide {slide_maps.slide!r}: put it into the folder, or "
            "leave out --slides"
        )
    size = slide_maps.size or spacing(slide_maps.corners)
    width, height = np.ceil(np.ptp(slide_maps.corners, axis=0) + size).astype(int).tolist()
    return Plane(slide_maps.slide, width, height)


def tiles_on(slide: Slide, slide_maps: SlideMaps) -> Tiles:
    """Return the tiles in level-0 pixels of the slide, or on a plane in their own unit, relative to the first tile."""
    on_plane = isinstance(slide, Plane)
    scale = slide.mpp if slide_maps.unit == "um" and not on_plane else 1.0
    size = (slide_maps.size or spacing(slide_maps.corners)) / scale
    corners = slide_maps.corners - slide_maps.corners.min(0) if on_plane else slide_maps.corners / scale
    reach = np.ceil(corners.max(0) + size).astype(int).tolist()
    if reach[0] > slide.width + size or reach[1] > slide.height + size:
        raise CarmilError(
            f"{slide_maps.slide}: its tiles extend to {reach[0]:,}, {reach[1]:,} but the slide {slide.path} "
            f"has {slide.width:,} x {slide.height:,} pixels: expected the slide that they were cut from"
        )
    pixel_corners = np.rint(corners).astype(np.int64)
    return Tiles(slide_maps.slide, pixel_corners, size, round(size), slide.mpp, slide.width, slide.height, slide.mpp)


def _contours(slide_maps: SlideMaps, tiles: Tiles) -> list[Region]:
    truth = slide_maps.truth
    if not has_annotations(truth):
        return []
    regions = top_regions(tiles, _as_map(truth), top=truth.mean(), most=len(truth))
    return [Region(ANNOTATED, region.shape) for region in regions]


def _as_map(truth: NDArray[np.bool_]) -> TileMap:
    return TileMap("evidence", truth.astype(np.float64), "evidence")


def _draw(painter: Painter, boxes: Sequence[Box], path: Path, truth: NDArray[np.bool_] | None) -> None:
    tiles, maps = painter.tiles, painter.maps
    whole = bounding_box(tiles)
    rows = [whole, *boxes]
    tall = (whole[3] - whole[1]) / (whole[2] - whole[0])
    wide = 1.75
    with matplotlib.rc_context(STYLE):
        heights = [tall, *(1.0 for _ in boxes)]
        size = (wide * (len(maps) + 1) + 0.5, wide * sum(heights) + 1.5)
        figure = Figure(figsize=size, layout="constrained")
        panels = figure.subplots(len(rows), len(maps) + 1, squeeze=False, height_ratios=heights)
        for line, box in zip(panels, rows, strict=True):
            pixels = picture_size(box[2] - box[0], box[3] - box[1], LONGEST)
            pictures = [
                painter.outline(_bare(painter, box, pixels, truth), box, line=LINE),
                *painter.paint(box, pixels, line=LINE),
            ]
            for panel, picture in zip(line, pictures, strict=True):
                panel.imshow(picture, interpolation="antialiased")
                panel.set(xticks=[], yticks=[])
                panel.spines[:].set_color("#c9cfd9")
        plain = "tiles" if isinstance(painter.slide, Plane) else "slide"
        panels[0, 0].set_title(ANNOTATED if has_annotations(truth) else plain)
        _label_panels(
            panels, maps, boxes, whole, whole_pixels=picture_size(whole[2] - whole[0], whole[3] - whole[1], LONGEST)
        )
        _legend(figure, panels, maps)
        with atomic_file(path) as aside:
            figure.savefig(aside, dpi=140, facecolor="white")


def bounding_box(tiles: Tiles) -> Box:
    """Return a box around all tiles, with a margin."""
    low, high = tiles.corners.min(0) - tiles.size, tiles.corners.max(0) + 2 * tiles.size
    return (float(low[0]), float(low[1]), float(high[0]), float(high[1]))


def _bare(painter: Painter, box: Box, pixels: tuple[int, int], truth: NDArray[np.bool_] | None) -> Pixels:
    """Return the slide without a map; on a plane its tiles, dark if they are annotated."""
    ground = painter.slide.read(box[0], box[1], box[2] - box[0], box[3] - box[1], pixels)
    if not isinstance(painter.slide, Plane):
        return ground
    known = np.zeros(len(painter.tiles)) if truth is None else truth.astype(np.float64)
    laid = mosaic(pixel_boxes(painter.tiles.corners, painter.tiles.size, box, pixels), known[None], pixels)
    cells = laid.spread(laid.cells[0])[..., None]
    return np.where(np.isnan(cells), ground, np.where(cells > 0.5, MARKED, TISSUE)).astype(np.uint8)


def _label_panels(
    panels: NDArray[np.object_],
    maps: Sequence[TileMap],
    boxes: Sequence[Box],
    whole: Box,
    *,
    whole_pixels: tuple[int, int],
) -> None:
    """Write the maps' titles, the numbers of the zooms, and the values at the ends of each map's colours."""
    for panel, one in zip(panels[0, 1:], maps, strict=True):
        panel.set_title(one.model.replace(", ", ",\n"))
    for panel, one in zip(panels[-1, 1:], maps, strict=True):
        low, high = (words.strip("()") for words in colour_limits(one, "minmax"))
        panel.set_xlabel(f"{low} to {high}", fontsize=8, color=SOFT)
    panels[0, 0].set_ylabel("whole")
    scale = whole_pixels[0] / (whole[2] - whole[0])
    for i, box in enumerate(boxes, 1):
        panels[i, 0].set_ylabel(f"zoom {i}")
        x, y, side = (box[0] - whole[0]) * scale, (box[1] - whole[1]) * scale, (box[2] - box[0]) * scale
        for panel in panels[0]:
            panel.add_patch(
                Rectangle((x, y), side, side, fill=False, edgecolor=INK, linewidth=0.9, linestyle=(0, (3, 2)))
            )
        panels[0, 0].text(x + 0.05 * side, y + 0.05 * side, str(i), ha="left", va="top", fontsize=8, color=INK)


def _legend(figure: Figure, panels: NDArray[np.object_], maps: Sequence[TileMap]) -> None:
    evidence = next(one for one in maps if one.signed)
    half = panels.shape[1] // 2 + 1
    for signed, ticks, words, of in (
        (False, {0: "least", 1: "most"}, "attention, min to max of the slide", panels[:, :half]),
        (True, {-1: evidence.ends[0], 0: "0", 1: evidence.ends[1]}, "path evidence", panels[:, half:]),
    ):
        shades = ScalarMappable(Normalize(-1 if signed else 0, 1), map_colours(signed=signed))
        bar = figure.colorbar(shades, ax=list(of.ravel()), location="bottom", shrink=0.55, aspect=32, pad=0.02)
        bar.set_ticks(list(ticks), labels=list(ticks.values()))
        bar.set_label(words)
        bar.outline.set_visible(False)
