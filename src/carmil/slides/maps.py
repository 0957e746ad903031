"""Maps of the tiles of a slide: whether they fit, and one of them over the whole slide. n tiles."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from carmil.errors import CarmilError
from carmil.maps.mosaic import mosaic, picture_size, pixel_boxes
from carmil.maps.tile_maps import TileMap
from carmil.slides.slide import Tiles


def checked(maps: Sequence[TileMap], tiles: Tiles) -> None:
    """Refuses maps that are not of these tiles, or are infinite."""
    for one in maps:
        if one.values.shape != (len(tiles),):
            raise CarmilError(
                f"{tiles.slide}: the map {one.title!r} has the shape {one.values.shape} and there are {len(tiles):,} "
                "tiles: expected one value per tile"
            )
        if np.isinf(one.values).any():
            raise CarmilError(f"{tiles.slide}: the map {one.title!r} holds infinite values, which cannot be drawn")


def raster(tiles: Tiles, values: ArrayLike, *, longest: int) -> NDArray[np.float64]:
    """One map over the whole slide, its longer side `longest` pixels: the mean of the tiles there, NaN where there are none."""
    pixels = picture_size(tiles.width, tiles.height, longest)
    boxes = pixel_boxes(tiles.corners, tiles.size, (0, 0, tiles.width, tiles.height), pixels)
    laid = mosaic(boxes, np.asarray(values, dtype=np.float64)[None], pixels)
    return laid.spread(laid.cells[0])
