"""Values of tiles as maps: scaled for colours, and laid out on pixels where tiles may overlap.

n tiles, m maps. A box is (left, top, right, bottom).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from carmil.errors import CarmilError
from carmil.slides.slide import Tiles

Scale = Literal["minmax", "rank"]
Kind = Literal["factual", "counterfactual", "difference", "evidence"]
Box = tuple[float, float, float, float]
FACTUAL, COUNTERFACTUAL, DIFFERENCE = "factual", "counterfactual", "difference"
SCALES = {
    "minmax": "raw scores, min-max over the tiles of this slide",
    "rank": "by rank among the tiles of this slide: colours say more or less, not how much",
}


@dataclass(frozen=True, eq=False)
class TileMap:
    """A value a tile (n), NaN where it has none. `name`: the class it is of, or else its kind; `model` tells several apart."""

    name: str
    values: NDArray[np.float64]
    kind: Kind
    model: str = ""

    @property
    def signed(self) -> bool:
        """Whether 0 is the middle: what is above supports, what is below refutes."""
        return self.kind in (DIFFERENCE, "evidence")

    @property
    def title(self) -> str:
        words = {
            FACTUAL: "factual attention",
            COUNTERFACTUAL: "counterfactual attention",
            DIFFERENCE: "factual minus counterfactual attention",
            "evidence": "evidence",
        }[self.kind]
        whose = "" if self.name == self.kind else f" for {self.name}"
        return (f"{self.model}: " if self.model else "") + words + whose

    @property
    def ends(self) -> tuple[str, str]:
        """What the lowest and the highest colour mean."""
        return {
            FACTUAL: ("looked at least", "looked at most"),
            COUNTERFACTUAL: ("looked at least for another answer", "looked at most for another answer"),
            DIFFERENCE: ("more looked at for another answer", "more looked at for this answer"),
            "evidence": (f"refutes {self.name}", f"supports {self.name}"),
        }[self.kind]


def tile_maps(
    values: Mapping[str, ArrayLike], kinds: Mapping[str, Kind] | None = None, *, model: str = ""
) -> list[TileMap]:
    """Maps by name: factual, counterfactual and difference are what they are called, any other is evidence for a class."""
    found = []
    for name, column in values.items():
        usual: Any = name if name in (FACTUAL, COUNTERFACTUAL, DIFFERENCE) else "evidence"
        numbers = np.asarray(column, dtype=np.float64)
        found.append(TileMap(name, numbers, (kinds or {}).get(name, usual), model))
    return found


def checked(maps: Sequence[TileMap], tiles: Tiles) -> None:
    """Refuses maps that are not of these tiles, or are infinite."""
    for one in maps:
        if one.values.shape != (len(tiles),):
            raise CarmilError(
                f"{tiles.slide}: the map {one.title!r} has the shape {one.values.shape} and there are {len(tiles):,} "
                "tiles: expected a value a tile"
            )
        if np.isinf(one.values).any():
            raise CarmilError(f"{tiles.slide}: the map {one.title!r} holds infinite values: nothing can be coloured so")


def scaled(values: NDArray[np.float64], scale: Scale, *, signed: bool) -> NDArray[np.float64]:
    """For colours: 0 to 1, or -1 to 1 with 0 where it was. NaN stays NaN; a map that is all the same becomes 0."""
    known = ~np.isnan(values)
    found = np.full(values.shape, np.nan)
    some = values[known]
    if not len(some):
        return found
    if signed:
        sizes = np.abs(some)
        found[known] = np.sign(some) * (_ranks(sizes) if scale == "rank" else sizes / (sizes.max() or 1.0))
        return found
    if scale == "rank":
        found[known] = _ranks(some)
    else:
        found[known] = (some - some.min()) / ((some.max() - some.min()) or 1.0)
    return found


def _ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """0 for the smallest, 1 for the largest; the same for the same."""
    from scipy.stats import rankdata

    ranks = rankdata(values) - 1
    return ranks / (len(values) - 1) if len(values) > 1 and values.min() < values.max() else np.zeros(len(values))


@dataclass(frozen=True, eq=False)
class Mosaic:
    """Maps between the edges of tiles: `cells` (m, h, w) holds the mean of the tiles over each cell, NaN where there are none.

    `rows` (h+1) and `columns` (w+1) are the pixels at which cells begin and end.
    """

    cells: NDArray[np.float64]
    rows: NDArray[np.int64]
    columns: NDArray[np.int64]

    def spread(self, cells: NDArray[Any]) -> NDArray[Any]:
        """Anything that was made of one map's cells, (h, w, ...), a value a pixel."""
        return cells.repeat(np.diff(self.rows), axis=0).repeat(np.diff(self.columns), axis=1)


