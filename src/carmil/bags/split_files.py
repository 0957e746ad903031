"""Read and write splits as files of carmil, CLAM, Patho-Bench, STAMP and torchmil. s slides, f folds."""

import json
import re
from collections.abc import Container, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from carmil.bags.columns import PART_OF_WORD
from carmil.bags.labels import bare_id
from carmil.bags.splits import NAMES, TEST, TRAIN, UNUSED, VALIDATION, Cohort, Splits, complete_folds, role_of
from carmil.csv_files import csv_text
from carmil.errors import CarmilError, unknown
from carmil.files import write_text
from carmil.table_files import read_table
from carmil.untrusted import short_message
from carmil.words import examples, plural

if TYPE_CHECKING:
    import pandas as pd

Form = Literal["carmil", "clam", "patho-bench", "stamp"]

_SLIDE_COLUMNS = ("slide", "slide_id", "bag_name", "filename", "wsi_id")
_PATIENT_COLUMNS = ("patient", "case_id", "patient_id", "case")
_SPLIT_COLUMNS = ("split", "subset", "split_info")
# The file of splits in a folder, and the suffixes of its other possible names.
_FILES = {
    "carmil": ("splits.tsv", (".tsv", ".csv", ".txt")),
    "patho-bench": ("k=all.tsv", (".tsv",)),
    "stamp": ("splits.json", (".json",)),
}
_FOLD = re.compile(r"fold_[0-9]{1,9}(\.[0-9]{1,9})?")


def read_splits(
    path: Path,
    slides: Sequence[str],
    patients: Sequence[str],
    labels: Sequence[int],
    *,
    validation: float = 0.15,
    seed: int = 0,
    classes: Sequence[str] | None = None,
    word: str = "class",
) -> Splits:
    """Read the folds of a file or folder written by carmil, CLAM, Patho-Bench, STAMP or torchmil; the form is
    recognised.

    A fold without a validation part gets one from its training patients. Ids that do not match the cohort are
    noted. `classes` are the names of the labels and `word` is the word for one of them in messages.
    """
    path = Path(path)
    cohort = Cohort.checked(slides, patients, labels, classes, word)
    listing = _listing(path, cohort)
    roles, notes = _assign_roles(listing, cohort, path)
    return complete_folds(
        cohort,
        roles,
        validation=validation,
        seed=seed,
        where=str(path),
        inner=listing.inner,
        notes=(*listing.notes, *notes),
    )


def replaced_files(path: Path, form: Form) -> tuple[Path, ...]:
    """Return the existing files that `write_splits` would replace."""
    if form == "clam":
        return tuple(sorted(path.glob("splits_*.csv")))
    name, suffixes = _FILES[form]
    return (path if path.suffix in suffixes else path / name,)


def write_splits(
    path: Path,
    splits: Splits,
    *,
    form: Form = "carmil",
    labels: Sequence[int] | None = None,
    classes: Sequence[str] | None = None,
) -> None:
    """Write splits in a form that `read_splits` reads.

    carmil: a TSV of slide, patient, fold_0, ... with train, val, test, cal or nothing. clam: a folder of splits_0.csv, ...
    patho-bench: k=all.tsv and, if `classes` are given, config.yaml. stamp: splits.json, which has no validation part:
    validation patients are added to the training patients, from which STAMP draws its own validation part.
    """
    path = Path(path)
    if form not in get_args(Form):
        raise CarmilError(unknown("form of splits", form, get_args(Form)))
    if splits.inner > 1 and form != "carmil":
        raise CarmilError(f"{path}: nested splits cannot be written as {form}, which has no inner folds; use 'carmil'")
    if labels is not None and len(labels) != len(splits.slides):
        raise CarmilError(
            f"{path}: {plural(len(labels), 'label')} for {plural(len(splits.slides), 'slide')}: expected as many"
        )
    match form:
        case "carmil":
            _write_carmil(path, splits)
        case "clam":
            _write_clam(path, splits, labels, classes)
        case "patho-bench":
            _write_patho_bench(path, splits, labels, classes)
        case "stamp":
            _write_stamp(path, splits)


@dataclass(frozen=True)
class _Listing:
    """The ids and roles of each fold, as listed in a file."""

    folds: tuple[tuple[tuple[str, int], ...], ...]
    inner: int = 1
    notes: tuple[str, ...] = ()


