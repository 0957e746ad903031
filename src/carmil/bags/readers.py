"""Bags out of the files that other tools write: CLAM, TRIDENT, STAMP, torchmil, slideflow, ACMIL, and plain arrays.

`read_bag` reads one bag that `find_bags` has found, `peek` tells its size without reading it. A bag has n instances of
d features.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from carmil.bags.arrays import (
    Contents,
    Held,
    as_features,
    as_number,
    as_text,
    dtype_when_read,
    kind_of,
    one_of,
    opened,
    owned,
    rows_and_width,
    some,
    whole_numbers,
)
from carmil.bags.geometry import UNKNOWN, TileGeometry
from carmil.bags.matrices import bag_of_matrix, header_of_matrix, is_matrix
from carmil.bags.slide_file import SlideFile
from carmil.bags.sources import READERS, Bag, Header, Source
from carmil.errors import CarmilError
from carmil.files import safe_name
from carmil.untrusted import one_line_errors

if TYPE_CHECKING:
    from carmil.bags.bags import Unit

FEATURE_NAMES = ("features", "feats", "feat", "embeddings", "patch_embeddings")
COORDINATE_NAMES = ("coords", "coordinates")
INSTANCE_LABEL_NAMES = ("instance_labels", "inst_labels", "patch_labels", "y_inst")

_UNITS: dict[str, "Unit"] = {"um": "um", "\u00b5m": "um", "\u03bcm": "um", "level0_px": "level0_px"}


def peek(source: Source) -> Header:
    """Size, type and encoder of a bag, from its file's header."""
    if source.layout in ("matrix", "matrix_npz"):
        return header_of_matrix(source)
    if source.layout in READERS:
        bag = read_bag(source)
        rows, width = bag.features.shape
        return Header(rows, width, str(bag.features.dtype), bag.encoder, bag.pooling, bag.geometry)
    with opened(source.path, source.inside if source.layout == "acmil" else "") as contents:
        held = _features_in(contents)
        rows, width = rows_and_width(held)
        made = _encoder(contents, held, source), _pooling(contents, held)
        return Header(rows, width, dtype_when_read(held), *made, _geometry(contents, source))


def read_bag(source: Source) -> Bag:
    """The whole bag, in memory."""
    if source.layout in ("matrix", "matrix_npz"):
        return bag_of_matrix(source)
    if source.layout in READERS:
        return _read_by_own(source)
    with opened(source.path, source.inside) as contents:
        held = _features_in(contents)
        features = as_features(held)
        place = _place(contents, source, len(features))
        labels = _instance_labels(contents, source, len(features))
        made = _pooling(contents, held), _geometry(contents, source), _slide_file(contents)
        return Bag(source.id, features, *place, _encoder(contents, held, source), labels, *made)


def _read_by_own(source: Source) -> Bag:
    """What a registered reader gives, if it is a bag."""
    with one_line_errors(source.path):
        bag = READERS[source.layout].read(source.id, source.path)
    features = bag.features
    if features.ndim != 2 or features.dtype not in (np.float16, np.float32):
        raise CarmilError(
            f"{source.path}: the reader of {source.layout} gave {features.dtype} of shape {features.shape}: "
            "expected float16 or float32 (instances, features)"
        )
    return bag


def written_by_stamp(contents: Contents) -> bool:
    """Whether STAMP wrote the file."""
    marks = ("stamp_version", "extractor", "feat_type")
    return kind_of(contents.path) == "h5" and any(contents.told(mark) is not None for mark in marks)


def _features_in(contents: Contents) -> Held:
    if is_matrix(contents):
        raise CarmilError(f"{contents.path} holds a whole cohort, not one bag: give the path of this file alone")
    names = (*FEATURE_NAMES, "arr_0", "X", "") if kind_of(contents.path) != "h5" else FEATURE_NAMES
    name = next((name for name in names if name in contents.names), None)
    if name is None:
        raise CarmilError(
            f"{contents.path} has no features: expected one of {', '.join(FEATURE_NAMES)}, found {some(contents.names)}"
        )
    return contents.get(name)