def pixel_boxes(tiles: Tiles, box: Box, pixels: tuple[int, int]) -> NDArray[np.int64]:
    """(n, 4): tiles in a picture of `pixels` (width, height) that shows `box` (level-0 pixels); none thinner than a pixel."""
    scale = np.array(pixels) / (box[2] - box[0], box[3] - box[1])
    # not rint, which rounds 1.5 and 2.5 to the same: a strip would not fit to the next
    first = np.floor((tiles.corners - box[:2]) * scale + 0.5).astype(np.int64)
    side = np.ceil(tiles.size)  # corners are whole pixels: with a fraction there would be gaps between tiles
    last = np.floor((tiles.corners + side - box[:2]) * scale + 0.5).astype(np.int64)
    return np.hstack([first, np.maximum(last, first + 1)])


def mosaic(boxes: NDArray[np.int64], values: NDArray[np.float64], pixels: tuple[int, int]) -> Mosaic:
    """values (m, n) of tiles at `boxes` (n, 4) in a picture of `pixels`, the mean where tiles overlap.

    As large as the tiles' edges are many, never larger than the picture: each tile adds its value at two corners and takes it
    away at the other two; sums along both axes give every cell.
    """
    width, height = pixels
    seen = (boxes[:, 0] < width) & (boxes[:, 1] < height) & (boxes[:, 2] > 0) & (boxes[:, 3] > 0)
    left, top, right, bottom = np.clip(boxes[seen], 0, [width, height, width, height]).T
    columns, rows = np.unique([0, width, *left, *right]), np.unique([0, height, *top, *bottom])
    x, y = np.searchsorted(columns, [left, right]), np.searchsorted(rows, [top, bottom])
    shape = (len(rows), len(columns))
    corners = np.concatenate([np.ravel_multi_index((y[i], x[j]), shape) for i in (0, 1) for j in (0, 1)])
    cells = np.full((len(values), shape[0] - 1, shape[1] - 1), np.nan)
    for found, column in zip(cells, values[:, seen], strict=True):
        known = ~np.isnan(column)
        count = _summed(corners, known.astype(np.float64), shape).round()
        total = _summed(corners, np.where(known, column, 0.0), shape)
        np.divide(total, count, out=found, where=count > 0)
    return Mosaic(cells, rows, columns)


def _summed(corners: NDArray[np.int64], values: NDArray[np.float64], shape: tuple[int, int]) -> NDArray[np.float64]:
    weights = np.concatenate([values, -values, -values, values])
    steps = np.bincount(corners, weights, minlength=shape[0] * shape[1]).reshape(shape)
    return steps.cumsum(0).cumsum(1)[:-1, :-1]


def raster(tiles: Tiles, values: ArrayLike, *, longest: int) -> NDArray[np.float64]:
    """One map over the whole slide, its longer side `longest` pixels: the mean of the tiles there, NaN where there are none."""
    pixels = picture_size(tiles.width, tiles.height, longest)
    boxes = pixel_boxes(tiles, (0, 0, tiles.width, tiles.height), pixels)
    laid = mosaic(boxes, np.asarray(values, dtype=np.float64)[None], pixels)
    return laid.spread(laid.cells[0])


def picture_size(width: float, height: float, longest: int) -> tuple[int, int]:
    """(width, height) in pixels of a picture whose longer side is `longest`."""
    scale = longest / max(width, height)
    return max(1, round(width * scale)), max(1, round(height * scale))