def _listing(path: Path, cohort: Cohort) -> _Listing:
    if path.is_dir():
        return _folder(path, cohort)
    if path.suffix.casefold() == ".json":
        return _stamp(path)
    frame = read_table(path, counter=True)
    columns = {column.casefold(): column for column in frame.columns}
    if any(_FOLD.fullmatch(name) for name in columns):
        return _fold_columns(path, frame, columns, cohort)
    if {"train", "test"} <= set(columns):
        return _Listing((_clam(path, frame, columns),))
    if split := next((columns[name] for name in _SPLIT_COLUMNS if name in columns), None):
        ids = _id_column(path, frame, columns, cohort)
        return _Listing((_words(path, frame, ids, split),))
    raise CarmilError(
        f"{path}: not a known form of splits, with columns {', '.join(map(repr, frame.columns))}; expected "
        "fold_0, fold_1, ... (carmil, Patho-Bench), train, val, test (CLAM), or split (torchmil)"
    )


def _folder(path: Path, cohort: Cohort) -> _Listing:
    numbered: dict[int, Path] = {}
    for form in (r"splits_(\d+)\.csv", r"splits_(\d+)_bool\.csv"):
        if not numbered:
            numbered = {int(m[1]): file for file in path.iterdir() if (m := re.fullmatch(form, file.name))}
    single = [
        path / name for name in ("k=all.tsv", "splits.json", "splits.csv", "splits.tsv") if (path / name).is_file()
    ]
    if len(single) + bool(numbered) > 1:
        names = [file.name for file in (*[numbered[i] for i in sorted(numbered)][:1], *single)]
        raise CarmilError(f"{path}: holds several splits ({', '.join(names)}); name one of them")
    if single:
        return _listing(single[0], cohort)
    if not numbered:
        raise CarmilError(
            f"{path}: no splits in this folder; expected splits_0.csv, ... (CLAM), k=all.tsv (Patho-Bench), "
            "splits.json (STAMP), splits.csv (torchmil) or splits.tsv (carmil)"
        )
    folds, notes = [], []
    for number in sorted(numbered):
        frame = read_table(numbered[number], counter=True)
        folds.append(_clam(numbered[number], frame, {column.casefold(): column for column in frame.columns}))
    if sorted(numbered) != list(range(len(numbered))):
        notes.append(f"{path.name} holds the splits {', '.join(map(str, sorted(numbered)))}: some numbers are missing")
    return _Listing(tuple(folds), notes=tuple(notes))


def _clam(path: Path, frame: "pd.DataFrame", columns: dict[str, str]) -> tuple[tuple[str, int], ...]:
    """Read the ids and roles of one fold: three columns of ids, or of True and False after a column of ids."""
    if not {"train", "test"} <= set(columns):
        raise CarmilError(f"{path}: no columns train and test; found {', '.join(map(repr, frame.columns))}")
    parts = {columns[word]: NAMES.index(part) for word, part in PART_OF_WORD.items() if word in columns}
    values = {value.casefold() for column in parts for value in frame[column]}
    if not values <= {"true", "false", ""}:
        return tuple((value, role) for column, role in parts.items() for value in frame[column] if value)
    ids = frame.columns[0]
    if ids in parts:
        raise CarmilError(f"{path}: columns of True and False without a column of slide ids before them")
    return tuple(
        (name, role)
        for column, role in parts.items()
        for name, value in zip(frame[ids], frame[column], strict=True)
        if value.casefold() == "true"
    )


def _fold_columns(path: Path, frame: "pd.DataFrame", columns: dict[str, str], cohort: Cohort) -> _Listing:
    numbered = sorted(
        (tuple(int(part) for part in name[len("fold_") :].split(".")), column)
        for name, column in columns.items()
        if _FOLD.fullmatch(name)
    )
    numbers = [number for number, _ in numbered]
    inner = len({number[1] for number in numbers if len(number) > 1}) or 1
    outer = len({number[0] for number in numbers})
    if len({len(number) for number in numbers}) > 1 or outer * inner != len(numbers):
        raise CarmilError(f"{path}: {len(numbers)} columns of folds are not {outer} outer x {inner} inner folds")
    ids = _id_column(path, frame, columns, cohort)
    return _Listing(tuple(_words(path, frame, ids, column) for _, column in numbered), inner)


