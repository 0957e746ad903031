"""The nuclei of the crc cohort: the patient and kind of each, and its features by either of two encoders.

N nuclei of the files, d features. Only patients whose nuclei all have a kind are used for synthetic slides: features
separate nuclei of known from nuclei of unknown kind, so that a mixture of both would be recognisable.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from carmil.bags.bags import Bags
from carmil.datasets.digit_features import read_features
from carmil.errors import CarmilError
from carmil.table_files import read_table

TUMOUR, INFLAMMATORY, FIBROBLAST, OTHERS = "epithelial", "inflammatory", "fibroblast", "others"
STROMA = (FIBROBLAST, OTHERS)
NORMAL = (INFLAMMATORY, FIBROBLAST, OTHERS)
ENCODERS = {"resnet50": "features.npy", "pixels": "patches.npz"}
PATCH = 27  # width of the picture of a nucleus, in pixels
CELL = 3  # width of the cells whose means are the features `pixels`


@dataclass(frozen=True, eq=False)
class Nuclei:
    """patients (N) and kinds (N) as text, "" for an unknown kind; cancerous (N) bool; in the order of the files."""

    folder: Path
    patients: np.ndarray
    kinds: np.ndarray
    cancerous: np.ndarray

    @property
    def known_patients(self) -> list[str]:
        """Return the patients whose nuclei all have a kind."""
        unknown = set(self.patients[self.kinds == ""])
        return sorted(set(self.patients) - unknown, key=_by_number)

    def rows(self, patients: "list[str] | tuple[str, ...]", kinds: tuple[str, ...]) -> np.ndarray:
        """Return the positions of the nuclei of these patients and kinds."""
        return np.flatnonzero(np.isin(self.patients, list(patients)) & np.isin(self.kinds, kinds))

    def features(self, encoder: str) -> np.ndarray:
        """Return features (N, d): of `resnet50`, or `pixels`, the pictures as 9 x 9 mean colours."""
        path = self.folder / ENCODERS[encoder]
        rows = read_features(path) if encoder == "resnet50" else _pixels(path)
        if len(rows) != len(self.patients):
            raise CarmilError(
                f"{path} has {len(rows):,} rows: expected {len(self.patients):,}, one per nucleus of instances.csv"
            )
        return rows

    def fingerprint(self, encoder: str) -> str:
        """Return a checksum of the files that the features of this encoder are computed from."""
        digest = hashlib.sha256()
        for name in ("instances.csv", ENCODERS[encoder]):
            digest.update((self.folder / name).read_bytes())
        return digest.hexdigest()[:16]


def read_nuclei(folder: Path) -> Nuclei:
    """Read and validate instances.csv; a table without `cell_type` has unknown kinds only."""
    for name in ("features.npy", "instances.csv"):
        if not (folder / name).is_file():
            raise CarmilError(f"{folder} has no {name}: expected the folder with crc's features.npy and instances.csv")
    path = folder / "instances.csv"
    table = read_table(path)
    if "cell_type" not in table:
        table["cell_type"] = ""
    for column in ("patient_id", "is_cancerous"):
        if column not in table:
            raise CarmilError(f"{path}: expected a column {column!r}, found {', '.join(map(repr, table.columns))}")
    cancerous = table["is_cancerous"].to_numpy()
    if not np.isin(cancerous, ("0", "1")).all():
        raise CarmilError(f"{path}: is_cancerous must be 0 or 1")
    known = {"", TUMOUR, *NORMAL}
    if other := sorted(set(table["cell_type"]) - known):
        raise CarmilError(f"{path}: cell_type {other[0]!r} is not one of {', '.join(sorted(known - {''}))}, or empty")
    patients, kinds = (table[column].to_numpy(dtype=str) for column in ("patient_id", "cell_type"))
    return Nuclei(folder, patients, kinds, cancerous == "1")


def patient_bags(folder: Path) -> Bags:
    """Return crc's patients in memory, one bag each, labelled 1 if any nucleus is cancerous."""
    nuclei = read_nuclei(folder)
    order = np.argsort(nuclei.patients, kind="stable")
    patients, starts = np.unique(nuclei.patients[order], return_index=True)
    truth = torch.from_numpy(nuclei.cancerous[order].astype(np.int64))
    offsets = torch.from_numpy(np.append(starts, len(order)))
    labels = torch.stack([part.max() for part in truth.split(offsets.diff().tolist())])
    rows = torch.from_numpy(np.asarray(nuclei.features("resnet50")[order], dtype=np.float32))
    return Bags(rows, offsets, labels, tuple(patients.tolist()), instance_labels=truth)


def _pixels(path: Path) -> np.ndarray:
    """Return mean colours, 0 to 1, of cells of 3 x 3 pixels; nothing is fitted."""
    if not path.is_file():
        raise CarmilError(f"{path} does not exist: expected crc's pictures, `im` (nuclei, {PATCH}, {PATCH}, 3)")
    try:
        with np.load(path, allow_pickle=False) as file:
            pictures = file["im"]
    except (OSError, ValueError, KeyError) as error:
        raise CarmilError(f"{path} cannot be read ({error}): expected an npz with `im`") from error
    if pictures.ndim != 4 or pictures.shape[1:] != (PATCH, PATCH, 3):
        raise CarmilError(f"{path}: `im` has the shape {pictures.shape}, expected (nuclei, {PATCH}, {PATCH}, 3)")
    n, cells = len(pictures), PATCH // CELL
    means = pictures.reshape(n, cells, CELL, cells, CELL, 3).mean(axis=(2, 4), dtype=np.float32) / 255
    return means.reshape(n, -1).astype(np.float16)


def _by_number(name: str) -> tuple[int, str]:
    return (int(name), "") if name.isdecimal() else (0, name)
