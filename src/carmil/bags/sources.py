"""Where a bag is stored, what its header contains, and its contents. A bag has n instances of d features."""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np

from carmil.bags.geometry import UNKNOWN, TileGeometry, Unit


@dataclass(frozen=True)
class SlideFile:
    """The slide that features were made from, recorded with them to detect another file of the same name.

    Size in bytes, modification time in seconds, and width and height in level-0 pixels; None where not recorded.
    """

    slide_bytes: int | None = None
    slide_mtime: float | None = None
    slide_width: int | None = None
    slide_height: int | None = None

    def differs_from(self, other: "SlideFile") -> bool:
        """Return whether any value recorded by both differs."""
        pairs = [(getattr(self, field.name), getattr(other, field.name)) for field in fields(self)]
        return any(None not in pair and pair[0] != pair[1] for pair in pairs)


NOT_RECORDED = SlideFile()


def slide_file_at(path: Path, *, width: int | None = None, height: int | None = None) -> SlideFile:
    """Return the record of the file at `path`, as far as the file system provides it."""
    try:
        facts = path.stat()
    except OSError:  # reported when the slide is opened
        return SlideFile(slide_width=width, slide_height=height)
    # Archives may set the time to 0, which is meaningless.
    return SlideFile(facts.st_size, facts.st_mtime if facts.st_mtime > 0 else None, width, height)


@dataclass(frozen=True, eq=False)
class Bag:
    """The contents of the file of one slide.

    features        (n, d) float16 or float32, not yet checked for NaN
    coordinates     (n, 2) float32 in `coordinate_unit`, or None; `tile_size` is the side of a tile in the same unit
    instance_labels (n) int64, or signed truth per class (n, k), or None
    pooling         how the encoder reduced a tile's tokens to one vector, or None where the file does not record it
    geometry        pixels of a tile and micrometres per pixel, as far as they are recorded
    slide_file      the slide that the features were made from, as far as it is recorded
    tiling          how the tiles were chosen, as options of `carmil slides tile`, or None where it is not recorded
    """

    id: str
    features: np.ndarray
    coordinates: np.ndarray | None = None
    coordinate_unit: Unit | None = None
    tile_size: float | None = None
    encoder: str | None = None
    instance_labels: np.ndarray | None = None
    pooling: str | None = None
    geometry: TileGeometry = UNKNOWN
    slide_file: SlideFile = NOT_RECORDED
    tiling: str | None = None


@dataclass(frozen=True)
class Source:
    """The location of a bag and the way to read it.

    companions  other files that are needed, by their role: coords, labels, patches, config; for a matrix the table, as
                bag:COLUMN and truth:COLUMN
    key         the group of an h5 file, or the name of the bag in a matrix of several
    label       the label of the bag, if the layout contains it
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
    """The properties of a bag that can be read without its features; `dtype` is the type of the features."""

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
    """Register a layout, which takes precedence over the built-in ones. Its files are read without worker processes."""
    READERS[layout] = Reader(find, read)


def worker_count(workers: int | None, sources: Sequence[Source]) -> int:
    """Return the number of worker processes: one per core, but one for a small cohort or a registered reader."""
    if any(source.layout in READERS for source in sources) or getattr(sys, "frozen", False) or not sys.executable:
        return 1
    if workers is not None:
        return max(1, workers)
    size = sum(path.stat().st_size for path in {source.path for source in sources} if path.exists())
    return 1 if size < 2**28 else min(os.cpu_count() or 1, 16)
