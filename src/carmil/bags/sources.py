"""A bag, before and after it is read: where it is, what its header tells, and what is in it.

A bag has n instances of d features.
"""

from collections.abc import Callable, Mapping
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
    """One slide as it was found.

    features        (n, d) float16 or float32; nobody has looked yet whether they are finite
    coordinates     (n, 2) float32, or None; `coordinate_unit` says in what, `tile_size` is a tile's edge in the same unit
    instance_labels (n) int64, or signed truth per class (n, k), or None
    pooling         how the encoder made one vector of a tile's tokens, in words, or None where that is not recorded
    geometry        pixels of a tile and micrometres per pixel, as far as they are recorded
    slide_file      the file that the features were made from, as far as it is recorded
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
    """Where one bag is, and how to read it.

    companions  other files it needs, by what they are for: coords, labels, patches, config; of a matrix the table,
                as bag:COLUMN and truth:COLUMN
    inside      the group of an h5 file, or the bag's name in a matrix that holds many
    label       the bag's label where the layout itself knows it
    """

    id: str
    path: Path
    layout: str
    companions: tuple[tuple[str, Path], ...] = ()
    inside: str = ""
    label: str | None = None


@dataclass(frozen=True)
class Header:
    """What can be told of a bag without reading its features; `dtype` is the one they will have when read."""

    rows: int
    width: int
    dtype: str
    encoder: str | None
    pooling: str | None = None
    geometry: TileGeometry = UNKNOWN


@dataclass(frozen=True)
class Found:
    """The bags of a folder or file, sorted by id, and in plain sentences what was guessed or left aside.

    hidden: names of files of features that were left out because they begin with a dot.
    """

    sources: tuple[Source, ...]
    layout: str
    said: tuple[str, ...]
    hidden: tuple[str, ...] = ()


@dataclass(frozen=True)
class Reader:
    """How files of one's own are read.

    find    the file of each bag in a folder (or a file) by the bag's name, or None where this is not such a folder
    read    one of these bags
    """

    find: Callable[[Path], Mapping[str, Path] | None]
    read: Callable[[str, Path], Bag]


READERS: dict[str, Reader] = {}


def register_reader(
    layout: str, *, find: Callable[[Path], Mapping[str, Path] | None], read: Callable[[str, Path], Bag]
) -> None:
    """Makes files of one's own known, before all layouts that carmil knows. They are read by the process that registers."""
    READERS[layout] = Reader(find, read)
