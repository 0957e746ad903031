"""Bags out of the files that other tools write: CLAM, TRIDENT, STAMP, torchmil, slideflow, ACMIL, and plain arrays.

`find_bags` looks which layout a folder or file has and where its bags are; `read_bag` reads one of them, `peek` tells
its size without reading it. A bag has n instances of d features.
"""

import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from carmil.bags.layouts import KINDS, Contents, Held, as_number, as_text, groups_of, kind_of, one_line_errors, opened
from carmil.errors import CarmilError

if TYPE_CHECKING:
    from carmil.bags.bags import Unit

FEATURE_NAMES = ("features", "feats", "feat", "embeddings", "patch_embeddings")
COORDINATE_NAMES = ("coords", "coordinates")
INSTANCE_LABEL_NAMES = ("instance_labels", "inst_labels", "patch_labels", "y_inst")
BAG_COLUMNS = ("bag", "bag_name", "slide_id", "slide", "patient_id", "case_id")

_DEEPEST = 4  # folders below the given one in which features are looked for
_UNITS: dict[str, "Unit"] = {"um": "um", "\u00b5m": "um", "\u03bcm": "um", "level0_px": "level0_px"}


@dataclass(frozen=True, eq=False)
class Bag:
    """One slide as it was found.

    features        (n, d) float16 or float32; nobody has looked yet whether they are finite
    coordinates     (n, 2) float32, or None; `coordinate_unit` says in what, `tile_size` is a tile's edge in the same unit
    instance_labels (n) int64, or None
    """

    id: str
    features: np.ndarray
    coordinates: np.ndarray | None = None
    coordinate_unit: "Unit | None" = None
    tile_size: float | None = None
    encoder: str | None = None
    instance_labels: np.ndarray | None = None


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


@dataclass(frozen=True)
class Found:
    """The bags of a folder or file, sorted by id, and in plain sentences what was guessed or left aside."""

    sources: tuple[Source, ...]
    layout: str
    said: tuple[str, ...]


def find_bags(path: Path, *, truth: str | None = None) -> Found:
    """Looks what layout `path` has, and where its bags are.

    truth: the column of instances.csv, or the array of the npz, that holds the truth about each instance.
    """
    path = Path(os.path.abspath(path))
    with one_line_errors(path):
        if not path.exists():
            raise CarmilError(f"{path} does not exist: expected a folder or a file of features")
        found = _find_in(path, truth) if path.is_dir() else _in_file(path, truth)
    if found is None:
        raise CarmilError(
            f"{path} holds no features: expected one file a slide ({', '.join(KINDS)}), or a folder as CLAM, TRIDENT, "
            "STAMP, torchmil or slideflow write it"
        )
    if truth is not None and not found.layout.startswith("matrix"):
        raise CarmilError(
            f"{path} has the layout {found.layout!r}, and {truth!r} names the truth in a matrix with instances.csv: "
            "leave it out"
        )
    _check_ids(path, found.sources)
    return replace(found, sources=tuple(sorted(found.sources, key=lambda source: source.id)))


def peek(source: Source) -> Header:
    """Size, type and encoder of a bag, from its file's header."""
    if source.layout == "matrix_npz":
        matrix = _npz_matrix(source.path, _column(source, "truth"), *_stamp(source.path))
        return Header(len(matrix.table.rows_of(source)), matrix.features.shape[1], str(matrix.features.dtype), None)
    with opened(source.path, source.inside if source.layout == "acmil" else "") as contents:
        held = _features_in(contents)
        rows, width = _rows_and_width(held)
        if source.layout == "matrix":
            rows = len(_table_of(source).rows_of(source))
        return Header(rows, width, _dtype_when_read(held), _encoder(contents, held, source))


def read_bag(source: Source) -> Bag:
    """The whole bag, in memory."""
    if source.layout in ("matrix", "matrix_npz"):
        return _bag_of_matrix(source)
    with opened(source.path, source.inside) as contents:
        held = _features_in(contents)
        features = _features(held)
        place = _place(contents, source, len(features))
        labels = _instance_labels(contents, source, len(features))
        return Bag(source.id, features, *place, _encoder(contents, held, source), labels)


