"""Contours of the regions where a map is highest: tiles that touch become one polygon, along the edges of tiles."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from carmil.maps.mosaic import mosaic, pixel_boxes
from carmil.maps.regions import Ring, ring_area
from carmil.maps.tile_maps import SMALL, TileMap
from carmil.slides.slide import Tiles

TOP = 0.05  # of the tiles are in top regions
MOST = 20  # regions
A_TILE = 4  # cells a tile is wide: overlapping tiles share some of them


@dataclass(frozen=True, eq=False)
class TopRegion:
    """A polygon in level-0 pixels, the outer ring first, then its holes; `mean` of the map over it; `area` in square pixels."""

    rings: tuple[Ring, ...]
    mean: float
    area: float


def regions_of(tiles: Tiles, one: TileMap) -> list[tuple[int, TopRegion]]:
    """Top regions with their sign, 1 for and -1 against; of a map without a sign 1.

    A negligible map has none, nor has one that is the same everywhere; nor do tiles that are SMALL beside the largest.
    """
    if one.negligible or one.even:
        return []
    signs = (1, -1) if one.signed else (1,)
    return [(sign, region) for sign in signs for region in top_region_contours(tiles, one, sign=sign, small=SMALL)]


def top_region_contours(
    tiles: Tiles, one: TileMap, *, top: float = TOP, most: int = MOST, sign: int = 1, small: float = 0.0
) -> list[TopRegion]:
    """Where the map is at least as high as its highest `top` share of tiles, and above 0 if it is signed; the largest first.

    sign: -1 takes the lowest values instead. small: values below this share of the largest size are left out.
    """
    from scipy.ndimage import label

    values = sign * one.values
    known = values[~np.isnan(values)]
    if not len(known):
        return []
    limit = float(np.sort(known)[-max(1, round(top * len(known)))])
    if small:
        limit = max(limit, small * float(np.abs(known).max()))
    origin = tiles.corners.min(0).astype(np.float64)
    cell = tiles.size / A_TILE
    x, y = np.maximum(1, np.ceil((tiles.corners.max(0) + tiles.size - origin) / cell - 1e-6)).astype(int)
    box = (origin[0], origin[1], origin[0] + x * cell, origin[1] + y * cell)
    laid = mosaic(pixel_boxes(tiles.corners, tiles.size, box, (x, y)), values[None], (x, y))
    cells = laid.spread(laid.cells[0])
    high = np.nan_to_num(cells, nan=-np.inf) >= limit - 1e-9 * max(1.0, abs(limit))
    if one.signed:
        high &= np.nan_to_num(cells) > 0
    numbers, _ = label(high)
    found = []
    sizes = np.bincount(numbers.ravel())
    for number in np.argsort(-sizes[1:], kind="stable")[:most] + 1:
        if not sizes[number]:
            continue
        inside = numbers == number
        rings = sorted(_traced(inside), key=ring_area, reverse=True)
        corners = tuple(origin + ring * cell for ring in rings)
        found.append(TopRegion(corners, sign * float(cells[inside].mean()), float(inside.sum() * cell**2)))
    return found


def _traced(inside: NDArray[np.bool_]) -> list[Ring]:
    """The rings around cells, (k, 2) in cells, corners only; cells that touch by a corner alone are apart."""
    padded = np.pad(inside, 1).astype(np.int8)
    ahead: dict[tuple[int, int], list[tuple[int, int]]] = {}
    below, beside = np.diff(padded, axis=0), np.diff(padded, axis=1)
    for step, edges in ((1, below == 1), (-1, below == -1)):  # with the cell on the right hand, y downwards
        for y, x in np.argwhere(edges):
            start = (int(x) - 1 if step > 0 else int(x), int(y))
            ahead.setdefault(start, []).append((start[0] + step, start[1]))
    for step, edges in ((-1, beside == 1), (1, beside == -1)):
        for y, x in np.argwhere(edges):
            start = (int(x), int(y) - 1 if step > 0 else int(y))
            ahead.setdefault(start, []).append((start[0], start[1] + step))
    rings = []
    while ahead:
        rings.append(_followed(ahead))
    return rings


def _followed(ahead: dict[tuple[int, int], list[tuple[int, int]]]) -> Ring:
    """One ring out of the steps that are left; where two cross it turns right, and stays with its own cell."""
    here = first = next(place for place, ways in ahead.items() if len(ways) == 1)  # not where rings touch
    step = (0, 0)
    ring: list[tuple[int, int]] = []
    while not ring or here != first:
        ways = ahead[here]
        right = (here[0] - step[1], here[1] + step[0])
        there = right if right in ways else ways[0]
        ways.remove(there)
        if not ways:
            del ahead[here]
        turned = (there[0] - here[0], there[1] - here[1])
        if turned != step:
            ring.append(here)
        here, step = there, turned
    straight = (ring[1][0] - first[0]) * step[1] == (ring[1][1] - first[1]) * step[0]
    return np.array(ring[1:] if straight else ring, dtype=np.float64)
