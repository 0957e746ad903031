"""Read bags from the files of other tools: CLAM, TRIDENT, STAMP, torchmil, slideflow, ACMIL, and plain arrays.

`read_bag` reads one of the bags that `find_bags` lists; `read_header` reads its header only. A bag has n instances of
d features.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from carmil.array_files import (
    ArrayFile,
    StoredArray,
    as_number,
    as_text,
    feature_layout,
    in_memory,
    kind_of,
    open_arrays,
    read_features,
    read_instance_labels,
)
from carmil.bags.geometry import UNKNOWN, TileGeometry, Unit
from carmil.bags.matrices import is_matrix, read_matrix_bag, read_matrix_header
from carmil.bags.sources import READERS, Bag, BagHeader, SlideFile, Source
from carmil.errors import CarmilError
from carmil.files import safe_name
from carmil.untrusted import one_line_errors, read_json
from carmil.words import examples

FEATURE_NAMES = ("features", "feats", "feat", "embeddings", "patch_embeddings")
COORDINATE_NAMES = ("coords", "coordinates")
INSTANCE_LABEL_NAMES = ("instance_labels", "inst_labels", "patch_labels", "y_inst")

_UNITS: dict[str, Unit] = {"um": "um", "\u00b5m": "um", "\u03bcm": "um", "level0_px": "level0_px"}
_Place = tuple[
    np.ndarray | None, Unit | None, float | None
]  # coordinates, their unit, and the side of a tile in this unit


def read_header(source: Source) -> BagHeader:
    """Read the size, type, encoder and tile geometry of a bag without reading its features."""
    if source.layout.startswith("matrix"):
        return read_matrix_header(source)
    if source.layout in READERS:
        return BagHeader.of(_read_registered(source))
    with open_arrays(source.path, source.key) as file:
        bag = _BagFile.open(file, source)
        layout = feature_layout(bag.features)
        return BagHeader(*layout, bag.encoder(), bag.recorded("pooling"), bag.geometry())


def read_bag(source: Source) -> Bag:
    """Read a whole bag into memory."""
    if source.layout.startswith("matrix"):
        return read_matrix_bag(source)
    if source.layout in READERS:
        return _read_registered(source)
    with open_arrays(source.path, source.key) as file:
        bag = _BagFile.open(file, source)
        features = read_features(bag.features)
        place, labels = bag.place(len(features)), bag.instance_labels(len(features))
        encoder, pooling, tiling = bag.encoder(), bag.recorded("pooling"), bag.recorded("tiling")
        return Bag(source.id, features, *place, encoder, labels, pooling, bag.geometry(), bag.slide_file(), tiling)


def _read_registered(source: Source) -> Bag:
    """Return the bag from a registered reader, and refuse anything that is not a bag."""
    with one_line_errors(source.path):
        bag = READERS[source.layout].read(source.id, source.path)
    features = bag.features
    if features.ndim != 2 or features.dtype not in (np.float16, np.float32):
        raise CarmilError(
            f"{source.path}: the reader of {source.layout} returned {features.dtype} of shape {features.shape}: "
            "expected float16 or float32 (instances, features)"
        )
    return bag


def written_by_stamp(file: ArrayFile) -> bool:
    """Return whether STAMP wrote the file."""
    marks = ("stamp_version", "extractor", "feat_type")
    return kind_of(file.path) == "h5" and any(file.attribute(mark) is not None for mark in marks)


@dataclass(frozen=True)
class _BagFile:
    """The open file of one bag."""

    file: ArrayFile
    source: Source
    features: StoredArray
    coordinates: StoredArray | None
    companions: dict[str, Path]

    @classmethod
    def open(cls, file: ArrayFile, source: Source) -> "_BagFile":
        if is_matrix(file):
            raise CarmilError(f"{file.path} holds a whole cohort, not one bag: give the path of this file alone")
        names = FEATURE_NAMES if kind_of(file.path) == "h5" else (*FEATURE_NAMES, "arr_0", "X", "")
        if (features := file.find(names)) is None:
            expected = ", ".join(FEATURE_NAMES)
            raise CarmilError(
                f"{file.path} has no features: expected one of {expected}, found {examples(file.names, 6)}"
            )
        return cls(file, source, features, file.find(COORDINATE_NAMES), dict(source.companions))

    def place(self, rows: int) -> _Place:
        """Return the coordinates, their unit, and the side of a tile in that unit."""
        if (coords := self.companions.get("coords")) is not None:
            return _read_coordinates(coords, rows), "level0_px", None
        patches = self.companions.get("patches")
        tile_size = None if patches is None else _clam_tile_size(patches)
        if self.coordinates is None:
            return (None, None, None) if patches is None else (_read_coordinates(patches, rows), "level0_px", tile_size)
        attribute, coordinates = self.file.attribute, _as_coordinates(self.coordinates, rows)
        if written_by_stamp(self.file):
            return self._stamp_place(coordinates)
        unit = attribute("coordinate_unit") or attribute("unit") or self.coordinates.attribute("unit")
        side = self.coordinates.attribute("patch_size_level0")
        side = as_number(attribute("tile_size") if side is None else side, f"{self.file.path}: the size of a tile")
        return coordinates, self._unit(unit), side or tile_size

    def _unit(self, recorded: object) -> Unit:
        name = as_text(recorded)
        if name is None:
            return "level0_px"  # the unit of every tool except STAMP; none of these tools records it
        if name not in _UNITS:
            raise CarmilError(f"{self.file.path} has coordinates in {name!r}: expected 'um' or 'level0_px'")
        return _UNITS[name]

    def _stamp_place(self, coordinates: np.ndarray) -> _Place:
        path, attribute = self.file.path, self.file.attribute
        if (kind := as_text(attribute("feat_type")) or "tile") != "tile":
            raise CarmilError(f"{path} holds STAMP features of a whole {kind}: expected tile features")
        if attribute("unit") is None:
            if len(coordinates) and (stride := _stride(coordinates)) != 224:
                raise CarmilError(
                    f"{path} is an old STAMP file without a unit: its tiles are {stride} apart, expected 224; "
                    "extract it again with a newer STAMP"
                )
            return coordinates * np.float32(256 / 224), "um", 256.0  # as STAMP reads these files
        if (unit := self._unit(attribute("unit"))) != "um":
            raise CarmilError(f"{path} was written by STAMP with coordinates in {unit!r}: expected 'um'")
        side = attribute("tile_size_um")
        return coordinates, unit, as_number(attribute("tile_size") if side is None else side, f"{path}: tile_size")

    def instance_labels(self, rows: int) -> np.ndarray | None:
        if (path := self.companions.get("instance_labels")) is not None:
            with open_arrays(path) as file:
                return read_instance_labels(file.one_of((*INSTANCE_LABEL_NAMES, "labels", "arr_0", "")), rows)
        labels = self.file.find(INSTANCE_LABEL_NAMES)
        return None if labels is None else read_instance_labels(labels, rows)

    def encoder(self) -> str | None:
        folder = self.source.path.parent.name
        if self.source.layout == "trident" and folder.startswith("features_"):
            name, recorded = folder.removeprefix("features_"), as_text(self.features.attribute("encoder"))
            if recorded is not None and safe_name(recorded) == name:
                return recorded  # not every id is a valid folder name
            return None if name == "unknown" else name
        if (config := self.companions.get("config")) is not None:
            return _slideflow_config(config)[0]
        owners = (self.features.attribute, self.file.attribute)
        names = (as_text(attribute(name)) for attribute in owners for name in ("encoder", "extractor"))
        return next((name for name in names if name is not None), None)

    def recorded(self, name: str) -> str | None:
        """Return a text that only carmil's files record, such as pooling or tiling."""
        return as_text(self.features.attribute(name)) or as_text(self.file.attribute(name))

    def geometry(self) -> TileGeometry:
        """Return the geometry recorded by the coordinates, the file, or the files beside it, in this order of precedence."""
        if written_by_stamp(self.file) and self.file.attribute("unit") is None:
            return TileGeometry(224, 256 / 224)  # as STAMP reads these files
        recorded = UNKNOWN
        if self.coordinates is not None:
            recorded = _recorded_geometry(self.coordinates.attribute, self.file.path)
        recorded = recorded.filled_from(_recorded_geometry(self.file.attribute, self.file.path))
        if (config := self.companions.get("config")) is not None:
            recorded = recorded.filled_from(_slideflow_config(config)[1])
        if (patches := self.companions.get("patches")) is not None and not recorded.known:
            with open_arrays(patches) as file:
                attribute = file.one_of(COORDINATE_NAMES).attribute
                recorded = recorded.filled_from(_recorded_geometry(attribute, patches))
        return recorded

    def slide_file(self) -> SlideFile:
        """Return the slide's properties that carmil's files record; TRIDENT's coordinates record width and height."""

        def number(name: str, trident: str = "") -> float | None:
            value = self.file.attribute(name)
            if value is None and trident and self.coordinates is not None:
                value = self.coordinates.attribute(trident)
            return as_number(value, f"{self.file.path}: {name}")

        numbers = number("slide_bytes"), number("slide_width", "level0_width"), number("slide_height", "level0_height")
        size, width, height = (None if value is None else round(value) for value in numbers)
        return SlideFile(size, number("slide_mtime"), width, height)


