"""The cohort store: all bags of a cohort in one matrix on disk, read through a memory map.

STORE/
  index.json              type, width and encoder of the features, and the entry of each bag: see `StoreIndex` and `Entry`
  features.bin            (n, d) row by row
  coordinates.bin         (n, 2) float32
  instance_labels.bin     (n) int64, or signed truth per class (n, k) int8, if any bag has them
  pictures.bin            (m, height, width, channels) uint8 images of instances, and picture_index.bin (n) int32, the image
                          of each, if the cohort has pictures
  labels.csv              if the files of the cohort contain the labels

`building` packs the files of a cohort, `datasets.packing` packs bags in memory, `checking` checks files and stores.
"""

import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from annotated_types import Ge, Gt, Le, MinLen

from carmil.bags.geometry import UNKNOWN as UNKNOWN_GEOMETRY
from carmil.bags.geometry import TileGeometry
from carmil.bags.pictures import Pictures
from carmil.bags.sources import NOT_RECORDED, Bag, SlideFile, Source
from carmil.errors import CarmilError
from carmil.files import write_text
from carmil.truth import UNKNOWN
from carmil.untrusted import parse_as, read_json

if TYPE_CHECKING:
    from carmil.bags.bags import Bags

Dtype = Literal["float16", "float32", "bfloat16"]
ITEM_SIZE: dict[str, int] = {"float16": 2, "bfloat16": 2, "float32": 4}
VERSION = 2  # version 1 recorded neither the tile geometry nor the pooling of the encoder
OnBag = Callable[[int, int], None]  # called with the number of completed bags and of all bags
Count = Annotated[int, Ge(1)]
REFUSED = 0.5  # refuse a bag if more than this share of its nonzero features becomes 0


@dataclass(frozen=True)
class Entry:
    """One bag of a store. `vanished` is the share of its nonzero features that became 0 in the type of the store."""

    id: str
    rows: Count
    unit: Literal["um", "level0_px"] | None
    tile_size: Annotated[float, Gt(0)] | None
    encoder: str | None
    truth: bool
    checksum: str
    vanished: Annotated[float, Ge(0), Le(1)] = 0.0
    pooling: str | None = None
    tile_pixels: Count | None = None
    tile_mpp: Annotated[float, Gt(0)] | None = None
    slide_bytes: int | None = None
    slide_mtime: float | None = None
    slide_width: int | None = None
    slide_height: int | None = None
    tiling: str | None = None

    @classmethod
    def of(cls, bag: Bag, stored: np.ndarray, vanished: float = 0.0) -> "Entry":
        """Create the entry of a bag. `stored` are its features in the type of the store."""
        return cls(
            id=bag.id,
            rows=len(stored),
            unit=bag.coordinate_unit,
            tile_size=bag.tile_size,
            encoder=bag.encoder,
            truth=bag.instance_labels is not None,
            checksum=checksum(stored.tobytes()),
            vanished=vanished,
            pooling=bag.pooling,
            tiling=bag.tiling,
            **asdict(bag.geometry),
            **asdict(bag.slide_file),
        )

    @property
    def geometry(self) -> TileGeometry:
        return TileGeometry(self.tile_pixels, self.tile_mpp)

    @property
    def slide_file(self) -> SlideFile:
        return SlideFile(self.slide_bytes, self.slide_mtime, self.slide_width, self.slide_height)


@dataclass(frozen=True)
class StoreIndex:
    """The contents of index.json.

    signature: what the store was built from; equal for the same command on the same files.
    truth_classes: the classes of the columns of signed instance labels; None if there are none, or one label per instance.
    pictures: (m, height, width, channels); None without pictures.
    """

    version: Annotated[int, Ge(1), Le(VERSION)]
    dtype: Dtype
    width: Count
    encoder: str | None
    bags: tuple[Entry, ...]
    empty: tuple[str, ...]
    left_out: tuple[str, ...]
    origin: str
    fingerprint: str
    signature: str = ""
    layout: str = ""
    truth_classes: Annotated[tuple[str, ...], MinLen(1)] | None = None
    pictures: tuple[Count, Count, Count, Count] | None = None

    def write(self, folder: Path) -> None:
        write_text(folder / "index.json", json.dumps(asdict(self)))


