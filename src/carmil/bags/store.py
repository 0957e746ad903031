"""The cohort store: all bags of a cohort in one matrix on disk, read through a memory map.

STORE/
  index.json              what is in it: type, width, encoder, and each bag's id, rows, unit, tile size, tile geometry, encoder,
                          pooling, slide file and checksum
  features.bin            (n, d) row by row
  coordinates.bin         (n, 2) float32
  instance_labels.bin     (n) int64, or signed truth per class (n, k) int8, if any bag has them
  pictures.bin            (m, height, width, channels) uint8 images of instances, and picture_index.bin (n) int32, the image
                          of each, if the cohort has pictures
  labels.csv              if the cohort's own files know the labels

`building` makes one of a cohort's files, `packing` of bags in memory, `checking` looks for what is wrong with either.
"""

import hashlib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NotRequired

import numpy as np
from typing_extensions import TypedDict

from carmil.bags.geometry import TileGeometry, common_geometry
from carmil.bags.pictures import Pictures
from carmil.bags.slide_file import SlideFile
from carmil.bags.sources import Bag
from carmil.errors import CarmilError
from carmil.truth import UNKNOWN
from carmil.untrusted import parse_as, read_json

if TYPE_CHECKING:
    from carmil.bags.bags import Bags, Unit

Dtype = Literal["float16", "float32", "bfloat16"]
ITEM_SIZE: dict[str, int] = {"float16": 2, "bfloat16": 2, "float32": 4}
VERSION = 2  # 1 knew neither the geometry of tiles nor the encoder's pooling
OnBag = Callable[[int, int], None]  # bags done, bags in all


@dataclass(frozen=True)
class Entry:
    """One bag of a store. vanished: the share of its nonzero features that became 0 in the store's type."""

    id: str
    rows: int
    unit: "Unit | None"
    tile_size: float | None
    encoder: str | None
    truth: bool
    checksum: str
    vanished: float = 0.0
    pooling: str | None = None
    tile_pixels: int | None = None
    tile_mpp: float | None = None
    slide_bytes: int | None = None
    slide_mtime: float | None = None
    slide_width: int | None = None
    slide_height: int | None = None

    @property
    def geometry(self) -> TileGeometry:
        return TileGeometry(self.tile_pixels, self.tile_mpp)

    @property
    def slide_file(self) -> SlideFile:
        return SlideFile(self.slide_bytes, self.slide_mtime, self.slide_width, self.slide_height)


