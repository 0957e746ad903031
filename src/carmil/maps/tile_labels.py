"""Annotated regions become labels of tiles, by an overlap rule that has a name.

A point belongs to the smallest region that covers it: what is drawn inside a tumour and called normal is normal, and a frame
around everything takes nothing away. n tiles.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from carmil.errors import CarmilError
from carmil.maps.regions import Region, Ring
from carmil.slides.slide import Tiles
from carmil.truth import UNKNOWN

POSITIVE, NEGATIVE = 1, 0
EXCLUSIONS = ("_2", "exclusion")  # CAMELYON16 calls so what is normal inside its tumours
RULES = {"any": "any part of the tile", "centre": "its centre", "half": "half of the tile or more"}
A_TILE = 16  # cells that a tile is wide, where memory allows
MOST_CELLS = 2**24
MOST_WORK = 64 * MOST_CELLS  # cells of all regions' boxes, and rows that their outlines cross
AT_ONCE = 2**20  # rows crossed that are in memory


@dataclass(frozen=True, eq=False)
class TileLabels:
    """labels (n): POSITIVE, NEGATIVE or UNKNOWN. positive, negative (n): how much of the tile such regions cover, 0 to 1."""

    labels: NDArray[np.int64]
    positive: NDArray[np.float64]
    negative: NDArray[np.float64]


def positive_names(regions: Sequence[Region], asked: Collection[str] = ()) -> list[str]:
    """The classes that make a tile positive: those asked for, or all but CAMELYON16's exclusions."""
    there = dict.fromkeys(one.name for one in regions if not one.cut)
    return list(asked) or [name for name in there if name.lower() not in EXCLUSIONS]


def label_tiles(
    tiles: Tiles,
    regions: Sequence[Region],
    *,
    positive: Collection[str] = (),
    rule: str = "half",
    complete: bool = False,
) -> TileLabels:
    """A tile is positive if regions of the `positive` classes cover enough of it, negative if others do.

    Any other tile is unknown, or negative if annotation is `complete`. `rule`: any, centre, half, or a share such as 0.25.
    """
    share = _share(rule)
    names = positive_names(regions, positive)
    painted, cell = _painted(regions, names, tiles)
    if rule == "centre":
        middle = ((tiles.corners + tiles.size / 2) / cell).astype(np.int64)
        x, y = np.clip(middle, 0, np.array(painted.shape[::-1]) - 1).T
        inside = painted[y, x]
        covers = {value: (inside == value).astype(np.float64) for value in (_YES, _NO)}
    else:
        covers = {value: _share_of_tiles(painted == value, tiles, cell) for value in (_YES, _NO)}
    yes, no = (covers[value] >= share if share else covers[value] > 0 for value in (_YES, _NO))
    labels = np.where(yes, POSITIVE, np.where(no | complete, NEGATIVE, UNKNOWN))
    return TileLabels(labels.astype(np.int64), covers[_YES], covers[_NO])


_YES, _NO = 1, 2


def _share(rule: str) -> float:
    named = {"any": 0.0, "half": 0.5, "centre": 0.5}
    try:
        share = named[rule] if rule in named else float(rule)
    except ValueError:
        share = float("nan")
    if not 0 <= share <= 1:
        raise CarmilError(f"the overlap rule {rule!r} is not known: expected any, centre, half, or a share from 0 to 1")
    return share


def _painted(regions: Sequence[Region], positive: Collection[str], tiles: Tiles) -> tuple[NDArray[np.uint8], float]:
    """The slide in cells (and a cell's side in level-0 pixels), the smaller regions painted over the larger ones."""
    cell = max(tiles.size / A_TILE, (tiles.width * tiles.height / MOST_CELLS) ** 0.5, 1.0)
    shape = (int(np.ceil(tiles.height / cell)), int(np.ceil(tiles.width / cell)))
    painted = np.zeros(shape, np.uint8)
    _check_work(regions, cell, shape)
    for one in sorted(regions, key=lambda one: one.area, reverse=True):
        value = 0 if one.cut else _YES if one.name in positive else _NO
        paint(painted, [ring / cell for ring in one.rings], value)
    return painted, cell