@dataclass(frozen=True)
class Store:
    """An opened store. `bags()` returns at once: features are read when they are used."""

    path: Path
    index: StoreIndex

    @property
    def dtype(self) -> Dtype:
        return self.index.dtype

    @property
    def width(self) -> int:
        return self.index.width

    @property
    def encoder(self) -> str | None:
        return self.index.encoder

    @property
    def entries(self) -> tuple[Entry, ...]:
        return self.index.bags

    @property
    def truth_classes(self) -> tuple[str, ...] | None:
        """Return the classes of the columns of signed instance labels."""
        return self.index.truth_classes

    @property
    def fingerprint(self) -> str:
        """Return a checksum of the names and features of all bags."""
        return self.index.fingerprint

    @property
    def ids(self) -> tuple[str, ...]:
        return tuple(entry.id for entry in self.entries)

    @property
    def checksums(self) -> dict[str, str]:
        """Return the checksum of the features of each bag, by its id."""
        return {entry.id: entry.checksum for entry in self.entries}

    @property
    def rows(self) -> int:
        return sum(entry.rows for entry in self.entries)

    @property
    def geometry(self) -> TileGeometry:
        """Return the tile geometry of all bags, as far as any file recorded it."""
        return reduce(
            TileGeometry.filled_from, dict.fromkeys(entry.geometry for entry in self.entries), UNKNOWN_GEOMETRY
        )

    @property
    def pooling(self) -> str | None:
        """Return how the encoder made one vector per tile; None where no file recorded it."""
        return next((entry.pooling for entry in self.entries if entry.pooling is not None), None)

    @property
    def tilings(self) -> tuple[str, ...]:
        """Return the ways in which tiles were chosen, most frequent first; bags without a record of it are left out."""
        return tuple(text for text, _ in Counter(entry.tiling for entry in self.entries if entry.tiling).most_common())

    @property
    def labels(self) -> Path | None:
        """Return the path of the cohort's own label table, if it has one."""
        return self.path / "labels.csv" if (self.path / "labels.csv").is_file() else None

    def bags(self) -> "Bags":
        import torch

        from carmil.bags.bags import Bags, shared_unit

        offsets = np.cumsum([0, *(entry.rows for entry in self.entries)])

        def mapped(name: str, dtype: Any, columns: int, known: Sequence[bool], missing: float) -> torch.Tensor | None:
            """Map the rows of a file, with `missing` for bags without this array; return None if no bag has it."""
            if not any(known):
                return None
            values = self._map(name, dtype, columns)
            for i in np.flatnonzero(~np.array(known)):
                values[offsets[i] : offsets[i + 1]] = missing
            return torch.from_numpy(values)

        features = self._map("features.bin", np.int16 if ITEM_SIZE[self.dtype] == 2 else np.int32, self.width)
        units, classes = [entry.unit for entry in self.entries], self.truth_classes
        has_unit, has_truth = [unit is not None for unit in units], [entry.truth for entry in self.entries]
        truth_type = np.int64 if classes is None else np.int8
        truth = mapped("instance_labels.bin", truth_type, 1 if classes is None else len(classes), has_truth, UNKNOWN)
        return Bags.trusted(
            features=torch.from_numpy(features).view(getattr(torch, self.dtype)),
            offsets=torch.from_numpy(offsets),
            ids=self.ids,
            instance_labels=truth.squeeze(-1) if truth is not None and classes is None else truth,
            coordinates=mapped("coordinates.bin", np.float32, 2, has_unit, np.nan),
            coordinate_unit=shared_unit(units),
        )

    def bag(self, position: int) -> Bag:
        """Return one bag as if it were read from a file."""
        entry = self.entries[position]
        return self.merged_bag([position], entry.id, entry.slide_file)

    def merged_bag(self, positions: Sequence[int], id: str, slide_file: SlideFile = NOT_RECORDED) -> Bag:
        """Merge the instances of several bags into one; it has coordinates if those of all bags have the same unit."""
        bags, first = self.bags()[positions], self.entries[positions[0]]
        unit = None if isinstance(bags.coordinate_unit, tuple) else bags.coordinate_unit
        truth = bags.instance_labels if any(self.entries[i].truth for i in positions) else None
        return Bag(
            id=id,
            features=(bags.features.float() if self.dtype == "bfloat16" else bags.features).numpy(),
            coordinates=None if bags.coordinates is None or unit is None else bags.coordinates.numpy(),
            coordinate_unit=unit,
            tile_size=first.tile_size,
            encoder=first.encoder,
            instance_labels=None if truth is None else truth.numpy(),
            pooling=first.pooling,
            geometry=first.geometry,
            slide_file=slide_file,
            tiling=first.tiling,
        )

    def pictures(self) -> Pictures | None:
        """Return the pictures of the instances, in the order of the rows; images are read when they are used."""
        if self.index.pictures is None:
            return None
        images = np.memmap(self.path / "pictures.bin", dtype=np.uint8, mode="c", shape=self.index.pictures)
        return Pictures(images, self._map("picture_index.bin", np.int32, 1)[:, 0])

    def checksums_in(self, dtype: Dtype) -> dict[str, str] | None:
        """Return the checksum that each bag would have in a store of `dtype`; None if this store is not precise
        enough to compute it.
        """
        if dtype == self.dtype:
            return self.checksums
        if self.dtype != "float32":
            return None
        bags = self.bags()
        return {
            entry.id: checksum(round_features(bags[i].features.numpy(), dtype).tobytes())
            for i, entry in enumerate(self.entries)
        }

    def _map(self, name: str, dtype: Any, columns: int) -> np.ndarray:
        # Copy-on-write: the file never changes, but torch expects writable memory.
        return np.memmap(self.path / name, dtype=dtype, mode="c", shape=(self.rows, columns))