def _read_coordinates(path: Path, rows: int) -> np.ndarray:
    with open_arrays(path) as file:
        return _as_coordinates(file.one_of((*COORDINATE_NAMES, "arr_0", "")), rows)


def _as_coordinates(array: StoredArray, rows: int) -> np.ndarray:
    shape = array.shape[1:] if len(array.shape) == 3 and array.shape[0] == 1 else array.shape
    if rows == 0 and 0 in shape:
        return np.empty((0, 2), np.float32)
    if shape != (rows, 2):
        raise CarmilError(
            f"{array.where} has the shape {array.shape}: expected ({rows}, 2), an x and y for each instance"
        )
    if not re.fullmatch(r"[<>=|]?(u?int\d+|float\d+|[iuf]\d)", array.dtype):
        raise CarmilError(f"{array.where} holds {array.dtype}: expected numbers")
    return in_memory(array.read().reshape(shape), "float32")


def _stride(coordinates: np.ndarray) -> int:
    steps = [np.diff(np.unique(axis)) for axis in coordinates.T]
    return round(min((float(step.min()) for step in steps if len(step)), default=224))


def _clam_tile_size(patches: Path) -> float | None:
    """Return the side of a tile in level-0 pixels; CLAM records it in the file of patches, in pixels of the level
    where they were cut.
    """
    with open_arrays(patches) as file:
        attribute = file.one_of(COORDINATE_NAMES).attribute
        names = ("patch_size_level0", "patch_size", "downsample")
        level0, size, downsample = (as_number(attribute(name), f"{patches}: {name}") for name in names)
    return size * downsample if level0 is None and size is not None and downsample is not None else level0


