"""Values of tiles laid out on pixels; tiles may overlap.

n tiles, m maps. A box is (left, top, right, bottom).
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Box = tuple[float, float, float, float]


@dataclass(frozen=True, eq=False)
class Mosaic:
    """Maps as cells between the edges of tiles: `cells` (m, h, w) are means of the tiles over each cell, NaN if
    there are none.

    `rows` (h+1) and `columns` (w+1) are the pixels at which cells begin and end.
    """

    cells: NDArray[np.float64]
    rows: NDArray[np.int64]
    columns: NDArray[np.int64]

    def spread(self, cells: NDArray[Any]) -> NDArray[Any]:
        """Expand values per cell (h, w, ...) to values per pixel."""
        return cells.repeat(np.diff(self.rows), axis=0).repeat(np.diff(self.columns), axis=1)


def pixel_boxes(corners: NDArray[Any], size: float, box: Box, pixels: tuple[int, int]) -> NDArray[np.int64]:
    """Return the squares at `corners` (n, 2) as boxes (n, 4) in a picture of `pixels` (width, height) that shows `box`.

    corners, size and box share one unit, for instance level-0 pixels. No box is thinner than a pixel.
    """
    scale = np.array(pixels) / (box[2] - box[0], box[3] - box[1])
    # not rint, which rounds 1.5 and 2.5 to the same number, so that strips would not fit together
    first = np.floor((corners - box[:2]) * scale + 0.5).astype(np.int64)
    side = np.ceil(size)  # corners are whole pixels: a fractional side would leave gaps between tiles
    last = np.floor((corners + side - box[:2]) * scale + 0.5).astype(np.int64)
    return np.hstack([first, np.maximum(last, first + 1)])


def mosaic(boxes: NDArray[np.int64], values: NDArray[np.float64], pixels: tuple[int, int]) -> Mosaic:
    """Lay out values (m, n) of tiles at `boxes` (n, 4) in a picture of `pixels`; overlapping tiles are averaged.

    There is one cell between any two edges of tiles, so that it is never larger than the picture. Each tile adds its value at two
    corners and subtracts it at the other two; sums along both axes give every cell.
    """
    width, height = pixels
    visible = (boxes[:, 0] < width) & (boxes[:, 1] < height) & (boxes[:, 2] > 0) & (boxes[:, 3] > 0)
    left, top, right, bottom = np.clip(boxes[visible], 0, [width, height, width, height]).T
    columns, rows = np.unique([0, width, *left, *right]), np.unique([0, height, *top, *bottom])
    x, y = np.searchsorted(columns, [left, right]), np.searchsorted(rows, [top, bottom])
    shape = (len(rows), len(columns))
    corners = np.concatenate([np.ravel_multi_index((y[i], x[j]), shape) for i in (0, 1) for j in (0, 1)])
    cells = np.full((len(values), shape[0] - 1, shape[1] - 1), np.nan)
    for found, column in zip(cells, values[:, visible], strict=True):
        known = ~np.isnan(column)
        count = _summed(corners, known.astype(np.float64), shape).round()
        total = _summed(corners, np.where(known, column, 0.0), shape)
        np.divide(total, count, out=found, where=count > 0)
    return Mosaic(cells, rows, columns)


def _summed(corners: NDArray[np.int64], values: NDArray[np.float64], shape: tuple[int, int]) -> NDArray[np.float64]:
    weights = np.concatenate([values, -values, -values, values])
    steps = np.bincount(corners, weights, minlength=shape[0] * shape[1]).reshape(shape)
    return steps.cumsum(0).cumsum(1)[:-1, :-1]


def picture_size(width: float, height: float, longest: int) -> tuple[int, int]:
    """Return (width, height) in pixels of a picture whose longer side is `longest`."""
    scale = longest / max(width, height)
    return max(1, round(width * scale)), max(1, round(height * scale))


def spacing(corners: NDArray[Any]) -> float:
    """Return the median distance of a tile (n, 2) to its nearest neighbour along the axes: the size of tiles of unknown size.

    Pieces of tissue may have different grids, so that the columns and rows of all of them cannot be compared.
    """
    from scipy.spatial import cKDTree

    apart = np.unique(corners, axis=0)
    if len(apart) < 2:
        return 1.0
    distances, _ = cKDTree(apart).query(apart, k=2, p=np.inf)
    return float(np.median(distances[:, 1]))
