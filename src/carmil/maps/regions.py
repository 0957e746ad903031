"""Regions of a slide: polygons with a class name. Coordinates are level-0 pixels."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

import numpy as np
import shapely
from numpy.typing import NDArray
from shapely import MultiPolygon, Polygon

from carmil.errors import CarmilError

Ring = NDArray[np.float64]  # (k, 2): x, y of its corners
MOST_MEETINGS = 2**19  # pairs of edges that may cross in an outline that needs repair: some seconds


@dataclass(frozen=True, eq=False)
class Region:
    """A region of class `name`; `shape` is valid and not empty. A `cut` region is subtracted from those around it."""

    name: str
    shape: Polygon | MultiPolygon
    cut: bool = False

    @property
    def extent(self) -> float:
        """Square level-0 pixels within the outline of its largest part, holes included."""
        return max(Polygon(part.exterior).area for part in shapely.get_parts(self.shape))

    @property
    def rings(self) -> list[Ring]:
        """Closed outlines of all parts and holes."""
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