def _check_work(regions: Sequence[Region], cell: float, shape: tuple[int, int]) -> None:
    """Refuse regions that would take minutes to paint: thousands that are as large as the slide, or one with as many rings."""
    work, whole = 0.0, np.array(shape[::-1]) * cell
    for one in regions:
        rings = [np.clip(ring, 0, whole) / cell for ring in one.rings]
        corners = np.concatenate(rings)
        work += float(np.prod(corners.max(0) - corners.min(0)))
        work += sum(float(np.abs(np.diff(ring[:, 1], append=ring[:1, 1])).sum()) for ring in rings)
        if work > MOST_WORK:
            raise CarmilError(
                f"{len(regions):,} annotated regions cover the slide too many times over: expected regions that are drawn "
                "by hand or found by a program; leave out those that lie on top of each other"
            )


def paint(cells: NDArray[np.uint8], rings: Sequence[Ring], value: int) -> None:
    """Sets the cells whose centre is in an odd number of rings (in cells); of rings smaller than that, the cell they lie in."""
    corners = np.concatenate(rings)
    left, top = np.clip(np.floor(corners.min(0)), 0, np.array(cells.shape[::-1]) - 1).astype(int)
    right, bottom = np.clip(np.ceil(corners.max(0)), (left + 1, top + 1), cells.shape[::-1]).astype(int)
    inside = _inside([ring - (left, top) for ring in rings], (bottom - top, right - left))
    if not inside.any():
        x, y = np.floor(corners.mean(0)).astype(int)
        if 0 <= x < cells.shape[1] and 0 <= y < cells.shape[0]:
            cells[y, x] = value
        return
    cells[top:bottom, left:right][inside] = value


def _inside(rings: Sequence[Ring], shape: tuple[int, int]) -> NDArray[np.bool_]:
    """Even-odd: every edge turns a row over from where it crosses the row's middle."""
    start = np.concatenate(rings)
    end = np.concatenate([np.roll(ring, -1, axis=0) for ring in rings])
    low, high = np.minimum(start[:, 1], end[:, 1]), np.maximum(start[:, 1], end[:, 1])
    first = np.clip(np.ceil(low - 0.5), 0, shape[0]).astype(np.int64)
    last = np.clip(np.ceil(high - 0.5), 0, shape[0]).astype(np.int64)
    many = last - first
    turned = np.zeros((shape[0], shape[1] + 1), np.uint8)
    parts = np.searchsorted(many.cumsum(), np.arange(AT_ONCE, many.sum(), AT_ONCE))
    for some in np.split(np.arange(len(start)), parts):
        edge = np.repeat(some, many[some])
        row = first[edge] + np.arange(len(edge)) - np.repeat(many[some].cumsum() - many[some], many[some])
        along = (row + 0.5 - start[edge, 1]) / (end[edge, 1] - start[edge, 1])
        x = start[edge, 0] + along * (end[edge, 0] - start[edge, 0])
        column = np.clip(np.ceil(x - 0.5), 0, shape[1]).astype(np.int64)
        np.bitwise_xor.at(turned, (row, column), 1)
    return np.bitwise_xor.accumulate(turned, axis=1)[:, :-1].astype(bool)


def _share_of_tiles(covered: NDArray[np.bool_], tiles: Tiles, cell: float) -> NDArray[np.float64]:
    """How much of each tile is covered. Sums from the upper left corner, between cells by proportion: exact for the cells."""
    sums = np.zeros((covered.shape[0] + 1, covered.shape[1] + 1), np.int32)
    sums[1:, 1:] = covered.cumsum(0, dtype=np.int32).cumsum(1, dtype=np.int32)
    first, last = tiles.corners / cell, (tiles.corners + tiles.size) / cell
    (x0, y0), (x1, y1) = first.T, last.T
    total = _at(sums, x1, y1) - _at(sums, x0, y1) - _at(sums, x1, y0) + _at(sums, x0, y0)
    share = total / (tiles.size / cell) ** 2
    return np.where(share < 1e-9, 0.0, np.minimum(share, 1.0))


def _at(sums: NDArray[np.int32], x: NDArray[np.float64], y: NDArray[np.float64]) -> NDArray[np.float64]:
    x, y = np.clip(x, 0, sums.shape[1] - 1), np.clip(y, 0, sums.shape[0] - 1)
    left, top = np.minimum(x.astype(np.int64), sums.shape[1] - 2), np.minimum(y.astype(np.int64), sums.shape[0] - 2)
    across, down = x - left, y - top
    above = sums[top, left] * (1 - across) + sums[top, left + 1] * across
    below = sums[top + 1, left] * (1 - across) + sums[top + 1, left + 1] * across
    return above * (1 - down) + below * down