def _recorded_geometry(attribute: Callable[[str], Any], path: Path) -> TileGeometry:
    """Read the geometry from the attributes of carmil, TRIDENT and STAMP.

    carmil writes tile_pixels and tile_mpp, TRIDENT patch_size (as CLAM does) and target_magnification, STAMP
    tile_size_px and tile_size_um. A magnification of 10 is one micrometre per pixel.
    """

    def number(name: str) -> float | None:
        return as_number(attribute(name), f"{path}: {name}")

    pixels = number("tile_pixels") or number("tile_size_px") or number("patch_size")
    mpp = number("tile_mpp")
    if mpp is None and (magnification := number("target_magnification")) is not None:
        mpp = 10 / magnification
    if mpp is None and pixels is not None and (side := number("tile_size_um")) is not None:
        mpp = side / pixels
    return TileGeometry(None if pixels is None else round(pixels), mpp)


def _slideflow_config(path: Path) -> tuple[str | None, TileGeometry]:
    """Read the encoder and the geometry from bags_config.json; tile_um may be a magnification such as 20x."""
    with one_line_errors(path):
        config = read_json(path) or {}
        encoder = as_text((config.get("extractor") or {}).get("class"))
        pixels = as_number(config.get("tile_px"), f"{path}: tile_px")
        side, mpp = as_text(config.get("tile_um")) or "", None
        if side.lower().endswith("x"):
            mpp = 10 / float(side[:-1])
        elif side and pixels is not None:
            mpp = float(side) / pixels
        return encoder and encoder.rsplit(".", 1)[-1], TileGeometry(None if pixels is None else round(pixels), mpp)