def _features_in(contents: Contents) -> Held:
    if _is_matrix(contents):
        raise CarmilError(f"{contents.path} holds a whole cohort, not one bag: give the path of this file alone")
    names = (*FEATURE_NAMES, "arr_0", "X", "") if kind_of(contents.path) != "h5" else FEATURE_NAMES
    name = next((name for name in names if name in contents.names), None)
    if name is None:
        raise CarmilError(
            f"{contents.path} has no features: expected one of {', '.join(FEATURE_NAMES)}, found {_some(contents.names)}"
        )
    return contents.get(name)


def _rows_and_width(held: Held) -> tuple[int, int]:
    shape = held.shape[1:] if len(held.shape) == 3 and held.shape[0] == 1 else held.shape
    if len(shape) == 1:
        raise CarmilError(
            f"{held.where} has the shape {held.shape}, one vector for a whole slide: expected one row a tile, "
            "(instances, features)"
        )
    if len(shape) != 2 or shape[1] == 0:
        raise CarmilError(f"{held.where} has the shape {held.shape}: expected (instances, features)")
    return shape[0], shape[1]


def _dtype_when_read(held: Held) -> str:
    name = held.dtype.lstrip("<>=|").replace("f2", "float16").replace("f4", "float32").replace("f8", "float64")
    if name not in ("float16", "float32", "float64", "bfloat16"):
        if name == "object" and kind_of(Path(held.where.split(": ")[0])) != "h5":
            held.read()  # refuses, and says how to convert
        raise CarmilError(f"{held.where} holds {held.dtype}: expected float16 or float32 features")
    return "float16" if name == "float16" else "float32"


def _features(held: Held) -> np.ndarray:
    shape, dtype = _rows_and_width(held), _dtype_when_read(held)
    values = held.read()
    with np.errstate(over="ignore"):
        return _owned(values if values.shape == shape else values.reshape(shape), dtype)


def _owned(values: np.ndarray, dtype: str) -> np.ndarray:
    """In memory of its own, row after row, in this machine's byte order: nothing stays mapped or open."""
    return np.array(values, dtype=dtype, order="C", copy=None if values.flags.owndata else True)


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
    if _by_stamp(contents):
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
    return _owned(held.read().reshape(shape), "float32")


def _coordinates_of_file(path: Path, rows: int) -> np.ndarray:
    with opened(path) as contents:
        return _coordinates(_one_of(contents, (*COORDINATE_NAMES, "arr_0", "")), rows)


def _one_of(contents: Contents, names: Iterable[str]) -> Held:
    name = next((name for name in names if name in contents.names), None)
    if name is None:
        raise CarmilError(f"{contents.path} has no {next(iter(names))}: found {_some(contents.names)}")
    return contents.get(name)


def _clam_tile_size(patches: Path) -> float | None:
    """CLAM's features say nothing of the tile; the file of patches does, in pixels of the level it was cut at."""
    with opened(patches) as contents:
        told = _one_of(contents, COORDINATE_NAMES).told
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


def _by_stamp(contents: Contents) -> bool:
    marks = ("stamp_version", "extractor", "feat_type")
    return kind_of(contents.path) == "h5" and any(contents.told(mark) is not None for mark in marks)


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
            return _whole_numbers(_one_of(labels, (*INSTANCE_LABEL_NAMES, "labels", "arr_0", "")), rows)
    name = next((name for name in INSTANCE_LABEL_NAMES if name in contents.names), None)
    return None if name is None else _whole_numbers(contents.get(name), rows)


def _whole_numbers(held: Held, rows: int) -> np.ndarray:
    if held.shape not in ((rows,), (rows, 1), (1, rows)):
        raise CarmilError(f"{held.where} has the shape {held.shape}: expected ({rows},), one whole number each")
    return _as_labels(held.read().reshape(rows), held.where)


def _as_labels(values: np.ndarray, where: str) -> np.ndarray:
    if values.dtype.kind not in "biuf":
        raise CarmilError(f"{where} holds {values.dtype}: expected whole numbers as labels")
    if values.dtype.kind == "f" and not (np.isfinite(values) & (values == np.floor(values))).all():
        raise CarmilError(f"{where} holds fractions or NaN: expected whole numbers as labels")
    return _owned(values, "int64")