def _id_column(path: Path, frame: "pd.DataFrame", columns: dict[str, str], cohort: Cohort) -> str:
    """Return the column of slides or of patients, whichever has more ids of the cohort."""
    candidates = [columns[name] for name in (*_SLIDE_COLUMNS, *_PATIENT_COLUMNS) if name in columns]
    if not candidates:
        raise CarmilError(
            f"{path}: no column of slide ids found among {', '.join(map(repr, frame.columns))}; "
            f"expected {', '.join(_SLIDE_COLUMNS[:3])} or {_PATIENT_COLUMNS[1]}"
        )
    known = [{bare_id(slide) for slide in cohort.slides}, set(cohort.patients)]

    def hits(column: str) -> int:
        return max(sum(_known_as(str(name), ids) is not None for name in frame[column]) for ids in known)

    return max(candidates, key=hits)


def _words(path: Path, frame: "pd.DataFrame", ids: str, column: str) -> tuple[tuple[str, int], ...]:
    rows = zip(frame.index, frame[ids], frame[column], strict=True)
    listed = ((name, role_of(word, f"{path}: line {line}, column {column!r}")) for line, name, word in rows)
    return tuple((name, role) for name, role in listed if role != UNUSED)


def _stamp(path: Path) -> _Listing:
    expected = 'expected {"splits": [{"train_patients": [...], "test_patients": [...]}, ...]}'
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise CarmilError(f"{path}: does not exist; expected splits") from None
    except (ValueError, RecursionError, OSError) as error:
        raise CarmilError(f"{path}: cannot be read as JSON ({short_message(error)}); {expected}") from None
    folds = []
    given = content.get("splits") if isinstance(content, dict) else None
    if not isinstance(given, list) or not given:
        raise CarmilError(f"{path}: no splits in it; {expected}")
    for number, fold in enumerate(given):
        listed: list[tuple[str, int]] = []
        for role in (TRAIN, VALIDATION, TEST):
            names = fold.get(f"{NAMES[role]}_patients", []) if isinstance(fold, dict) else None
            if not isinstance(names, list) or not all(isinstance(name, str | int | float) for name in names):
                raise CarmilError(f"{path}: split {number} has no list of {NAMES[role]}_patients; {expected}")
            listed += [(str(name), role) for name in names]
        folds.append(tuple(listed))
    return _Listing(tuple(folds))


def _known_as(name: str, ids: Container[str]) -> str | None:
    """Return the matching id of the cohort: as written, without folder and extension, or without the .0 of ids saved as numbers."""
    for spelling in (name, bare_id(name), name.removesuffix(".0")):
        if spelling in ids:
            return spelling
    return None


def _assign_roles(listing: _Listing, cohort: Cohort, path: Path) -> tuple[np.ndarray, list[str]]:
    """Return the roles (f, s), and notes about ids that do not match."""
    slides: dict[str, list[int]] = {}
    patients: dict[str, list[int]] = {}
    for i, (slide, patient) in enumerate(zip(cohort.slides, cohort.patients, strict=True)):
        slides.setdefault(bare_id(slide), []).append(i)
        patients.setdefault(patient, []).append(i)
    names = list(dict.fromkeys(name for fold in listing.folds for name, _ in fold))
    if not names:
        raise CarmilError(f"{path}: lists no ids; expected slides or patients for train and test")

    def known_ids(ids: dict[str, list[int]]) -> dict[str, str]:
        return {name: known for name in names if (known := _known_as(name, ids)) is not None}

    ids, known, what = max(
        ((slides, known_ids(slides), "slides"), (patients, known_ids(patients), "patients")), key=lambda c: len(c[1])
    )
    if not known:
        raise CarmilError(
            f"{path}: none of its {plural(len(names), 'id')} is in the cohort; it has ids like {names[0]!r}, "
            f"the cohort slides like {cohort.slides[0]!r} and patients like {cohort.patients[0]!r}; "
            "take the splits of this cohort"
        )
    notes = [] if what == "slides" or set(slides) == set(patients) else [f"the ids of {path.name} are patients"]
    if repaired := [name for name in known if name.endswith(".0") and known[name] == name[:-2]]:
        notes.append(
            f"{plural(len(repaired), 'id ends', 'ids end')} in '.0' (saved as numbers): {repaired[0]!r} "
            f"read as {known[repaired[0]]!r}"
        )
    if strangers := [name for name in names if name not in known]:
        notes.append(
            f"{len(strangers)} of {plural(len(names), 'id')} of {path.name} not in the cohort ({examples(strangers)})"
        )

    roles = np.zeros((len(listing.folds), len(cohort.slides)), dtype=np.int8)
    for row, fold in enumerate(listing.folds):
        for name, role in fold:
            for i in ids[known[name]] if name in known else ():
                if roles[row, i] not in (UNUSED, role):
                    raise CarmilError(
                        f"{path}: {what[:-1]} {name!r} is in {NAMES[roles[row, i]]} and {NAMES[role]} of fold "
                        f"{row}: expected in one part only; remove it from one part"
                    )
                roles[row, i] = role
    return roles, notes


