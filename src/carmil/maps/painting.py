"""Paint maps and contours over any part of a slide, at any size. n tiles, m maps."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import shapely
from numpy.typing import ArrayLike, NDArray
from PIL import Image, ImageDraw

from carmil.errors import CarmilError
from carmil.maps.colours import OUTLINES, blend, colour_indices, colour_table, to_grey
from carmil.maps.mosaic import Box, mosaic, pixel_boxes
from carmil.maps.regions import Region
from carmil.maps.tile_maps import Scale, TileMap
from carmil.slides.slide import Picture, Slide, Tiles

STRIP = 2**21  # pixels that are painted at a time


@dataclass(eq=False)
class Painter:
    """A slide and maps of its tiles. `paint` returns one picture per map; the slide is read once for all of them."""

    slide: Slide
    tiles: Tiles
    maps: Sequence[TileMap]
    scale: Scale = "minmax"
    annotations: Sequence[Region] = ()
    grey: bool = True
    values: NDArray[np.float64] = field(init=False)  # (m, n), scaled

    def __post_init__(self) -> None:
        check_maps(self.maps, self.tiles)
        columns = [one.shades(self.scale) for one in self.maps]
        self.values = np.stack(columns) if columns else np.empty((0, len(self.tiles)))
        self._tables = [colour_table(signed=one.signed) for one in self.maps]

    @property
    def outlined(self) -> list[str]:
        """Return the classes of the contours, in the order of their colours."""
        return list(dict.fromkeys(one.name for one in self.annotations))

    def paint(self, box: Box, pixels: tuple[int, int], *, line: int = 2) -> list[Picture]:
        """Return `box` (level-0 pixels) as pictures of `pixels` (width, height), one per map; contours are `line` pixels wide."""
        ground = self.slide.read(box[0], box[1], box[2] - box[0], box[3] - box[1], pixels)
        if self.grey:
            ground = to_grey(ground)
        laid = mosaic(pixel_boxes(self.tiles.corners, self.tiles.size, box, pixels), self.values, pixels)
        pictures = []
        for one, table, cells in zip(self.maps, self._tables, laid.cells, strict=True):
            cover = laid.spread(table[colour_indices(cells, signed=one.signed)])
            pictures.append(self.outline(blend(ground, cover), box, line=line))
        return pictures

    def outline(self, picture: Picture, box: Box, *, line: int = 2) -> Picture:
        """Draw the contours of the annotations onto a picture of `box`: dark lines with a white rim."""
        visible = [one for one in self.annotations if one.shape.envelope.intersects(shapely.box(*box))]
        if not visible:
            return picture
        height, width = picture.shape[:2]
        scale = np.array([width / (box[2] - box[0]), height / (box[3] - box[1])])
        image, names = Image.fromarray(picture), self.outlined
        draw = ImageDraw.Draw(image)
        for rim in (True, False):
            for one in visible:
                colour = (255, 255, 255) if rim else OUTLINES[names.index(one.name) % len(OUTLINES)]
                for ring in one.rings:
                    corners = ((ring - box[:2]) * scale).ravel().tolist()
                    draw.line(corners, fill=colour, width=line + (2 * max(1, line // 2) if rim else 0), joint="curve")
        return np.asarray(image)

    def strips(self, pixels: tuple[int, int], *, line: int = 2, rows: int | None = None) -> Iterator[list[Picture]]:
        """Yield the whole slide as pictures of `pixels`, from top to bottom, some rows at a time."""
        width, height = pixels
        rows = rows or max(1, STRIP // width)
        tall = self.slide.height / height
        for top in range(0, height, rows):
            bottom = min(height, top + rows)
            box = (0.0, top * tall, float(self.slide.width), bottom * tall)
            yield self.paint(box, (width, bottom - top), line=line)


def check_maps(maps: Sequence[TileMap], tiles: Tiles) -> None:
    """Refuse maps that do not match these tiles, or contain infinite values."""
    for one in maps:
        if one.values.shape != (len(tiles),):
            raise CarmilError(
                f"{tiles.slide}: the map {one.title!r} has the shape {one.values.shape}, but there are "
                f"{len(tiles):,} tiles: expected one value per tile"
            )
        if np.isinf(one.values).any():
            raise CarmilError(f"{tiles.slide}: the map {one.title!r} holds infinite values, which cannot be drawn")


def raster(tiles: Tiles, values: ArrayLike, *, side: float) -> NDArray[np.float64]:
    """Return one map over the whole slide: the mean of the tiles, NaN where there are none.

    side: the side of a pixel of the map, in level-0 pixels. The last row and column may reach beyond the slide.
    """
    width, height = math.ceil(tiles.width / side), math.ceil(tiles.height / side)
    boxes = pixel_boxes(tiles.corners, tiles.size, (0, 0, width * side, height * side), (width, height))
    laid = mosaic(boxes, np.asarray(values, dtype=np.float64)[None], (width, height))
    return laid.spread(laid.cells[0])
