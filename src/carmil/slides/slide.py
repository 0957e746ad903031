"""The types of a slide and of tiles cut from it.

Lengths are in level-0 pixels (of the largest level), tile pixels (of an encoder's input) or micrometres, and say so.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from carmil.bags.geometry import TileGeometry
from carmil.errors import CarmilError

Picture = NDArray[np.uint8]  # (height, width, 3), RGB


@dataclass(frozen=True)
class Level:
    """One size in which the slide is stored. downsample: level-0 pixels per pixel of this level."""

    width: int
    height: int
    downsample: float


class Slide(ABC):
    """An open slide. width, height: in level-0 pixels; mpp: micrometres per level-0 pixel; levels: the largest first.

    mpp_from: the source of the mpp, in words. Several threads may read it; another process opens it by its path and mpp.
    """

    path: Path
    width: int
    height: int
    mpp: float
    mpp_from: str
    levels: tuple[Level, ...]

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def magnification(self) -> float:
        """Magnification of the objective: 10 / mpp, so that 0.5 is 20x and 0.25 is 40x."""
        return 10 / self.mpp

    @abstractmethod
    def read(self, x: float, y: float, width: float, height: float, pixels: tuple[int, int]) -> Picture:
        """Return the rectangle at (x, y), in level-0 pixels, as a picture of `pixels` = (width, height).

        It is read from the smallest level that is large enough and scaled down without aliasing; white outside the slide. Memory
        is bounded by a few times the picture.
        """

    def thumbnail(self, longest: int) -> Picture:
        """Return the whole slide, its longer side `longest` pixels."""
        scale = longest / max(self.width, self.height)
        pixels = (max(1, round(self.width * scale)), max(1, round(self.height * scale)))
        return self.read(0, 0, self.width, self.height, pixels)

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
    slide_mpp are those of the slide, so that tiles can be drawn without it.
    """

    slide: str
    corners: NDArray[np.int64]
    size: float
    pixels: int
    mpp: float
    width: int
    height: int
    slide_mpp: float

    def __len__(self) -> int:
        return len(self.corners)

    @property
    def geometry(self) -> TileGeometry:
        return TileGeometry(self.pixels, self.mpp)


def check_same_size(slide: Slide, width: int, height: int) -> None:
    """Refuse a slide of another size than the one its tiles were cut from, in level-0 pixels."""
    if (slide.width, slide.height) != (width, height):
        raise CarmilError(
            f"{slide.path} is {slide.width:,} x {slide.height:,} pixels and its tiles were cut from {width:,} x {height:,}: "
            "expected the same slide, or cut it again"
        )
