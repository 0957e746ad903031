"""A bag before and after it is read: where it is, what its header says, and what is in it.

A bag has n instances of d features.
"""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from carmil.bags.geometry import UNKNOWN, TileGeometry
from carmil.bags.slide_file import NOT_RECORDED, SlideFile

if TYPE_CHECKING:
    from carmil.bags.bags import Unit


@dataclass(frozen=True, eq=False)
class Bag:
    """One slide as its file has it.

    features        (n, d) float16 or float32, which may still hold NaN
    coordinates     (n, 2) float32 in `coordinate_unit`, or None; `tile_size` is the side of a tile in the same unit
    instance_labels (n) int64, or signed truth per class (n, k), or None
    pooling         how the encoder made one vector of a tile's tokens, or None where the file does not say
    geometry        pixels of a tile and micrometres per pixel, as far as they are recorded
    slide_file      the slide that the features were made from, as far as it is recorded
    """

    id: str
    features: np.ndarray
    coordinates: np.ndarray | None = None
    coordinate_unit: "Unit | None" = None
    tile_size: float | None = None
    encoder: str | None = None
    instance_labels: np.ndarray | None = None
    pooling: str | None = None
    geometry: TileGeometry = UNKNOWN
    slide_file: SlideFile = NOT_RECORDED


@dataclass(frozen=True)
class Source:
    """Where a bag is, and how to read it.

    companions  other files it needs, by their role: coords, labels, patches, config; for a matrix the table, as bag:COLUMN and
                truth:COLUMN
    key         the group of an h5 file, or the name of the bag in a matrix of many
    label       the label of the bag, where the layout itself knows it
    """

    id: str
    path: Path
    layout: str
    companions: tuple[tuple[str, Path], ...] = ()
    key: str = ""
    label: str | None = None

    def __str__(self) -> str:
        return str(self.path)


@dataclass(frozen=True)
class BagHeader:
    """What is known of a bag without reading its features; `dtype` is the type they will have."""

    rows: int
    width: int
    dtype: str
    encoder: str | None
    pooling: str | None = None
    geometry: TileGeometry = UNKNOWN

    @classmethod
    def of(cls, bag: Bag) -> "BagHeader":
        rows, width = bag.features.shape
        return cls(rows, width, str(bag.features.dtype), bag.encoder, bag.pooling, bag.geometry)


@dataclass(frozen=True)
class CohortFiles:
    """The bags of a folder or file, sorted by id.

    notes: one sentence per guess, and per kind of file that was left out. hidden: files of features whose names begin with a
    dot, which are left out.
    """

    sources: tuple[Source, ...]
    layout: str
    notes: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()


@dataclass(frozen=True)
class Reader:
    """A registered layout.

    find    returns the file of each bag in a folder (or file) by the name of the bag; None for a folder of another layout
    read    reads one of these bags
    """

    find: Callable[[Path], Mapping[str, Path] | None]
    read: Callable[[str, Path], Bag]


READERS: dict[str, Reader] = {}


def register_reader(
    layout: str, *, find: Callable[[Path], Mapping[str, Path] | None], read: Callable[[str, Path], Bag]
) -> None:
    """Add a layout, which takes precedence over those that carmil knows. Its files are read by this process alone."""
    READERS[layout] = Reader(find, read)


def worker_count(workers: int | None, sources: Sequence[Source]) -> int:
    """One process per core. A small cohort, or one that a registered reader reads, is read by this process alone."""
    if any(source.layout in READERS for source in sources) or getattr(sys, "frozen", False) or not sys.executable:
        return 1
    if workers is not None:
        return max(1, workers)
    size = sum(path.stat().st_size for path in {source.path for source in sources} if path.exists())
    return 1 if size < 2**28 else min(os.cpu_count() or 1, 16)
