"""The types of a slide and of tiles cut from it.

Lengths are in level-0 pixels (of the largest level), tile pixels (of an encoder's input) or micrometres, as
documented for each. Micrometres per level-0 pixel come from the file or from the user and are never guessed.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from carmil.bags.geometry import TileGeometry
from carmil.errors import CarmilError
from carmil.slides.dicom_series import slide_name
from carmil.words import number_in

Picture = NDArray[np.uint8]  # (height, width, 3), RGB
SMALLEST, LARGEST = 0.05, 20.0  # micrometres; no scanner is finer, and no slide coarser
SKEW = 0.02  # largest relative difference between x and y
_MICROMETRES = {"pm": 1e-6, "nm": 1e-3, "µm": 1.0, "um": 1.0, "μm": 1.0, "mm": 1e3, "cm": 1e4, "m": 1e6, "in": 25400.0}


@dataclass(frozen=True)
class Level:
    """One resolution of the slide. downsample: level-0 pixels per pixel of this level."""

    width: int
    height: int
    downsample: float


class Slide(ABC):
    """An open slide. width, height: in level-0 pixels; mpp: micrometres per level-0 pixel; levels: the largest first.

    mpp_from: a description of the source of the mpp. Several threads may read the slide; another process opens it by
    its path and mpp.
    """

    path: Path
    width: int
    height: int
    mpp: float
    mpp_from: str
    levels: tuple[Level, ...]

    @property
    def name(self) -> str:
        return slide_name(self.path)

    @abstractmethod
    def read(self, x: float, y: float, width: float, height: float, pixels: tuple[int, int]) -> Picture:
        """Return the rectangle at (x, y), in level-0 pixels, as a picture of `pixels` = (width, height).

        It is read from the smallest level that is large enough and scaled down without aliasing; white outside the slide. Memory
        is bounded by a few times the picture.
        """

    def close(self) -> None:  # noqa: B027 - not every slide holds a file
        """Release the file."""

    def __enter__(self) -> "Slide":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


@dataclass(frozen=True)
class Tiles:
    """Square tiles of a slide, n of them. corners (n, 2): x, y of their upper left corners, whole level-0 pixels.

    A side is `size` level-0 pixels (possibly a fraction), resized to `pixels` tile pixels of `mpp` micrometres. width, height and
    slide_mpp are those of the slide, so that tiles can be drawn without it. tiling: how they were chosen, see `tiling_text`;
    None if it is not recorded.
    """

    slide: str
    corners: NDArray[np.int64]
    size: float
    pixels: int
    mpp: float
    width: int
    height: int
    slide_mpp: float
    tiling: str | None = None

    def __len__(self) -> int:
        return len(self.corners)

    @property
    def geometry(self) -> TileGeometry:
        return TileGeometry(self.pixels, self.mpp)


def check_same_size(slide: Slide, width: int, height: int) -> None:
    """Refuse a slide whose size in level-0 pixels differs from that of the slide its tiles were cut from."""
    if (slide.width, slide.height) != (width, height):
        raise CarmilError(
            f"{slide.path} is {slide.width:,} x {slide.height:,} pixels and its tiles were cut from {width:,} x {height:,}: "
            "expected the same slide, or cut it again"
        )


@dataclass(frozen=True)
class FileMpp:
    """Pixel size in a file: micrometres per pixel in x and y, and where the file records it."""

    x: float
    y: float
    place: str

    def problem(self) -> str | None:
        """Return why the value is implausible, or None."""
        text = f"{self.x:.4g} x {self.y:.4g} um/px ({self.place})"
        if not (SMALLEST <= self.x <= LARGEST and SMALLEST <= self.y <= LARGEST):
            return f"says {text}, which is impossible (outside {SMALLEST} to {LARGEST:g})"
        if abs(self.x - self.y) > SKEW * min(self.x, self.y):
            return f"says {text}: x and y differ by more than {SKEW:.0%}"
        return None


@dataclass(frozen=True)
class GivenMpp:
    """Micrometres per pixel from the user. slide: for this slide, in place of the file's value; missing: for slides
    whose file has none.
    """

    slide: float | None = None
    missing: float | None = None

    def check(self, path: Path) -> None:
        for value in (self.slide, self.missing):
            if value is not None and not SMALLEST <= value <= LARGEST:
                raise CarmilError(f"mpp {value:g} for {path}: expected {SMALLEST} to {LARGEST:g} micrometres per pixel")


def choose_mpp(
    path: Path, recorded: FileMpp | None, mpp: GivenMpp, *, objective: float | None = None
) -> tuple[float, str]:
    """Return the mpp to use, and a description of its source."""
    mpp.check(path)
    needed = recorded is None or recorded.problem() is not None
    if (given := mpp.missing if needed and mpp.slide is None else mpp.slide) is not None:
        says = (
            "the file has none"
            if recorded is None
            else f"the file {recorded.problem() or f'says {_mean(recorded):.4g}'}"
        )
        return given, f"given; {says}"
    problem = "does not record its micrometres per pixel" if recorded is None else recorded.problem()
    if recorded is None or problem is not None:
        hint = f" (its objective is {objective:g}x: {10 / objective:g} would be usual)" if objective else ""
        raise CarmilError(
            f"{path} {problem}: give it with --mpp, from the scanner's protocol (40x is often 0.25){hint}; "
            "for slides of several scanners, `slides tile`, `slides run` and `view` take --slides-table"
        )
    return _mean(recorded), f"the file ({recorded.place})"


def micrometres(size: str | None, unit: str | None) -> float | None:
    """Convert a length in OME's notation; None if it is missing, or if its unit is not a length."""
    factor, length = _MICROMETRES.get(unit or "µm"), number_in(size or "")
    return None if factor is None or length is None else length * factor


def _mean(recorded: FileMpp) -> float:
    return (recorded.x + recorded.y) / 2
