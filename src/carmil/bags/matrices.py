"""Cohorts in one matrix: features.npy with instances.csv beside it, or an npz with X and bag.

A row is an instance; the table, or the array `bag`, names the bag of each. Table and npz are read once a process,
features.npy is mapped.
"""

import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from carmil.bags.arrays import (
    Contents,
    Held,
    as_features,
    as_labels,
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
from carmil.bags.sources import Bag, Header, Source
from carmil.bags.tables import MOST_COLUMNS
from carmil.errors import CarmilError
from carmil.untrusted import one_line_errors
from carmil.words import plural


@dataclass(frozen=True, eq=False)
class Table:
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
class NpzMatrix:
    """All of an npz; `labels` by the name of the bag, where it has them."""

    features: np.ndarray
    table: Table
    labels: dict[str, str]


def header_of_matrix(source: Source) -> Header:
    """What `peek` tells of a bag in a matrix."""
    if source.layout == "matrix_npz":
        matrix = npz_matrix(source.path, _column(source, "truth"))
        return Header(len(matrix.table.rows_of(source)), matrix.features.shape[1], str(matrix.features.dtype), None)
    with opened(source.path) as contents:
        held = contents.get("")
        _, width = rows_and_width(held)
        return Header(len(_table_of(source).rows_of(source)), width, dtype_when_read(held), None)


def bag_of_matrix(source: Source) -> Bag:
    """The rows of one bag, in memory."""
    if source.layout == "matrix":
        table = _table_of(source)
        rows = table.rows_of(source)
        features = _rows_of_matrix(source.path, table, rows)
    else:
        matrix = npz_matrix(source.path, _column(source, "truth"))
        table = matrix.table
        rows = table.rows_of(source)
        features = matrix.features[rows]
    return Bag(source.id, features, instance_labels=None if table.truth is None else table.truth[rows])


def is_matrix(contents: Contents) -> bool:
    """Whether an npz holds a whole cohort."""
    names = set(contents.names)
    return kind_of(contents.path) == "npz" and bool(names & {"bag", "bags"} and names & {"X", "features"})


def instance_table(csv: Path, bag: str, *, truth: str | None) -> Table:
    """instances.csv by its column `bag`, and the truth about each instance by its column `truth`."""
    return _instance_table(csv, bag, truth, *_stamp(csv))


def npz_matrix(path: Path, truth: str | None) -> NpzMatrix:
    """The npz, and the truth about each instance by its array `truth`."""
    return _npz_matrix(path, truth, *_stamp(path))


def columns_of(csv: Path) -> dict[str, np.ndarray]:
    """Every column as words: 007 stays 007."""
    import pandas as pd

    with one_line_errors(csv):
        with csv.open("rb") as stream:
            columns = stream.readline().count(b",") + 1
        if columns > MOST_COLUMNS:
            raise CarmilError(
                f"{csv} has {columns:,} columns: expected at most {MOST_COLUMNS:,}, and one row per instance"
            )
        frame = pd.read_csv(csv, dtype=str, keep_default_na=False)
        return {str(name): frame[name].to_numpy(dtype=object) for name in frame}


def one_line_a_row(path: Path, rows: int, table: Table) -> None:
    """Refuses a table that is not as long as its matrix."""
    if rows != table.length:
        raise CarmilError(
            f"{path} has {plural(rows, 'row')} and {table.path.name} {table.length:,}: expected one line a row"
        )


def _rows_of_matrix(path: Path, table: Table, rows: np.ndarray) -> np.ndarray:
    with opened(path) as contents:
        held = contents.get("")
        length, width = rows_and_width(held)
        dtype = dtype_when_read(held)
        one_line_a_row(path, length, table)
        with np.errstate(over="ignore"):
            return owned(held.read().reshape(length, width)[rows], dtype)


def _table_of(source: Source) -> Table:
    csv = next(path for role, path in source.companions if role.startswith("bag:"))
    bag, truth = _column(source, "bag"), _column(source, "truth")
    assert bag is not None
    return instance_table(csv, bag, truth=truth)


def _column(source: Source, role: str) -> str | None:
    return next((name.removeprefix(f"{role}:") for name, _ in source.companions if name.startswith(f"{role}:")), None)


def _stamp(path: Path) -> tuple[int, int]:
    """Changes when the file does."""
    with one_line_errors(path):
        stat = path.stat()
        return stat.st_mtime_ns, stat.st_size


@lru_cache(maxsize=4)
def _instance_table(csv: Path, bag: str, truth: str | None, mtime: int, size: int) -> Table:
    """instances.csv, read once a process and version of the file."""
    columns = columns_of(csv)
    for column in (bag, truth):
        if column is not None and column not in columns:
            raise CarmilError(f"{csv} has no column {column!r}: found {some(columns)}")
    names = columns[bag]
    if (empty := int((names == "").sum())) > 0:
        raise CarmilError(f"{csv} has {plural(empty, 'line')} without a {bag}: fill them in or leave those rows out")
    known = None if truth is None else _truth_column(columns[truth], f"{csv}: {truth}")
    return Table(csv, _rows_by_bag(names), len(names), known)


def _truth_column(words: np.ndarray, where: str) -> np.ndarray:
    numbers = {}
    for word in set(words):
        try:
            numbers[word] = {"true": 1.0, "false": 0.0}.get(word.lower()) if word.isalpha() else float(word)
        except ValueError:
            numbers[word] = None
        if numbers[word] is None:
            raise CarmilError(f"{where} holds {word!r}: expected whole numbers, 1 where the instance is positive")
    return as_labels(np.array([numbers[word] for word in words], dtype=np.float64), where)


def _rows_by_bag(names: np.ndarray) -> dict[str, np.ndarray]:
    ids, bag_of_row = np.unique(names.astype(str), return_inverse=True)
    order = np.argsort(bag_of_row, kind="stable")
    ends = np.cumsum(np.bincount(bag_of_row, minlength=len(ids)))
    return {str(name): rows for name, rows in zip(ids, np.split(order, ends[:-1]), strict=True)}


@lru_cache(maxsize=2)
def _npz_matrix(path: Path, truth: str | None, mtime: int, size: int) -> NpzMatrix:
    """An npz cannot be mapped: it is read once a process and version of the file."""
    with opened(path) as contents:
        features = as_features(one_of(contents, ("X", "features")))
        names = one_of(contents, ("bag", "bags"))
        if names.shape != (len(features),) or not re.fullmatch(r"(u?int\d+|[<>|=]?U\d+)", names.dtype):
            raise CarmilError(
                f"{names.where} is {names.dtype} of shape {names.shape}: expected the bag's number or name for each of "
                f"{len(features):,} instances"
            )
        bags = names.read()
        known = None if truth is None else whole_numbers(one_of(contents, (truth,)), len(features))
        labels = next((name for name in ("y_bag", "labels") if name in contents.names), None)
        label_of = {} if labels is None else _npz_labels(contents.get(labels), bags)
    return NpzMatrix(features, Table(path, _rows_by_bag(bags), len(bags), known), label_of)


def _npz_labels(held: Held, bags: np.ndarray) -> dict[str, str]:
    """Label i is bag number i's; of bags that are no numbers from 0, the i-th in a row both sorted and as they come."""
    ids, first = np.unique(bags, return_index=True)
    if held.shape != (len(ids),):
        raise CarmilError(f"{held.where} has the shape {held.shape}: expected ({len(ids)},), a label for each bag")
    counted = bags.dtype.kind in "iu" and np.array_equal(ids, np.arange(len(ids)))
    if not counted and (np.diff(first) < 0).any():
        raise CarmilError(f"{held.where} has labels, but the bags are neither numbered from 0 nor in order: sort them")
    return {str(name): as_text(label) or "" for name, label in zip(ids, held.read(), strict=True)}