def is_store(path: Path) -> bool:
    return (path / "index.json").is_file() and (path / "features.bin").is_file()


def open_store(path: str | Path) -> Store:
    """Open a store written by `carmil cohort build` as a memory map; bags are read when they are used."""
    path = Path(path)
    if not is_store(path):
        building, what = building_folder(path), "build one with `carmil cohort build`"
        if building.is_dir():
            what = f"its build was interrupted; run `carmil cohort build` again to resume ({building})"
        raise CarmilError(f"{path} is not a cohort store: {what}")
    file, again = path / "index.json", "build the store again"
    content = read_json(file, again)
    if isinstance(content, dict) and isinstance(content.get("version"), int) and content["version"] > VERSION:
        raise CarmilError(f"{path} was written by a newer carmil (store version {content['version']}): update carmil")
    index = parse_as(content, StoreIndex, f"{file} cannot be read", again)
    if not (path / "instance_labels.bin").is_file() and not all(entry.truth for entry in index.bags):
        # version 0.1 stored instance labels only if all bags had them
        index = replace(index, bags=tuple(replace(entry, truth=False) for entry in index.bags))
    store = Store(path, index)
    if len(set(store.ids)) != len(store.ids):
        raise CarmilError(f"{file} has two bags of the same name: {again}")
    sizes = {"features.bin": store.rows * store.width * ITEM_SIZE[store.dtype], "coordinates.bin": store.rows * 8}
    if any(entry.truth for entry in store.entries):
        sizes["instance_labels.bin"] = store.rows * (8 if index.truth_classes is None else len(index.truth_classes))
    if index.pictures is not None:
        sizes |= {"pictures.bin": math.prod(index.pictures), "picture_index.bin": store.rows * 4}
    for name, expected in sizes.items():
        size = (path / name).stat().st_size if (path / name).is_file() else 0
        if size != expected:
            raise CarmilError(f"{path / name} has {size:,} bytes, expected {expected:,}: {again}")
    return store


def building_folder(out: Path) -> Path:
    """Return the folder in which a store is built until it is complete."""
    return out.with_name(out.name + ".building")


def checksum(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def fingerprint_of(entries: Iterable[Entry]) -> str:
    return checksum("".join(entry.id + entry.checksum for entry in entries).encode(errors="surrogatepass"))


def convert_features(bag: Bag, source: Source, dtype: str) -> tuple[np.ndarray, float]:
    """Round finite features to `dtype`, and return them with the share of the nonzero features that became 0.

    Refuses a bag with values that become infinite, or most of which become 0. bfloat16 is returned as uint16.
    """
    features, float32 = np.ascontiguousarray(bag.features), "pack them with `carmil cohort build --dtype float32`"
    values = round_features(features, dtype)
    if dtype == "bfloat16":
        infinite, zero = (values & 0x7F80) == 0x7F80, (values & 0x7FFF) == 0
    else:
        infinite, zero = np.isinf(values), values == 0
    if infinite.any():
        largest = np.abs(features).max()
        raise CarmilError(f"{source.path}: values up to {largest:g} do not fit into {dtype}: {float32}")
    nonzero = int(np.count_nonzero(features))
    vanished = int(np.count_nonzero(zero & (features != 0))) / nonzero if nonzero else 0.0
    if vanished > REFUSED:
        raise CarmilError(
            f"{source.path}: {vanished:.0%} of the nonzero values become 0 in {dtype}, they are too small for it: {float32}"
        )
    return values, vanished


def round_features(features: np.ndarray, dtype: str) -> np.ndarray:
    """Round features to nearest, ties to even; bfloat16, the upper half of a float32, is returned as uint16."""
    if dtype == "bfloat16":
        bits = features.astype(np.float32).view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    with np.errstate(over="ignore", under="ignore"):
        return features.astype(dtype, copy=False)