def _encoder(contents: Contents, held: Held, source: Source) -> str | None:
    if source.layout == "trident" and source.path.parent.name.startswith("features_"):
        name = source.path.parent.name.removeprefix("features_")
        return None if name == "unknown" else name
    if (config := dict(source.companions).get("config")) is not None:
        return _slideflow_encoder(config)
    for told in (held.told, contents.told):
        for attribute in ("encoder", "extractor"):
            if (words := as_text(told(attribute))) is not None:
                return words
    return None


def _slideflow_encoder(config: Path) -> str | None:
    with one_line_errors(config):
        extractor = (json.loads(config.read_text(encoding="utf-8")) or {}).get("extractor") or {}
        name = as_text(extractor.get("class"))
    return None if name is None else name.rsplit(".", 1)[-1]


@dataclass(frozen=True, eq=False)
class _Table:
    """Which rows belong to which bag, and what is known of each instance."""

    path: Path
    rows: dict[str, np.ndarray]
    length: int
    truth: np.ndarray | None = None

    def rows_of(self, source: Source) -> np.ndarray:
        if source.inside not in self.rows:
            raise CarmilError(f"{self.path} has no bag {source.inside!r} any more: look for its bags again")
        return self.rows[source.inside]


@dataclass(frozen=True, eq=False)
class _NpzMatrix:
    features: np.ndarray
    table: _Table
    labels: dict[str, str]


def _bag_of_matrix(source: Source) -> Bag:
    if source.layout == "matrix":
        table = _table_of(source)
        rows = table.rows_of(source)
        features = _rows_of_matrix(source.path, table, rows)
    else:
        matrix = _npz_matrix(source.path, _column(source, "truth"), *_stamp(source.path))
        table = matrix.table
        rows = table.rows_of(source)
        features = matrix.features[rows]
    return Bag(source.id, features, instance_labels=None if table.truth is None else table.truth[rows])


def _rows_of_matrix(path: Path, table: _Table, rows: np.ndarray) -> np.ndarray:
    with opened(path) as contents:
        held = _features_in(contents)
        length, width = _rows_and_width(held)
        dtype = _dtype_when_read(held)
        _one_line_a_row(path, length, table)
        with np.errstate(over="ignore"):
            return _owned(held.read().reshape(length, width)[rows], dtype)


def _is_matrix(contents: Contents) -> bool:
    names = set(contents.names)
    return kind_of(contents.path) == "npz" and bool(names & {"bag", "bags"} and names & {"X", "features"})


def _one_line_a_row(path: Path, rows: int, table: _Table) -> None:
    if rows != table.length:
        raise CarmilError(f"{path} has {rows:,} rows and {table.path.name} {table.length:,}: expected one line a row")


def _table_of(source: Source) -> _Table:
    csv = next(path for role, path in source.companions if role.startswith("bag:"))
    bag, truth = _column(source, "bag"), _column(source, "truth")
    assert bag is not None
    return _table(csv, bag, truth, *_stamp(csv))


def _column(source: Source, role: str) -> str | None:
    return next((name.removeprefix(f"{role}:") for name, _ in source.companions if name.startswith(f"{role}:")), None)


def _stamp(path: Path) -> tuple[int, int]:
    """Changes when the file does."""
    with one_line_errors(path):
        stat = path.stat()
        return stat.st_mtime_ns, stat.st_size


@lru_cache(maxsize=4)
def _table(csv: Path, bag: str, truth: str | None, mtime: int, size: int) -> _Table:
    """instances.csv, read once a process and version of the file."""
    columns = _columns(csv)
    for column in (bag, truth):
        if column is not None and column not in columns:
            raise CarmilError(f"{csv} has no column {column!r}: found {_some(columns)}")
    names = columns[bag]
    if (empty := int((names == "").sum())) > 0:
        raise CarmilError(f"{csv} has {empty:,} lines without a {bag}: fill them in or leave those rows out")
    known = None if truth is None else _truth_column(columns[truth], f"{csv}: {truth}")
    return _Table(csv, _rows_by_bag(names), len(names), known)


def _columns(csv: Path) -> dict[str, np.ndarray]:
    """Every column as words: 007 stays 007."""
    import pandas as pd

    with one_line_errors(csv):
        frame = pd.read_csv(csv, dtype=str, keep_default_na=False)
        return {str(name): frame[name].to_numpy(dtype=object) for name in frame}


