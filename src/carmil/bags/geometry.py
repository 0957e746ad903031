"""The geometry of a tile: how many pixels an encoder gets, and how many micrometres each of them covers.

A model that was trained on tiles of one geometry gives wrong answers on tiles of another, so the geometry travels with
the features and the run. Either number may be unknown (None): CLAM's files, for instance, record pixels only.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from carmil.errors import CarmilError

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
        """The command that cuts such tiles."""
        pixels = "" if self.tile_pixels is None else f" --pixels {self.tile_pixels}"
        return f"carmil slides tile{pixels}{'' if self.tile_mpp is None else f' --tile-mpp {self.tile_mpp:.4g}'}"

    def differs_from(self, other: "TileGeometry") -> bool:
        """Whether pixels differ, or micrometres per pixel by more than MPP_TOLERANCE; missing values are ignored."""
        if None not in (self.tile_pixels, other.tile_pixels) and self.tile_pixels != other.tile_pixels:
            return True
        if self.tile_mpp is None or other.tile_mpp is None:
            return False
        return abs(self.tile_mpp - other.tile_mpp) > MPP_TOLERANCE * max(self.tile_mpp, other.tile_mpp)

    def filled_from(self, other: "TileGeometry") -> "TileGeometry":
        """This geometry, with what it does not know taken from the other."""
        return TileGeometry(
            other.tile_pixels if self.tile_pixels is None else self.tile_pixels,
            other.tile_mpp if self.tile_mpp is None else self.tile_mpp,
        )

    def __str__(self) -> str:
        pixels = "an unknown number of pixels" if self.tile_pixels is None else f"{self.tile_pixels} pixels"
        mpp = "unknown micrometres per pixel" if self.tile_mpp is None else f"{self.tile_mpp:.4g} um/px"
        return f"{pixels} at {mpp}" if self != UNKNOWN else "unknown geometry"


UNKNOWN = TileGeometry()


def common_geometry(geometries: Iterable[TileGeometry]) -> TileGeometry:
    """The geometry of bags that do not differ, as far as any of them has it recorded."""
    common = UNKNOWN
    for geometry in dict.fromkeys(geometries):
        common = common.filled_from(geometry)
    return common


def check_geometry(
    found: TileGeometry, expected: TileGeometry, *, what: str, whose: str, todo: str, log: Callable[[str], None]
) -> None:
    """Refuse tiles of `what` that differ from those expected by `whose`; log one line where that is not known."""
    if found.differs_from(expected):
        raise CarmilError(f"{what} has tiles of {found}, {whose} has {expected}: {todo}")
    unknown = [name for name, geometry in ((whose, expected), (what, found)) if not geometry.known]
    if unknown:
        log(
            f"the tile geometry (pixels, um/px) of {' and of '.join(unknown)} is not fully known: "
            "whether it is the same could not be checked"
        )
