"""Breast-cancer patients with recurrence-free survival: Ki67 of the cells of their tissue-array cores, one bag per patient.

The data are those of CRAN's Qindex.data (GPL-2), for tests and benchmarks only: nothing of them is part of carmil.

patients.csv  one row per patient; see PATIENT_COLUMNS
cells.npz     one row per cell: `patient` (row of the table), `core`, `marker` (Ki67 intensity), `x` and `y` (pixels)

A cell is described by its own Ki67, by that of its neighbours in the same core, by how densely they lie, and by its
core: see `cell_features`. Nothing is fitted to the cohort. n cells, k neighbours.

OUT/labels.csv and OUT/cells (a store). The table has the columns of LABEL_COLUMNS; unknown values are empty cells.
"""

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from scipy.spatial import cKDTree
from scipy.stats import rankdata

from carmil.array_files import open_arrays
from carmil.bags.sources import Bag
from carmil.bags.store import checksum
from carmil.csv_files import csv_text
from carmil.datasets.packing import is_made_from, write_store
from carmil.datasets.study_cohort import SURVIVAL, StudyCohort
from carmil.errors import CarmilError
from carmil.files import write_text
from carmil.table_files import read_table
from carmil.words import plural

if TYPE_CHECKING:
    import pandas as pd

VERSION = 1  # version of the features, increased with every change to them
FILES = ("patients.csv", "cells.npz")
CELL_COLUMNS = ("patient", "core", "marker", "x", "y")
CLINICAL = ("months", "recurrence", "age", "node", "t_stage", "grade", "her2")
PATIENT_COLUMNS = ("patient", *CLINICAL)
LABEL_COLUMNS = ("slide", "patient", *CLINICAL, "mean_log_ki67", "share_above_1000")
UNKNOWN = {"node": "-1"}  # the code of an unknown value, where it is not an empty cell

NEAREST = (5, 10, 20, 50)  # neighbours whose Ki67 is summarised
DISTANT = (1, *NEAREST)  # neighbours whose distance is a feature
RADII = (30, 60, 120)  # pixels in which neighbours are counted; the nearest is usually 17 away
THRESHOLDS = (500, 1000, 2000)  # of Ki67; 63, 14 and 5 per cent of the cells are above them
POSITIVE = 1000  # Ki67 above which a cell counts as positive
FARTHEST = 2000.0  # pixels: the width of a core, which takes the place of the distance to a cell that does not exist
LEAST_SD = 0.1  # of log Ki67, added where neighbours may be equal
CELL_SIZE = 16.0  # pixels: the side of a cell on a map


@dataclass(frozen=True, eq=False)
class Cells:
    """Cells ordered by patient and core. patients (n): rows of the table; cores (n); marker (n); places (n, 2) pixels."""

    patients: np.ndarray
    cores: np.ndarray
    marker: np.ndarray
    places: np.ndarray


def build_ki67(data: Path, out: Path) -> StudyCohort:
    """Build the cohort from the folder with patients.csv and cells.npz; its store is reused if it exists."""
    for name in FILES:
        if not (data / name).is_file():
            raise CarmilError(f"{data} has no {name}: expected the folder with ki67's {' and '.join(FILES)}")
    table = _read_patients(data / FILES[0])
    cells = _read_cells(data / FILES[1], len(table))
    write_text(out / "labels.csv", csv_text(_label_rows(table, cells), for_people=False))
    key = {"version": VERSION, "files": [checksum((data / name).read_bytes()) for name in FILES]}
    store = out / "cells"
    if not is_made_from(store, key):
        bags = (_bag(name, cells, rows) for name, rows in zip(table["patient"], _groups(cells.patients), strict=True))
        write_store(bags, store, dtype="float32", key=key)
    return StudyCohort(
        name="ki67",
        title="Ki67, recurrence",
        bags=store,
        labels=out / "labels.csv",
        measures=("c_index",),
        encoder="cells",
        protocol=SURVIVAL,
        notes=("Ki67: cells of breast-cancer cores and recurrence-free survival (CRAN Qindex.data); folds by patient",),
    )


