"""What a slide, and tiles cut from it, are to everything else in this room.

Lengths are in level-0 pixels (of the slide at its largest), tile pixels (of what an encoder sees) or micrometres, and say so.
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
    """One size in which the slide is stored; `downsample` level-0 pixels are one of its own."""

    width: int
    height: int
    downsample: float


class Slide(ABC):
    """An open slide. `width`, `height` in level-0 pixels; `mpp`, micrometres a level-0 pixel; `levels`, the largest first.

    `mpp_from` says in words where the mpp comes from.
    May be read from several threads, and opened again in another process by its path and mpp.
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
        """Of the objective, as a pathologist says it: 10 / mpp, so that 0.5 is 20x and 0.25 is 40x."""
        return 10 / self.mpp

    @abstractmethod
    def read(self, x: float, y: float, width: float, height: float, pixels: tuple[int, int]) -> Picture:
        """The rectangle at (x, y), in level-0 pixels, as a picture of `pixels` = (width, height).

        From the smallest level that is large enough, scaled down without aliasing; white where there is no slide. Never more
        memory than some times the picture.
        """

    def thumbnail(self, longest: int) -> Picture:
        """The whole slide, its longer side `longest` pixels."""
        scale = longest / max(self.width, self.height)
        pixels = (max(1, round(self.width * scale)), max(1, round(self.height * scale)))
        return self.read(0, 0, self.width, self.height, pixels)

    def close(self) -> None:  # noqa: B027 - not every slide holds a file
        """Gives back what the file took."""

    def __enter__(self) -> "Slide":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


@dataclass(frozen=True)
class Tiles:
    """Squares of a slide, n of them. `corners` (n, 2): x, y of the upper left one, whole level-0 pixels.

    A side is `size` level-0 pixels (a fraction is possible), shown to an encoder as `pixels` tile pixels of `mpp` micrometres.
    width, height and slide_mpp are the slide's, so that tiles can be drawn without it.
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