def _truth_column(words: np.ndarray, where: str) -> np.ndarray:
    numbers = {}
    for word in set(words):
        try:
            numbers[word] = {"true": 1.0, "false": 0.0}.get(word.lower()) if word.isalpha() else float(word)
        except ValueError:
            numbers[word] = None
        if numbers[word] is None:
            raise CarmilError(f"{where} holds {word!r}: expected whole numbers, 1 where the instance is positive")
    return _as_labels(np.array([numbers[word] for word in words], dtype=np.float64), where)


def _rows_by_bag(names: np.ndarray) -> dict[str, np.ndarray]:
    ids, bag_of_row = np.unique(names.astype(str), return_inverse=True)
    order = np.argsort(bag_of_row, kind="stable")
    ends = np.cumsum(np.bincount(bag_of_row, minlength=len(ids)))
    return {str(name): rows for name, rows in zip(ids, np.split(order, ends[:-1]), strict=True)}


@lru_cache(maxsize=2)
def _npz_matrix(path: Path, truth: str | None, mtime: int, size: int) -> _NpzMatrix:
    """An npz cannot be mapped: it is read once a process and version of the file."""
    with opened(path) as contents:
        features = _features(_one_of(contents, ("X", "features")))
        names = _one_of(contents, ("bag", "bags"))
        if names.shape != (len(features),) or not re.fullmatch(r"(u?int\d+|[<>|=]?U\d+)", names.dtype):
            raise CarmilError(
                f"{names.where} is {names.dtype} of shape {names.shape}: expected the bag's number or name for each of "
                f"{len(features):,} instances"
            )
        bags = names.read()
        known = None if truth is None else _whole_numbers(_one_of(contents, (truth,)), len(features))
        labels = next((name for name in ("y_bag", "labels") if name in contents.names), None)
        label_of = {} if labels is None else _npz_labels(contents.get(labels), bags)
    return _NpzMatrix(features, _Table(path, _rows_by_bag(bags), len(bags), known), label_of)


def _npz_labels(held: Held, bags: np.ndarray) -> dict[str, str]:
    """Label i is bag number i's; of bags that are no numbers from 0, the i-th in a row both sorted and as they come."""
    ids, first = np.unique(bags, return_index=True)
    if held.shape != (len(ids),):
        raise CarmilError(f"{held.where} has the shape {held.shape}: expected ({len(ids)},), a label for each bag")
    counted = bags.dtype.kind in "iu" and np.array_equal(ids, np.arange(len(ids)))
    if not counted and (np.diff(first) < 0).any():
        raise CarmilError(f"{held.where} has labels, but the bags are neither numbered from 0 nor in order: sort them")
    return {str(name): as_text(label) or "" for name, label in zip(ids, held.read(), strict=True)}


def _find_in(folder: Path, truth: str | None, depth: int = 0, seen: frozenset[str] = frozenset()) -> Found | None:
    files, folders = _listed(folder)
    if folder.name.startswith("slide_features_"):
        raise _slide_level(folder)
    if "features.npy" in files and "instances.csv" in files:
        return _in_matrix(files["features.npy"], files["instances.csv"], truth)
    if "bags_config.json" in files or any(name.endswith((".index.npz", ".index.npy")) for name in files):
        return _by_slideflow(folder, files)
    for look in (_by_torchmil, _by_clam, _by_trident):
        if (found := look(folder, folders)) is not None:
            return found
    arrays = [path for path in files.values() if kind_of(path)]
    if len(arrays) == 1 and kind_of(arrays[0]) == "npz":
        return _in_file(arrays[0], truth)
    return _in_files(files) or _one_below(folder, folders, truth, depth, seen)


def _one_below(
    folder: Path, folders: dict[str, Path], truth: str | None, depth: int, seen: frozenset[str]
) -> Found | None:
    """The one folder below that holds features; links that lead in a circle are walked once."""
    here = os.path.realpath(folder)
    if depth == _DEEPEST or here in seen:
        return None
    below = {}
    for name, child in folders.items():
        if os.path.realpath(child) not in seen | {here}:
            found = _find_in(child, truth, depth + 1, seen | {here})
            if found is not None:
                below[name] = found
    if len(below) > 1:
        raise _several(folder, below)
    return next(
        (_also(found, f"read {name}: the one folder with features in {folder}") for name, found in below.items()), None
    )


