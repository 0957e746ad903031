"""Regions of a slide: annotated ones, with a class name, and those where a map is highest. Coordinates are level-0 pixels."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

import numpy as np
import shapely
from numpy.typing import NDArray
from shapely import MultiPolygon, Polygon

from carmil.errors import CarmilError
from carmil.maps.mosaic import mosaic, pixel_boxes
from carmil.maps.tile_maps import SMALL, TileMap
from carmil.slides.slide import Tiles

Ring = NDArray[np.float64]  # (k, 2): x, y of its corners
MOST_MEETINGS = 2**19  # pairs of edges that may cross in an outline to be repaired, which takes some seconds
TOP = 0.05  # share of the tiles in top regions
MOST = 20  # regions
CELLS = 4  # cells per side of a tile, since overlapping tiles share some of them


@dataclass(frozen=True, eq=False)
class Region:
    """A region of class `name`; `shape` is valid and not empty. A `cut` region is subtracted from those around it."""

    name: str
    shape: Polygon | MultiPolygon
    cut: bool = False

    @property
    def extent(self) -> float:
        """Return the area within the outline of its largest part, holes included, in square level-0 pixels."""
        return max(Polygon(part.exterior).area for part in shapely.get_parts(self.shape))

    @property
    def rings(self) -> list[Ring]:
        """Return the closed outlines of all parts and holes."""
        return [shapely.get_coordinates(ring) for ring in shapely.get_rings(shapely.get_parts(self.shape))]


def polygon(rings: Sequence[Ring], where: str) -> Polygon | MultiPolygon:
    """Return the valid shape of an outline and its holes, of at least three corners each; it may be empty.

    An outline that crosses itself holds every point that it winds around. One with very many crossings is refused.
    """
    shape = Polygon(rings[0], rings[1:])
    if shape.is_valid:
        return shape
    edges = np.concatenate([shapely.linestrings(np.stack([ring, np.roll(ring, -1, axis=0)], axis=1)) for ring in rings])
    tree, meetings = shapely.STRtree(edges), 0
    for some in np.array_split(edges, ceil(len(edges) ** 2 / 2**24)):
        meetings += tree.query(some).shape[1]
        if meetings > MOST_MEETINGS:
            raise CarmilError(f"{where} has an outline that crosses itself too often to be repaired: draw it again")
    return shapely.make_valid(shape, method="structure", keep_collapsed=False)


@dataclass(frozen=True, eq=False)
class TopRegion:
    """A polygon in level-0 pixels, and the mean of the map over it."""

    shape: shapely.Polygon
    mean: float


def signed_top_regions(tiles: Tiles, tile_map: TileMap) -> list[tuple[int, TopRegion]]:
    """Return top regions with their sign, 1 for and -1 against; 1 for an unsigned map.

    A negligible or even map has none; tiles with less than SMALL of the largest absolute value are in none.
    """
    if tile_map.negligible or tile_map.even:
        return []
    signs = (1, -1) if tile_map.signed else (1,)
    return [(sign, region) for sign in signs for region in top_regions(tiles, tile_map, sign=sign, least=SMALL)]


def top_regions(
    tiles: Tiles, tile_map: TileMap, *, top: float = TOP, most: int = MOST, sign: int = 1, least: float = 0.0
) -> list[TopRegion]:
    """Return the regions where the map is as high as in its highest `top` share of tiles, and above 0 if it is
    signed, largest first.

    sign: -1 takes the lowest values instead. least: values below this share of the largest absolute value are
    left out.
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
