"""The regions where a map is highest: tiles that share an edge become one polygon."""

from dataclasses import dataclass

import numpy as np
import shapely

from carmil.maps.mosaic import mosaic, pixel_boxes
from carmil.maps.tile_maps import SMALL, TileMap
from carmil.slides.slide import Tiles

TOP = 0.05  # share of the tiles that top regions hold
MOST = 20  # regions
CELLS = 4  # per side of a tile: overlapping tiles share some of them


@dataclass(frozen=True, eq=False)
class TopRegion:
    """A polygon in level-0 pixels, and the mean of the map over it."""

    shape: shapely.Polygon
    mean: float


def signed_top_regions(tiles: Tiles, tile_map: TileMap) -> list[tuple[int, TopRegion]]:
    """Return top regions with their sign, 1 for and -1 against; of an unsigned map 1.

    A negligible or even map has none; tiles that are SMALL beside the largest are in none.
    """
    if tile_map.negligible or tile_map.even:
        return []
    signs = (1, -1) if tile_map.signed else (1,)
    return [(sign, region) for sign in signs for region in top_regions(tiles, tile_map, sign=sign, least=SMALL)]


def top_regions(
    tiles: Tiles, tile_map: TileMap, *, top: float = TOP, most: int = MOST, sign: int = 1, least: float = 0.0
) -> list[TopRegion]:
    """Return where the map is as high as its highest `top` share of tiles, and above 0 if it is signed; the largest first.

    sign: -1 takes the lowest values instead. least: values below this share of the largest size are left out.
    """
    from scipy.ndimage import find_objects, label

    values = sign * tile_map.values
    known = values[~np.isnan(values)]
    if not len(known):
        return []
    limit = float(np.sort(known)[-max(1, round(top * len(known)))])
    if least:
        limit = max(limit, least * float(np.abs(known).max()))
    origin, cell = tiles.corners.min(0).astype(np.float64), tiles.size / CELLS
    pixels = np.maximum(1, np.ceil((tiles.corners.max(0) + tiles.size - origin) / cell - 1e-6)).astype(int)
    box = (*origin, *(origin + pixels * cell))
    laid = mosaic(pixel_boxes(tiles.corners, tiles.size, box, tuple(pixels)), values[None], tuple(pixels))
    cells = laid.cells[0]
    high = np.nan_to_num(cells, nan=-np.inf) >= limit - 1e-9 * max(1.0, abs(limit))
    if tile_map.signed:
        high &= np.nan_to_num(cells) > 0
    numbers, count = label(high)
    areas = np.outer(np.diff(laid.rows), np.diff(laid.columns)).astype(np.float64)
    sizes = np.bincount(numbers.ravel(), areas.ravel(), minlength=count + 1)[1:]
    x, y = origin[0] + laid.columns * cell, origin[1] + laid.rows * cell
    boxes = find_objects(numbers)
    regions = []
    for index in np.argsort(-sizes, kind="stable")[:most]:
        part = boxes[index]
        row, column = (at + place.start for at, place in zip(np.nonzero(numbers[part] == index + 1), part, strict=True))
        shape = shapely.union_all(shapely.box(x[column], y[row], x[column + 1], y[row + 1]))
        mean = float(np.average(cells[row, column], weights=areas[row, column]))
        regions.append(TopRegion(shapely.simplify(shape, 0), sign * mean))
    return regions