def _in_file(path: Path, truth: str | None) -> Found | None:
    beside = path.parent / "instances.csv"
    if path.name == "features.npy" and beside.exists():
        return _in_matrix(path, beside, truth)
    if kind_of(path) == "npz":
        with opened(path) as contents:
            matrix = _is_matrix(contents)
        if matrix:
            return _in_npz_matrix(path, truth)
    if kind_of(path) is None:
        return None
    whole = _find_in(path.parent, None) if path.parent.name in ("h5_files", "pt_files") else None
    if whole is not None:
        return replace(whole, sources=tuple(source for source in whole.sources if source.path == path), said=())
    return _in_files({path.name: path})


def _in_files(files: dict[str, Path], layout: str | None = None) -> Found | None:
    """One file a slide."""
    features = {name: path for name, path in files.items() if kind_of(path)}
    if not features:
        return None
    aside = sorted(set(files) - set(features))
    said = [f"left {_count(aside, 'file')} aside that are no features: {_some(aside)}"] if aside else []
    kinds = Counter(kind_of(path) for path in features.values())
    look = _look(features.values())
    if look.layout == "acmil":
        groups = [(path, *group) for path in features.values() if kind_of(path) == "h5" for group in groups_of(path)]
        return Found(
            tuple(Source(id, path, "acmil", (), id, label) for path, id, label in groups), "acmil", tuple(said)
        )
    sources = tuple(
        Source(
            path.name[: -len(path.suffix)],
            path,
            (layout or look.layout) if kind_of(path) == "h5" else str(kind_of(path)),
        )
        for path in features.values()
    )
    named = layout or "+".join(sorted(look.layout if kind == "h5" else str(kind) for kind in kinds))
    return Found(sources, named, (*said, *look.said))


@dataclass(frozen=True)
class _Look:
    layout: str
    said: tuple[str, ...] = ()


def _look(paths: Iterable[Path]) -> _Look:
    """Which tool wrote these files, by the first that can be opened; what is damaged is told when it is read."""
    for path in islice(paths, 3):
        try:
            with opened(path) as contents:
                return _look_into(contents)
        except CarmilError:
            continue
    return _Look("h5")


def _look_into(contents: Contents) -> _Look:
    layout, told = "h5", contents.told
    coordinates = next((name for name in COORDINATE_NAMES if name in contents.names), None)
    if _by_stamp(contents):
        old = "old STAMP files without a unit: coordinates become micrometres as STAMP itself does it, times 256/224"
        return _Look("stamp", () if told("unit") is not None else (old,))
    if kind_of(contents.path) == "h5":
        if not set(contents.names) & {*FEATURE_NAMES, *COORDINATE_NAMES} and groups_of(contents.path):
            return _Look("acmil")
        if coordinates and contents.get(coordinates).told("patch_size_level0") is not None:
            layout = "trident"
    unit_told = coordinates and (told("unit") or told("coordinate_unit") or contents.get(coordinates).told("unit"))
    if coordinates and layout == "h5" and unit_told is None:
        return _Look(layout, ("the files name no unit: coordinates are taken as level-0 pixels",))
    return _Look(layout)


def _by_clam(folder: Path, folders: dict[str, Path]) -> Found | None:
    if folder.name in ("h5_files", "pt_files"):
        folders = {folder.name: folder}
    kinds = {name: _listed(folders[name])[0] for name in ("h5_files", "pt_files") if name in folders}
    kinds = {name: files for name, files in kinds.items() if any(kind_of(path) for path in files.values())}
    if not kinds:
        return None
    chosen, files = next(iter(kinds.items()))
    found = _in_files(files, "clam")
    assert found is not None
    home = folders[chosen].parent
    patches = [place for place in (home / "patches", home.parent / "patches") if place.is_dir()]
    sources = tuple(replace(source, layout="clam", companions=_patches(patches, source.id)) for source in found.sources)
    said = [sentence for sentence in found.said if "no unit" not in sentence]
    if len(kinds) == 2:
        said.append("read h5_files, not pt_files: they have coordinates")
        only = {path.stem for path in kinds["pt_files"].values()} - {source.id for source in sources}
        if only:
            said.append(f"left {_count(only, 'slide')} aside that are in pt_files only: {_some(sorted(only))}")
    if without := [source.id for source in sources if not source.companions]:
        said.append(
            f"the size of a tile is unknown for {_count(without, 'slide')}: no file of patches was found beside"
        )
    return Found(sources, "clam", tuple(said))