def _place(contents: Contents, source: Source, rows: int) -> "tuple[np.ndarray | None, Unit | None, float | None]":
    """Coordinates, their unit, and the edge of a tile in that unit."""
    companions = dict(source.companions)
    patches = companions.get("patches")
    name = next((name for name in COORDINATE_NAMES if name in contents.names), None)
    if "coords" in companions:
        return _coordinates_of_file(companions["coords"], rows), "level0_px", None
    if name is None:
        return (_coordinates_of_file(patches, rows), "level0_px", _clam_tile_size(patches)) if patches else (None,) * 3
    held = contents.get(name)
    coordinates = _coordinates(held, rows)
    if written_by_stamp(contents):
        return _stamp_place(contents, coordinates)
    unit = _unit(contents, contents.told("coordinate_unit") or contents.told("unit") or held.told("unit"))
    told = held.told("patch_size_level0")
    size = as_number(contents.told("tile_size") if told is None else told, f"{contents.path}: the size of a tile")
    return coordinates, unit, size or (_clam_tile_size(patches) if patches else None)


def _coordinates(held: Held, rows: int) -> np.ndarray:
    shape = held.shape[1:] if len(held.shape) == 3 and held.shape[0] == 1 else held.shape
    if rows == 0 and 0 in shape:
        return np.empty((0, 2), np.float32)
    if shape != (rows, 2):
        raise CarmilError(
            f"{held.where} has the shape {held.shape}: expected ({rows}, 2), an x and y for each instance"
        )
    if not re.fullmatch(r"[<>=|]?(u?int\d+|float\d+|[iuf]\d)", held.dtype):
        raise CarmilError(f"{held.where} holds {held.dtype}: expected numbers")
    return owned(held.read().reshape(shape), "float32")


def _coordinates_of_file(path: Path, rows: int) -> np.ndarray:
    with opened(path) as contents:
        return _coordinates(one_of(contents, (*COORDINATE_NAMES, "arr_0", "")), rows)


def _clam_tile_size(patches: Path) -> float | None:
    """CLAM's features say nothing of the tile; the file of patches does, in pixels of the level it was cut at."""
    with opened(patches) as contents:
        told = one_of(contents, COORDINATE_NAMES).told
        whole = as_number(told("patch_size_level0"), f"{patches}: patch_size_level0")
        size = as_number(told("patch_size"), f"{patches}: patch_size")
        downsample = as_number(told("downsample"), f"{patches}: downsample")
    if whole is None and size is not None and downsample is not None:
        return size * downsample
    return whole


def _unit(contents: Contents, told: object) -> "Unit":
    name = as_text(told)
    if name is None:
        return "level0_px"  # what every tool but STAMP writes, and none of them says
    if name not in _UNITS:
        raise CarmilError(f"{contents.path} has coordinates in {name!r}: expected 'um' or 'level0_px'")
    return _UNITS[name]


def _stamp_place(contents: Contents, coordinates: np.ndarray) -> "tuple[np.ndarray, Unit, float | None]":
    told, where = contents.told, f"{contents.path}: the size of a tile"
    if (kind := as_text(told("feat_type")) or "tile") != "tile":
        raise CarmilError(f"{contents.path} holds STAMP features of a whole {kind}: expected those of its tiles")
    if told("unit") is None:
        if len(coordinates) and _stride(coordinates) != 224:
            raise CarmilError(
                f"{contents.path} is an old STAMP file without a unit: its tiles are {_stride(coordinates)} apart where "
                "224 was expected; extract it again with a newer STAMP"
            )
        return coordinates * np.float32(256 / 224), "um", 256.0  # as STAMP itself takes these files
    if (unit := _unit(contents, told("unit"))) != "um":
        raise CarmilError(f"{contents.path} is by STAMP with coordinates in {unit!r}: expected 'um'")
    size = told("tile_size_um")
    return coordinates, unit, as_number(told("tile_size") if size is None else size, where)


def _stride(coordinates: np.ndarray) -> int:
    steps = [np.diff(np.unique(axis)) for axis in coordinates.T]
    return round(min((float(step.min()) for step in steps if len(step)), default=224))


def _instance_labels(contents: Contents, source: Source, rows: int) -> np.ndarray | None:
    beside = dict(source.companions).get("instance_labels")
    if beside is not None:
        with opened(beside) as labels:
            return whole_numbers(one_of(labels, (*INSTANCE_LABEL_NAMES, "labels", "arr_0", "")), rows)
    name = next((name for name in INSTANCE_LABEL_NAMES if name in contents.names), None)
    return None if name is None else whole_numbers(contents.get(name), rows)