def _write_carmil(path: Path, splits: Splits) -> None:
    names = [splits.name(row).replace(" ", "_") for row in range(len(splits.roles))]
    words = [[NAMES[role] for role in roles] for roles in splits.roles.T]
    rows = zip(splits.slides, splits.patients, words, strict=True)
    table = [["slide", "patient", *names], *([slide, patient, *parts] for slide, patient, parts in rows)]
    (file,) = replaced_files(path, "carmil")
    write_text(file, csv_text(table, delimiter="\t", for_people=False))


def _write_clam(path: Path, splits: Splits, labels: Sequence[int] | None, classes: Sequence[str] | None) -> None:
    """Write the files of CLAM's create_splits_seq.py: ids, True/False columns, and class counts if labels are given."""
    if path.is_file():
        raise CarmilError(f"{path}: is a file; CLAM's splits are a folder of files; name a folder")
    ours = {f"splits_{row}{kind}.csv" for row in range(len(splits.roles)) for kind in ("", "_bool", "_descriptor")}
    others = sorted(file.name for file in path.glob("splits_*.csv") if file.name not in ours)
    if others:
        raise CarmilError(
            f"{path}: holds {others[0]} of other splits, which CLAM would read with these; name a new folder"
        )
    header = ["", *(NAMES[role] for role in (TRAIN, VALIDATION, TEST))]
    for row, roles in enumerate(splits.roles):
        parts = [[splits.slides[i] for i in np.flatnonzero(roles == role)] for role in (TRAIN, VALIDATION, TEST)]
        longest = max(len(part) for part in parts)
        listed = [[i, *(part[i] if i < len(part) else "" for part in parts)] for i in range(longest)]
        write_text(path / f"splits_{row}.csv", csv_text([header, *listed], for_people=False))
        flags = [
            [slide, *(str(role == part) for part in (TRAIN, VALIDATION, TEST))]
            for slide, role in zip(splits.slides, roles, strict=True)
        ]
        write_text(path / f"splits_{row}_bool.csv", csv_text([header, *flags], for_people=False))
        if labels is not None:
            numbers = np.asarray(labels)
            names = classes or [str(number) for number in range(numbers.max() + 1)]
            counts = [
                [name, *(int(((numbers == number) & (roles == role)).sum()) for role in (TRAIN, VALIDATION, TEST))]
                for number, name in enumerate(names)
            ]
            write_text(path / f"splits_{row}_descriptor.csv", csv_text([header, *counts], for_people=False))


def _write_patho_bench(path: Path, splits: Splits, labels: Sequence[int] | None, classes: Sequence[str] | None) -> None:
    if labels is None:
        raise CarmilError(f"{path}: Patho-Bench keeps labels and splits in one table; give the labels too")
    (file,) = replaced_files(path, "patho-bench")
    words = [[NAMES[role] for role in roles] for roles in splits.roles.T]
    rows = zip(splits.patients, splits.slides, labels, words, strict=True)
    header = ["case_id", "slide_id", "label", *(f"fold_{row}" for row in range(len(splits.roles)))]
    write_text(
        file, csv_text([header, *([p, s, int(label), *w] for p, s, label, w in rows)], delimiter="\t", for_people=False)
    )
    if classes is not None:
        lines = ["task_col: label", "sample_col: slide_id", "extra_cols: []", "label_dict:"]
        lines += [f"  {number}: {json.dumps(name)}" for number, name in enumerate(classes)]
        write_text(file.with_name("config.yaml"), "\n".join(lines) + "\n")


def _write_stamp(path: Path, splits: Splits) -> None:
    (file,) = replaced_files(path, "stamp")

    def patients(chosen: np.ndarray) -> list[str]:
        return sorted({splits.patients[i] for i in np.flatnonzero(chosen)})

    folds = [
        {"train_patients": patients((row == TRAIN) | (row == VALIDATION)), "test_patients": patients(row == TEST)}
        for row in splits.roles
    ]
    write_text(file, json.dumps({"splits": folds}, indent=2) + "\n")