def _patches(places: Sequence[Path], id: str) -> tuple[tuple[str, Path], ...]:
    return tuple(("patches", place / f"{id}.h5") for place in places if (place / f"{id}.h5").is_file())[:1]


def _by_trident(folder: Path, folders: dict[str, Path]) -> Found | None:
    if folder.name.startswith("features_"):
        return _in_files(_listed(folder)[0], "trident")
    jobs = [folders, *(_listed(path)[1] for name, path in folders.items() if "px_overlap" in name)]
    every = [path for job in jobs for path in job.values()]
    held = {path: _in_files(_listed(path)[0], "trident") for path in every if path.name.startswith("features_")}
    chosen = {str(path.relative_to(folder)): found for path, found in held.items() if found is not None}
    if len(chosen) > 1:
        raise _several(folder, chosen)
    if not chosen and (whole := [path for path in every if path.name.startswith("slide_features_")]):
        raise _slide_level(whole[0])
    return next((_also(found, f"read {name}") for name, found in chosen.items()), None)


def _by_torchmil(folder: Path, folders: dict[str, Path]) -> Found | None:
    features = None
    if folder.name.startswith("features_") and folder.parent.name == "features":
        features, folder = folder, folder.parent.parent
    elif folder.name == "features" and "features" not in folders:
        folder = folder.parent
    folders = _listed(folder)[1]
    beside = [name for name in ("labels", "inst_labels", "patch_labels", "coords") if name in folders]
    if "features" not in folders or not beside:
        return None
    features = features or _torchmil_features(folders["features"])
    found = _in_files(_listed(features)[0])
    if found is None:
        return None
    by_id: dict[str, dict[str, Path]] = {
        name: {path.stem: path for path in _listed(folders[name])[0].values() if kind_of(path)} for name in beside
    }
    sources = tuple(_torchmil_source(source, by_id) for source in found.sources)
    said = [sentence for sentence in found.said if "no unit" not in sentence]
    if "coords" in by_id:
        said.append("torchmil's files name no unit: coordinates are taken as level-0 pixels")
    return Found(sources, "torchmil", tuple(said))


def _torchmil_features(folder: Path) -> Path:
    files, folders = _listed(folder)
    if any(kind_of(path) for path in files.values()) or not folders:
        return folder
    if len(folders) > 1:
        raise _several(folder, folders)
    return next(iter(folders.values()))


def _torchmil_source(source: Source, by_id: dict[str, dict[str, Path]]) -> Source:
    companions, label = [], None
    if (coords := by_id.get("coords", {}).get(source.id)) is not None:
        companions.append(("coords", coords))
    for name in ("inst_labels", "patch_labels"):
        if (path := by_id.get(name, {}).get(source.id)) is not None:
            companions.append(("instance_labels", path))
            break
    if (path := by_id.get("labels", {}).get(source.id)) is not None:
        with opened(path) as contents:
            held = _one_of(contents, ("labels", "label", "arr_0", ""))
            label = str(_whole_numbers(held if held.shape else replace(held, shape=(1,)), 1)[0])
    elif companions and companions[-1][0] == "instance_labels":
        with opened(companions[-1][1]) as contents:
            held = _one_of(contents, (*INSTANCE_LABEL_NAMES, "labels", "arr_0", ""))
            label = str(int((_whole_numbers(held, max(held.shape, default=0)) > 0).any()))
    return replace(source, layout="torchmil", companions=tuple(companions), label=label)


def _by_slideflow(folder: Path, files: dict[str, Path]) -> Found | None:
    bags = {name: path for name, path in files.items() if kind_of(path) == "pt"}
    index = [name for name in files if name.endswith((".index.npz", ".index.npy"))]
    found = _in_files({name: path for name, path in files.items() if name not in (*index, "bags_config.json")})
    if found is None or not bags:
        return None
    config = (("config", files["bags_config.json"]),) if "bags_config.json" in files else ()
    sources = []
    for path in bags.values():
        places = (f"{path.stem}.index.npz", f"{path.stem}.index.npy")
        coords = tuple(("coords", files[name]) for name in places if name in files)[:1]
        sources.append(Source(path.stem, path, "slideflow", (*coords, *config)))
    said = "slideflow gives the centre of a tile in level-0 pixels, and not how large a tile is there"
    return Found(tuple(sources), "slideflow", (*(s for s in found.said if "no unit" not in s), said))


