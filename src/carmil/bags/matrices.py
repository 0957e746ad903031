"""Read cohorts stored as one matrix: features.npy with instances.csv beside it, or an npz with X and bag.

Each row is an instance; the table, or the array `bag`, contains the name of its bag. Tables and npz files are read
once per process; features.npy is memory-mapped.
"""

import re
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import numpy as np

from carmil.array_files import (
    ArrayFile,
    StoredArray,
    as_labels,
    as_text,
    feature_layout,
    kind_of,
    open_arrays,
    read_features,
    read_instance_labels,
)
from carmil.bags.sources import Bag, BagHeader, CohortFiles, Source
from carmil.errors import CarmilError
from carmil.table_files import MOST_COLUMNS
from carmil.untrusted import one_line_errors
from carmil.words import examples, plural

BAG_COLUMNS = ("bag", "bag_name", "slide_id", "slide", "patient_id", "case_id")


@dataclass(frozen=True, eq=False)
class _Matrix:
    """The rows of each bag, and the labels of bags and truth about instances where they are known.

    features: those of an npz, which cannot be memory-mapped; None for features.npy.
    """

    path: Path
    rows: dict[str, np.ndarray]
    truth: np.ndarray | None = None
    labels: dict[str, str] = field(default_factory=dict)
    features: np.ndarray | None = None

    def label(self, bag: str) -> str | None:
        """Return the label of a bag; if it has none, whether any of its instances is positive."""
        if self.labels.get(bag) or self.truth is None:
            return self.labels.get(bag) or None
        return str(int((self.truth[self.rows[bag]] > 0).any()))


def is_matrix(file: ArrayFile) -> bool:
    """Return whether an npz contains a whole cohort."""
    names = set(file.names)
    return kind_of(file.path) == "npz" and bool(names & {"bag", "bags"} and names & {"X", "features"})


def find_in_matrix(path: Path, truth: str | None) -> CohortFiles:
    """Find the bags in features.npy or an npz. `truth` is the column or array with the truth about each instance."""
    layout, notes = "matrix_npz", list[str]()
    companions = [] if truth is None else [(f"truth:{truth}", path)]
    if kind_of(path) != "npz":
        table, layout = path.parent / "instances.csv", "matrix"
        columns = _read_columns(table)
        usable = [name for name in BAG_COLUMNS if name in columns]
        if not usable:
            expected = " or ".join(BAG_COLUMNS)
            raise CarmilError(f"{table} names no bags: expected a column {expected}, found {examples(columns, 6)}")
        companions = [(f"bag:{usable[0]}", table), *((role, table) for role, _ in companions)]
        others = f", which has {', '.join(usable[1:])} as well" if usable[1:] else ""
        notes.append(f"a bag is a {usable[0]} of {table.name}{others}")
    matrix = _matrix_of(Source("", path, layout, tuple(companions)))
    if matrix.features is None:
        with open_arrays(path) as file:
            _mapped(file, matrix)
    sources = (Source(bag, path, layout, tuple(companions), bag, matrix.label(bag)) for bag in matrix.rows)
    return CohortFiles(tuple(sources), layout, tuple(notes))


def read_matrix_header(source: Source) -> BagHeader:
    """Read the header of one bag in a matrix."""
    matrix, rows = _rows_of(source)
    if matrix.features is not None:
        return BagHeader(len(rows), matrix.features.shape[1], str(matrix.features.dtype), None)
    with open_arrays(source.path) as file:
        _, width, dtype = feature_layout(file.array(""))
        return BagHeader(len(rows), width, dtype, None)


def read_matrix_bag(source: Source) -> Bag:
    """Read the rows of one bag into memory."""
    matrix, rows = _rows_of(source)
    truth = None if matrix.truth is None else matrix.truth[rows]
    if matrix.features is not None:
        return Bag(source.id, matrix.features[rows], instance_labels=truth)
    with open_arrays(source.path) as file:
        return Bag(source.id, read_features(_mapped(file, matrix), rows), instance_labels=truth)


def _rows_of(source: Source) -> tuple[_Matrix, np.ndarray]:
    matrix = _matrix_of(source)
    if source.key not in matrix.rows:
        raise CarmilError(f"{matrix.path} no longer has the bag {source.key!r}: run the command again")
    return matrix, matrix.rows[source.key]


