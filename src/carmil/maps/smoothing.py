"""Smoothing of maps before they are drawn."""

import re
from dataclasses import dataclass

from carmil.errors import CarmilError
from carmil.maps.tile_maps import TileMap
from carmil.slides.slide import Tiles


@dataclass(frozen=True)
class Smoothing:
    """The radius that a tile's value is spread over: in tiles, or in micrometres if `microns`."""

    radius: float = 0.0
    microns: bool = False

    @classmethod
    def parse(cls, words: str) -> "Smoothing":
        """Parse a radius such as `2`, `2 tiles` or `300um`."""
        match = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*(tiles?|um|µm)?\s*", words)
        if match is None:
            raise CarmilError(
                f"--smooth {words!r}: expected a radius in tiles, such as 2, or in micrometres, such as 300um"
            )
        return cls(float(match[1]), match[2] in ("um", "µm"))

    def __call__(self, one: TileMap, tiles: Tiles) -> TileMap:
        pixels = self.radius / tiles.slide_mpp if self.microns else self.radius * tiles.size
        words = f"{self.radius:g} {'µm' if self.microns else 'tile' if self.radius == 1 else 'tiles'}"
        return one.smooth(tiles.corners, pixels, words)