def _in_matrix(path: Path, csv: Path, truth: str | None) -> Found:
    columns = _columns(csv)
    usable = [name for name in BAG_COLUMNS if name in columns]
    if not usable:
        raise CarmilError(
            f"{csv} says nothing of bags: expected a column {' or '.join(BAG_COLUMNS)}, found {_some(columns)}"
        )
    table = _table(csv, usable[0], truth, *_stamp(csv))
    with opened(path) as contents:
        rows, _ = _rows_and_width(_features_in(contents))
    _one_line_a_row(path, rows, table)
    companions = ((f"bag:{usable[0]}", csv), *(() if truth is None else ((f"truth:{truth}", csv),)))
    sources = tuple(
        Source(name, path, "matrix", companions, name, _any_positive(table.truth, of_bag))
        for name, of_bag in table.rows.items()
    )
    said = [f"a bag is a {usable[0]} of {csv.name}"]
    if usable[1:]:
        said[0] += f", which has {', '.join(usable[1:])} as well"
    return Found(sources, "matrix", tuple(said))


def _in_npz_matrix(path: Path, truth: str | None) -> Found:
    matrix = _npz_matrix(path, truth, *_stamp(path))
    companions = () if truth is None else ((f"truth:{truth}", path),)
    sources = tuple(
        Source(
            name,
            path,
            "matrix_npz",
            companions,
            name,
            matrix.labels.get(name) or _any_positive(matrix.table.truth, rows),
        )
        for name, rows in matrix.table.rows.items()
    )
    return Found(sources, "matrix_npz", ())


def _any_positive(truth: np.ndarray | None, rows: np.ndarray) -> str | None:
    return None if truth is None else str(int((truth[rows] > 0).any()))


def _listed(folder: Path) -> tuple[dict[str, Path], dict[str, Path]]:
    """Files and folders by name, sorted; what starts with a dot is somebody's unfinished business."""
    with one_line_errors(folder):
        entries = sorted(
            (entry for entry in os.scandir(folder) if not entry.name.startswith(".")), key=lambda e: e.name
        )
        folders = {entry.name: Path(entry.path) for entry in entries if os.path.isdir(entry.path)}
    return {entry.name: Path(entry.path) for entry in entries if entry.name not in folders}, folders


def _check_ids(path: Path, sources: Iterable[Source]) -> None:
    first: dict[str, Source] = {}
    for source in sources:
        id = source.id
        if not id or not id.isprintable() or id in (".", "..") or "/" in id or len(id.encode()) > 255:
            shown = repr(id if len(id) <= 40 else f"{id[:40]}...")
            raise CarmilError(
                f"{path} has a bag named {shown}: expected up to 255 bytes without slashes or control characters, "
                "for ids become names of files"
            )
        if id in first:
            raise CarmilError(
                f"{path} has the bag {id!r} twice, in {first[id].path.name} and {source.path.name}: keep one of them"
            )
        first[id] = source


def _several(folder: Path, names: Iterable[str]) -> CarmilError:
    return CarmilError(
        f"{folder} holds features in several folders ({_some(sorted(names))}): give the path of one of them"
    )


def _slide_level(folder: Path) -> CarmilError:
    return CarmilError(
        f"{folder} holds one vector for each slide, nothing of its tiles: give a features_ENCODER folder with tile features"
    )


def _also(found: Found, sentence: str) -> Found:
    return replace(found, said=(sentence, *found.said))


def _some(names: Iterable[str]) -> str:
    names = [str(name) if str(name).isprintable() else repr(name) for name in names]
    return (", ".join(names[:6]) + (f", and {len(names) - 6} more" if len(names) > 6 else "")) or "nothing"


def _count(things: Sequence[str] | set[str], name: str) -> str:
    return f"{len(things)} {name}{'' if len(things) == 1 else 's'}"