def cell_features(marker: np.ndarray, places: np.ndarray) -> dict[str, np.ndarray]:
    """Return each feature (n) of the cells of one core by its name. marker (n); places (n, 2) in pixels.

    If a core has too few cells for a number of neighbours, all its other cells are the neighbours.
    """
    n, log = len(marker), np.log(marker)
    tree = cKDTree(places)
    distances, rows = tree.query(places, min(NEAREST[-1], n - 1) + 1)
    distances, near = distances[:, 1:], log[rows[:, 1:]]  # the first is the cell itself
    features = {"log_ki67": log, "rank": (rankdata(marker) - 0.5) / n}
    for k in NEAREST:
        mean, sd = near[:, :k].mean(axis=1), near[:, :k].std(axis=1)
        features[f"mean_of_nearest_{k}"] = mean
        features[f"sd_of_nearest_{k}"] = sd
        features[f"max_of_nearest_{k}"] = near[:, :k].max(axis=1)
        features[f"contrast_with_nearest_{k}"] = (log - mean) / (sd + LEAST_SD)
    for k in NEAREST[2:]:
        features[f"positive_of_nearest_{k}"] = (near[:, :k] > np.log(POSITIVE)).mean(axis=1)
    for k in DISTANT:
        features[f"log_distance_to_nearest_{k}"] = np.log(distances[:, min(k, n - 1) - 1])
    for radius in RADII:  # the cell itself counts too, so that no logarithm is infinite
        features[f"log_count_within_{radius}"] = np.log(tree.query_ball_point(places, radius, return_length=True))
    for threshold in THRESHOLDS:
        features[f"log_distance_to_above_{threshold}"] = np.log(_distance_to(marker > threshold, places))
    core = {"mean": log.mean(), "sd": log.std(), "log_cells": np.log(n)}
    core |= {f"above_{threshold}": (marker > threshold).mean() for threshold in THRESHOLDS}
    return features | {f"core_{name}": np.full(n, value) for name, value in core.items()}


def _distance_to(chosen: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Return the distance (n) between each cell and the nearest other cell among the chosen (n), at most FARTHEST."""
    if not chosen.any():
        return np.full(len(places), FARTHEST)
    distances, _ = cKDTree(places[chosen]).query(places, 2)  # infinite if there is no second
    return np.minimum(np.where(chosen, distances[:, 1], distances[:, 0]), FARTHEST)


def _bag(name: str, cells: Cells, rows: slice) -> Bag:
    """Return the bag of a patient. Its cores, each of which has coordinates of its own, are placed side by side."""
    marker, places, cores = cells.marker[rows], cells.places[rows], cells.cores[rows]
    features, coordinates = [], []
    for position, part in enumerate(_groups(cores)):
        different = len(np.unique(places[part], axis=0))
        if different < max(2, len(places[part])):
            raise CarmilError(
                f"patient {name!r}: core {cores[part][0]} has {plural(len(places[part]), 'cell')} at "
                f"{plural(different, 'place')}: expected at least two cells, each at a place of its own"
            )
        features.append(np.stack(list(cell_features(marker[part], places[part]).values()), axis=1))
        coordinates.append(places[part] + (position * FARTHEST, 0.0))
    stored, at = (np.concatenate(parts).astype(np.float32) for parts in (features, coordinates))
    return Bag(name, stored, at, "level0_px", CELL_SIZE, "cells")


def _groups(numbers: np.ndarray) -> list[slice]:
    """Return the slice of each run of equal numbers."""
    cuts = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(numbers)]
    return [slice(first, last) for first, last in pairwise(cuts)]


def _label_rows(table: "pd.DataFrame", cells: Cells) -> list[tuple[str, ...]]:
    """Return the label table: its header, then one row per patient."""
    counts = np.bincount(cells.patients)
    mean = np.bincount(cells.patients, np.log(cells.marker)) / counts
    positive = np.bincount(cells.patients, cells.marker > POSITIVE) / counts
    clinical = [table[name].replace(UNKNOWN.get(name, ""), "") for name in CLINICAL]
    columns = (table["patient"], table["patient"], *clinical, mean.tolist(), positive.tolist())
    return [LABEL_COLUMNS, *zip(*columns, strict=True)]


def _read_patients(path: Path) -> "pd.DataFrame":
    table = read_table(path)
    for column in PATIENT_COLUMNS:
        if column not in table:
            raise CarmilError(f"{path}: expected a column {column!r}, found {', '.join(map(repr, table.columns))}")
    if not table["patient"].is_unique:
        raise CarmilError(f"{path}: a patient appears twice in column 'patient': expected one row per patient")
    return table


def _read_cells(path: Path, patients: int) -> Cells:
    """Read and validate the cells of this many patients."""
    with open_arrays(path) as file:
        patient, core, marker, x, y = (file.one_of((name,)).read() for name in CELL_COLUMNS)
    shapes = [values.shape for values in (patient, core, marker, x, y)]
    if any(shape != (len(patient),) for shape in shapes):
        raise CarmilError(
            f"{path} has {', '.join(CELL_COLUMNS)} of the shapes {shapes}: expected one number per cell in each"
        )
    if not np.array_equal(np.unique(patient), np.arange(patients)):
        raise CarmilError(f"{path}: `patient` must be the rows 0 to {patients - 1} of {FILES[0]}, each with some cells")
    if not (np.isfinite(marker).all() and (marker > 0).all()):
        raise CarmilError(f"{path}: `marker` must be finite and above 0")
    order = np.lexsort((core, patient))
    places = np.stack([x[order], y[order]], axis=1).astype(np.float64)
    return Cells(patient[order].astype(np.int64), core[order], marker[order].astype(np.float64), places)
