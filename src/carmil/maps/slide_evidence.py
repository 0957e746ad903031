"""The evidence that `carmil explain` wrote, as maps of a slide's tiles. n tiles."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from carmil.errors import CarmilError
from carmil.maps.evidence_files import SlideEvidence, evidence_file, read_evidence
from carmil.maps.tile_maps import TileMap
from carmil.slides.slide import Tiles

NEAR = 0.75  # level-0 pixels by which a coordinate may differ: stores keep float32, and other tools round


@dataclass(frozen=True)
class Smoothing:
    """How far a tile's value is handed out: `radius` in tiles, or micrometres if `microns`."""

    radius: float = 0.0
    microns: bool = False

    @classmethod
    def parse(cls, words: str) -> "Smoothing":
        """`2` or `2 tiles`, `300um`."""
        found = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*(tiles?|um|µm)?\s*", words)
        if found is None:
            raise CarmilError(
                f"--smooth {words!r}: expected a radius in tiles, such as 2, or in micrometres, such as 300um"
            )
        return cls(float(found[1]), found[2] in ("um", "µm"))

    def __call__(self, one: TileMap, tiles: Tiles) -> TileMap:
        pixels = self.radius / tiles.slide_mpp if self.microns else self.radius * tiles.size
        words = f"{self.radius:g} {'µm' if self.microns else 'tile' if self.radius == 1 else 'tiles'}"
        return one.smoothed_over(tiles.corners, pixels, words)


def maps_of(
    folder: Path, tiles: Tiles, asked: Sequence[str] = (), *, model: str = "", smoothing: Smoothing | None = None
) -> list[TileMap]:
    """The maps that are asked for: factual, counterfactual, difference, or classes. None: see `SlideEvidence.maps`."""
    found = read_evidence(evidence_file(folder, tiles.slide))
    rows = _rows_of_tiles(found, tiles)
    maps = [replace(one, values=np.append(one.values, np.nan)[rows]) for one in found.maps(asked, model=model)]
    return [one if smoothing is None else smoothing(one, tiles) for one in maps]


def answer_lines(folder: Path, slide: str, *, model: str = "") -> list[str]:
    """What the evidence in a folder explains: the answer with its probability, the label where it is known, and the rule."""
    lines = read_evidence(evidence_file(folder, slide)).answer_lines
    return [f"{model}: {line}" if model else line for line in lines]


def _rows_of_tiles(found: SlideEvidence, tiles: Tiles) -> NDArray[np.int64]:
    """(n): the row of each tile, -1 where there is none. By coordinates where the file has them, else by order."""
    count, there = len(found), found.coordinates
    if there is None:
        if count != len(tiles):
            raise CarmilError(
                f"{found.path} has {count:,} rows without coordinates for {len(tiles):,} tiles: expected one row per tile"
            )
        return np.arange(count)
    if found.unit == "um":
        there /= tiles.slide_mpp
    if len(there) == len(tiles) and (np.abs(there - tiles.corners) <= NEAR).all():
        return np.arange(count)
    return _nearest(there, tiles, found.path)


def _nearest(there: NDArray[np.float64], tiles: Tiles, path: Path) -> NDArray[np.int64]:
    from scipy.spatial import cKDTree

    far, tile = cKDTree(tiles.corners).query(there, p=np.inf)
    lost = int((far > NEAR).sum())
    if lost:
        raise CarmilError(
            f"{path}: {lost:,} of {len(there):,} rows match no tile of {tiles.slide}: were the features made from these tiles?"
        )
    rows = np.full(len(tiles), -1)
    rows[tile] = np.arange(len(there))
    return rows
