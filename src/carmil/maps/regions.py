"""Regions of a slide: polygons with a name. Coordinates are level-0 pixels."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ring = NDArray[np.float64]  # (k, 2): x, y of its corners


@dataclass(frozen=True, eq=False)
class Region:
    """A region of class `name`: the points inside an odd number of `rings`, so that a ring in a ring is a hole.

    A `cut` region takes away from what it lies in, and is of no class.
    """

    name: str
    rings: tuple[Ring, ...]
    cut: bool = False

    @property
    def area(self) -> float:
        """In square level-0 pixels; holes are not taken away."""
        return max(ring_area(ring) for ring in self.rings)


def ring_area(ring: Ring) -> float:
    """The area that a ring encloses, whichever way it runs."""
    x, y = ring.T
    return abs(float(np.dot(x, np.roll(y, -1)) - np.dot(y, np.roll(x, -1)))) / 2