@dataclass(frozen=True)
class Store:
    """A built store. `bags()` costs nothing: features are read when they are looked at.

    truth_classes: the classes that the columns of signed instance labels are about; None where there is one label per
    instance, or none.
    picture_shape: (m, height, width, channels), None without pictures.
    """

    path: Path
    dtype: Dtype
    width: int
    encoder: str | None
    entries: tuple[Entry, ...]
    empty: tuple[str, ...]
    left_out: tuple[str, ...]
    origin: str
    fingerprint: str
    truth_classes: tuple[str, ...] | None = None
    picture_shape: tuple[int, int, int, int] | None = None

    @property
    def ids(self) -> tuple[str, ...]:
        return tuple(entry.id for entry in self.entries)

    @property
    def checksums(self) -> dict[str, str]:
        """Of the features of each bag, by its id."""
        return {entry.id: entry.checksum for entry in self.entries}

    @property
    def rows(self) -> int:
        return sum(entry.rows for entry in self.entries)

    @property
    def geometry(self) -> TileGeometry:
        """Of the tiles of all bags, as far as any bag's file recorded it."""
        return common_geometry(entry.geometry for entry in self.entries)

    @property
    def pooling(self) -> str | None:
        """How the encoder made one vector per tile, in words; None where no bag's file recorded it."""
        return next((entry.pooling for entry in self.entries if entry.pooling is not None), None)

    @property
    def labels(self) -> Path | None:
        """The table of labels that came with the cohort, if its own files knew them."""
        return self.path / "labels.csv" if (self.path / "labels.csv").is_file() else None

    def bags(self) -> "Bags":
        import torch

        from carmil.bags.bags import Bags, shared_unit

        offsets = np.cumsum([0, *(entry.rows for entry in self.entries)])
        features = self._mapped("features.bin", np.int16 if ITEM_SIZE[self.dtype] == 2 else np.int32, self.width)
        coordinates = None
        if any(entry.unit is not None for entry in self.entries):
            places = self._mapped("coordinates.bin", np.float32, 2)
            for i, entry in enumerate(self.entries):
                if entry.unit is None:
                    places[offsets[i] : offsets[i + 1]] = np.nan
            coordinates = torch.from_numpy(places)
        truth = None
        if any(entry.truth for entry in self.entries):
            columns = self.truth_classes
            kind = np.int64 if columns is None else np.int8
            known = self._mapped("instance_labels.bin", kind, 1 if columns is None else len(columns))
            for i, entry in enumerate(self.entries):
                if not entry.truth:
                    known[offsets[i] : offsets[i + 1]] = UNKNOWN
            truth = torch.from_numpy(known) if columns else torch.from_numpy(known).squeeze(-1)
        return Bags.trusted(
            features=torch.from_numpy(features).view(getattr(torch, self.dtype)),
            offsets=torch.from_numpy(offsets),
            ids=self.ids,
            instance_labels=truth,
            coordinates=coordinates,
            coordinate_unit=shared_unit([entry.unit for entry in self.entries]),
        )

    def pictures(self) -> Pictures | None:
        """What the instances look like, in the order of the rows; images are read when they are looked at."""
        if self.picture_shape is None:
            return None
        images = np.memmap(self.path / "pictures.bin", dtype=np.uint8, mode="c", shape=self.picture_shape)
        return Pictures(images, self._mapped("picture_index.bin", np.int32, 1)[:, 0])

    def bag(self, position: int) -> Bag:
        """One bag as it would come from a file; for export."""
        bags = self.bags()[position]
        entry = self.entries[position]
        features = bags.features.float() if self.dtype == "bfloat16" else bags.features
        return Bag(
            id=entry.id,
            features=features.numpy(),
            coordinates=None if bags.coordinates is None else bags.coordinates.numpy(),
            coordinate_unit=entry.unit,
            tile_size=entry.tile_size,
            encoder=entry.encoder,
            instance_labels=None if not entry.truth or bags.instance_labels is None else bags.instance_labels.numpy(),
            pooling=entry.pooling,
            geometry=entry.geometry,
            slide_file=entry.slide_file,
        )

    def checksums_in(self, dtype: Dtype) -> dict[str, str] | None:
        """Each bag's checksum as a store of that type would have it; None where this one has rounded too much to know."""
        from carmil.bags.conversion import rounded

        if dtype == self.dtype:
            return self.checksums
        if self.dtype != "float32":
            return None
        bags = self.bags()
        return {
            entry.id: checksum(rounded(bags[i].features.numpy(), dtype).tobytes())
            for i, entry in enumerate(self.entries)
        }

    def _mapped(self, name: str, dtype: Any, columns: int) -> np.ndarray:
        # Copy-on-write: nobody writes, but torch wants memory that could be written to.
        return np.memmap(self.path / name, dtype=dtype, mode="c", shape=(self.rows, columns))


class _EntryFacts(TypedDict):
    """A bag as index.json has it; see Entry."""

    id: str
    rows: int
    unit: Literal["um", "level0_px"] | None
    tile_size: float | None
    encoder: str | None
    truth: bool
    checksum: str
    vanished: NotRequired[float]
    pooling: NotRequired[str | None]
    tile_pixels: NotRequired[int | None]
    tile_mpp: NotRequired[float | None]
    slide_bytes: NotRequired[int | None]
    slide_mtime: NotRequired[float | None]
    slide_width: NotRequired[int | None]
    slide_height: NotRequired[int | None]