def _mapped(file: ArrayFile, matrix: _Matrix) -> StoredArray:
    """Open features.npy, and refuse it if its length differs from that of its table."""
    array, length = file.array(""), sum(len(rows) for rows in matrix.rows.values())
    if (rows := feature_layout(array)[0]) != length:
        raise CarmilError(
            f"{file.path} has {plural(rows, 'row')} and {matrix.path.name} {length:,}: expected one line per row"
        )
    return array


def _matrix_of(source: Source) -> _Matrix:
    columns = dict(role.split(":", 1) for role, _ in source.companions)
    path = source.path if source.layout == "matrix_npz" else source.companions[0][1]
    with one_line_errors(path):
        version = path.stat()
    return _read_matrix(path, columns.get("bag"), columns.get("truth"), version.st_mtime_ns, version.st_size)


@lru_cache(maxsize=2)
def _read_matrix(path: Path, bag: str | None, truth: str | None, mtime: int, size: int) -> _Matrix:
    """Read the table or the npz, once per process and version of the file."""
    if bag is None:
        return _read_npz(path, truth)
    columns = _read_columns(path)
    for column in (bag, truth):
        if column is not None and column not in columns:
            raise CarmilError(f"{path} has no column {column!r}: found {examples(columns, 6)}")
    if empty := int((columns[bag] == "").sum()):
        raise CarmilError(f"{path} has {plural(empty, 'line')} without a {bag}: fill them in or leave those rows out")
    known = None if truth is None else _truth_column(columns[truth], f"{path}: {truth}")
    return _Matrix(path, _rows_by_bag(columns[bag]), known)


def _read_columns(table: Path) -> dict[str, np.ndarray]:
    """Read every column as text, so that 007 stays 007."""
    import pandas as pd

    with one_line_errors(table):
        with table.open("rb") as stream:
            columns = stream.readline().count(b",") + 1
        if columns > MOST_COLUMNS:
            raise CarmilError(
                f"{table} has {columns:,} columns: expected at most {MOST_COLUMNS:,}, and one row per instance"
            )
        frame = pd.read_csv(table, dtype=str, keep_default_na=False)
        return {str(name): frame[name].to_numpy(dtype=object) for name in frame}


def _truth_column(words: np.ndarray, where: str) -> np.ndarray:
    numbers = {}
    for word in set(words):
        try:
            numbers[word] = {"true": 1.0, "false": 0.0}[word.lower()] if word.isalpha() else float(word)
        except (KeyError, ValueError):
            raise CarmilError(
                f"{where} holds {word!r}: expected whole numbers, 1 where the instance is positive"
            ) from None
    return as_labels(np.array([numbers[word] for word in words], dtype=np.float64), where)


def _rows_by_bag(names: np.ndarray) -> dict[str, np.ndarray]:
    ids, bag_of_row = np.unique(names.astype(str), return_inverse=True)
    order = np.argsort(bag_of_row, kind="stable")
    ends = np.cumsum(np.bincount(bag_of_row, minlength=len(ids)))
    return {str(name): rows for name, rows in zip(ids, np.split(order, ends[:-1]), strict=True)}


def _read_npz(path: Path, truth: str | None) -> _Matrix:
    with open_arrays(path) as file:
        features = read_features(file.one_of(("X", "features")))
        names = file.one_of(("bag", "bags"))
        if names.shape != (len(features),) or not re.fullmatch(r"(u?int\d+|[<>|=]?U\d+)", names.dtype):
            raise CarmilError(
                f"{names.where} is {names.dtype} of shape {names.shape}: expected the number or name of the "
                f"bag of each of {len(features):,} instances"
            )
        bags = names.read()
        known = None if truth is None else read_instance_labels(file.one_of((truth,)), len(features))
        labels = file.find(("y_bag", "labels"))
        return _Matrix(path, _rows_by_bag(bags), known, {} if labels is None else _bag_labels(labels, bags), features)


def _bag_labels(labels: StoredArray, bags: np.ndarray) -> dict[str, str]:
    """Assign label i to bag number i; if bags are not numbered from 0 but are sorted, to the i-th bag."""
    ids, first = np.unique(bags, return_index=True)
    if labels.shape != (len(ids),):
        raise CarmilError(f"{labels.where} has the shape {labels.shape}: expected ({len(ids)},), one label per bag")
    counted = bags.dtype.kind in "iu" and np.array_equal(ids, np.arange(len(ids)))
    if not counted and (np.diff(first) < 0).any():
        raise CarmilError(f"{labels.where} has labels, but the bags are neither numbered from 0 nor sorted: sort them")
    return {str(name): as_text(label) or "" for name, label in zip(ids, labels.read(), strict=True)}
