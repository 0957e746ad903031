"""The geometry of a tile: its side in pixels, and the micrometres per pixel.

A model that was trained on tiles of one geometry gives wrong answers on tiles of another, so the geometry is stored
with the features and the run. Either number may be unknown (None): CLAM's files, for instance, record pixels only.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from carmil.errors import CarmilError

Unit = Literal["level0_px", "um"]  # unit of the coordinates of a bag
FARTHEST = 1e9  # level-0 pixels or micrometres: no slide has a coordinate nearly as large
MPP_TOLERANCE = 0.05  # relative; magnifications are nominal, and scanners of one magnification differ by a few per cent


@dataclass(frozen=True)
class TileGeometry:
    """tile_pixels: the side of a tile in tile pixels. tile_mpp: micrometres per tile pixel."""

    tile_pixels: int | None = None
    tile_mpp: float | None = None

    def __post_init__(self) -> None:
        for name, value in (("tile_pixels", self.tile_pixels), ("tile_mpp", self.tile_mpp)):
            if value is not None and not (isinstance(value, int | float) and math.isfinite(value) and value > 0):
                raise ValueError(f"{name} is {value!r}: expected a positive number")

    @property
    def known(self) -> bool:
        return self.tile_pixels is not None and self.tile_mpp is not None

    @property
    def command(self) -> str:
        """Return the command that cuts tiles of this geometry."""
        pixels = "" if self.tile_pixels is None else f" --pixels {self.tile_pixels}"
        return f"carmil slides tile{pixels}{'' if self.tile_mpp is None else f' --tile-mpp {self.tile_mpp:.4g}'}"

    def differs_from(self, other: "TileGeometry") -> bool:
        """Return whether the pixels differ, or the micrometres per pixel by more than MPP_TOLERANCE; unknown values are ignored."""
        if None not in (self.tile_pixels, other.tile_pixels) and self.tile_pixels != other.tile_pixels:
            return True
        if self.tile_mpp is None or other.tile_mpp is None:
            return False
        return abs(self.tile_mpp - other.tile_mpp) > MPP_TOLERANCE * max(self.tile_mpp, other.tile_mpp)

    def filled_from(self, other: "TileGeometry") -> "TileGeometry":
        """Return this geometry with unknown values taken from `other`."""
        return TileGeometry(
            other.tile_pixels if self.tile_pixels is None else self.tile_pixels,
            other.tile_mpp if self.tile_mpp is None else self.tile_mpp,
        )

    def __str__(self) -> str:
        pixels = "an unknown number of pixels" if self.tile_pixels is None else f"{self.tile_pixels} pixels"
        mpp = "unknown micrometres per pixel" if self.tile_mpp is None else f"{self.tile_mpp:.4g} um/px"
        return f"{pixels} at {mpp}" if self != UNKNOWN else "unknown geometry"


UNKNOWN = TileGeometry()


def check_geometry(
    found: TileGeometry, expected: TileGeometry, *, what: str, whose: str, todo: str, log: Callable[[str], None]
) -> None:
    """Refuse tiles of `what` that differ from those that `whose` expects; if either geometry is unknown, log one line."""
    if found.differs_from(expected):
        raise CarmilError(f"{what} has tiles of {found}, {whose} has {expected}: {todo}")
    unknown = [name for name, geometry in ((whose, expected), (what, found)) if not geometry.known]
    if unknown:
        log(
            f"the tile geometry (pixels, um/px) of {' and of '.join(unknown)} is not fully known: "
            "it could not be checked that it is the same"
        )