class _Index(TypedDict):
    """index.json."""

    version: int
    dtype: Dtype
    width: int
    encoder: str | None
    bags: list[_EntryFacts]
    empty: list[str]
    left_out: list[str]
    origin: str
    fingerprint: str
    truth_classes: NotRequired[list[str] | None]
    pictures: NotRequired[tuple[int, int, int, int] | None]


def is_store(path: Path) -> bool:
    return (path / "index.json").is_file() and (path / "features.bin").is_file()


def open_store(path: str | Path) -> Store:
    """The store that `carmil cohort build` made there, mapped into memory: bags are read as they are asked for."""
    path = Path(path)
    if not is_store(path):
        building = building_folder(path)
        more = f"; a build of it was begun and not ended: run `carmil cohort build` again ({building})"
        raise CarmilError(
            f"{path} is not a cohort store{more if building.is_dir() else ': build one with `carmil cohort build`'}"
        )
    index, again = path / "index.json", "build the store again"
    facts = read_json(index, again)
    if isinstance(facts, dict) and isinstance(facts.get("version"), int) and facts["version"] > VERSION:
        raise CarmilError(f"{path} was written by a newer carmil (store version {facts['version']}): update carmil")
    parse_as(facts, _Index, f"{index} cannot be read", again)
    if facts["version"] < 1:
        raise CarmilError(f"{index} has the store version {facts['version']}: expected 1 to {VERSION}; {again}")
    known = {field.name for field in fields(Entry)}
    if not (path / "instance_labels.bin").is_file() and not all(entry["truth"] for entry in facts["bags"]):
        for entry in facts["bags"]:  # carmil 0.1 kept instance labels only where all bags had them
            entry["truth"] = False
    store = Store(
        path=path,
        dtype=facts["dtype"],
        width=facts["width"],
        encoder=facts["encoder"],
        entries=tuple(Entry(**{name: entry[name] for name in entry if name in known}) for entry in facts["bags"]),
        empty=tuple(facts["empty"]),
        left_out=tuple(facts["left_out"]),
        origin=facts["origin"],
        fingerprint=facts["fingerprint"],
        truth_classes=None if (names := facts.get("truth_classes")) is None else tuple(names),
        picture_shape=None if (shape := facts.get("pictures")) is None else tuple(shape),
    )
    try:
        store.geometry  # noqa: B018 - its numbers are checked
    except ValueError as error:
        raise CarmilError(f"{index}: {error}: {again}") from None
    if store.truth_classes == () or min(store.picture_shape or (1,)) < 1:
        raise CarmilError(f"{index}: truth_classes or pictures is outside its range: {again}")
    if store.width < 1 or any(entry.rows < 1 for entry in store.entries) or len(set(store.ids)) != len(store.ids):
        raise CarmilError(f"{index} has a bag without rows, two of one name, or no features: {again}")
    for entry in store.entries:
        if (entry.tile_size is not None and entry.tile_size <= 0) or not 0 <= entry.vanished <= 1:
            raise CarmilError(f"{index}: tile_size or vanished of {entry.id!r} is outside its range: {again}")
    sizes = {"features.bin": store.rows * store.width * ITEM_SIZE[store.dtype], "coordinates.bin": store.rows * 8}
    if any(entry.truth for entry in store.entries):
        sizes["instance_labels.bin"] = store.rows * (8 if store.truth_classes is None else len(store.truth_classes))
    if store.picture_shape is not None:
        sizes |= {"pictures.bin": math.prod(store.picture_shape), "picture_index.bin": store.rows * 4}
    for name, expected in sizes.items():
        found = (path / name).stat().st_size if (path / name).is_file() else 0
        if found != expected:
            raise CarmilError(f"{path / name} has {found:,} bytes, expected {expected:,}: build the store again")
    return store


def building_folder(out: Path) -> Path:
    """Where a store is built before it is one."""
    return out.with_name(out.name + ".building")


def checksum(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def fingerprint_of(entries: Iterable[Entry]) -> str:
    return checksum("".join(entry.id + entry.checksum for entry in entries).encode(errors="surrogatepass"))