def _encoder(contents: Contents, held: Held, source: Source) -> str | None:
    if source.layout == "trident" and source.path.parent.name.startswith("features_"):
        name, words = source.path.parent.name.removeprefix("features_"), as_text(held.told("encoder"))
        if words is not None and safe_name(words) == name:
            return words  # a folder cannot have every name
        return None if name == "unknown" else name
    if (config := dict(source.companions).get("config")) is not None:
        return _slideflow_encoder(config)
    for told in (held.told, contents.told):
        for attribute in ("encoder", "extractor"):
            if (words := as_text(told(attribute))) is not None:
                return words
    return None


def _pooling(contents: Contents, held: Held) -> str | None:
    return as_text(held.told("pooling")) or as_text(contents.told("pooling"))


def _slide_file(contents: Contents) -> SlideFile:
    """What files of carmil record of the slide; TRIDENT's coordinates have its width and height."""
    coords = next((contents.get(name) for name in COORDINATE_NAMES if name in contents.names), None)

    def number(name: str, theirs: str = "") -> float | None:
        told = contents.told(name)
        if told is None and theirs and coords is not None:
            told = coords.told(theirs)
        return as_number(told, f"{contents.path}: {name}")

    numbers = number("slide_bytes"), number("slide_width", "level0_width"), number("slide_height", "level0_height")
    size, width, height = (None if value is None else round(value) for value in numbers)
    return SlideFile(size, number("slide_mtime"), width, height)


def _geometry(contents: Contents, source: Source) -> TileGeometry:
    """What the file, its coordinates and the files beside it record, the nearest first."""
    companions = dict(source.companions)
    if written_by_stamp(contents) and contents.told("unit") is None:
        return TileGeometry(224, 256 / 224)  # as STAMP itself takes these files
    found = UNKNOWN
    if (name := next((name for name in COORDINATE_NAMES if name in contents.names), None)) is not None:
        found = _recorded_geometry(contents.get(name).told, contents.path)
    found = found.completed_by(_recorded_geometry(contents.told, contents.path))
    if (config := companions.get("config")) is not None:
        found = found.completed_by(_slideflow_geometry(config))
    if (patches := companions.get("patches")) is not None and not found.known:
        with opened(patches) as beside:
            found = found.completed_by(_recorded_geometry(one_of(beside, COORDINATE_NAMES).told, patches))
    return found


def _recorded_geometry(told: Callable[[str], object], path: Path) -> TileGeometry:
    """Of attributes: tile_pixels and tile_mpp are ours, patch_size and target_magnification TRIDENT's (CLAM has the first),
    tile_size_px and tile_size_um STAMP's. A magnification of 10 is one micrometre per pixel.
    """

    def number(name: str) -> float | None:
        return as_number(told(name), f"{path}: {name}")

    pixels = number("tile_pixels") or number("tile_size_px") or number("patch_size")
    mpp = number("tile_mpp")
    if mpp is None and (magnification := number("target_magnification")) is not None:
        mpp = 10 / magnification
    if mpp is None and pixels is not None and (side := number("tile_size_um")) is not None:
        mpp = side / pixels
    return TileGeometry(None if pixels is None else round(pixels), mpp)


def _slideflow_geometry(config: Path) -> TileGeometry:
    """Of tile_px and tile_um, which may be a magnification such as 20x."""
    with one_line_errors(config):
        told = json.loads(config.read_text(encoding="utf-8")) or {}
        pixels = as_number(told.get("tile_px"), f"{config}: tile_px")
        words = as_text(told.get("tile_um")) or ""
        mpp = None
        if words.lower().endswith("x"):
            mpp = 10 / float(words[:-1])
        elif words and pixels is not None:
            mpp = float(words) / pixels
        return TileGeometry(None if pixels is None else round(pixels), mpp)


def _slideflow_encoder(config: Path) -> str | None:
    with one_line_errors(config):
        extractor = (json.loads(config.read_text(encoding="utf-8")) or {}).get("extractor") or {}
        name = as_text(extractor.get("class"))
    return None if name is None else name.rsplit(".", 1)[-1]
