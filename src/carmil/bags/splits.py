"""Who trains, who selects, who tests: folds by patient, made here or read from other tools' files.

s slides, p patients, f folds (nested: outer x inner, row outer * inner + i).
No patient is ever in two parts of a fold; `audit` says so of any split, wherever it comes from.
"""

import csv
import io
import json
import re
from collections import Counter
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from carmil.bags.tables import PART_OF_WORD, an_example, bare_id, read_table
from carmil.errors import CarmilError
from carmil.files import write_text

if TYPE_CHECKING:
    import pandas as pd

UNUSED, TRAIN, VALIDATION, TEST = 0, 1, 2, 3
NAMES = ("", "train", "val", "test")

Form = Literal["carmil", "clam", "patho-bench", "stamp"]

_DRAWS = 20  # sites, and patients of several classes, may need another draw until every part has what it needs
_SLIDE_COLUMNS = ("slide", "slide_id", "bag_name", "filename", "wsi_id")
_PATIENT_COLUMNS = ("patient", "case_id", "patient_id", "case")
_SPLIT_COLUMNS = ("split", "subset", "split_info")


@dataclass(frozen=True, eq=False)
class Splits:
    """roles (f, s): UNUSED, TRAIN, VALIDATION or TEST for each slide in each fold.

    `inner` > 1 is a nested split: each outer fold comes `inner` times in a row, with the same test slides.
    """

    slides: tuple[str, ...]
    patients: tuple[str, ...]
    roles: np.ndarray
    inner: int = 1
    said: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        s = len(self.slides)
        if self.roles.ndim != 2 or self.roles.shape[1] != s or len(self.patients) != s or len(self.roles) % self.inner:
            raise CarmilError(
                f"roles of shape {self.roles.shape} and {len(self.patients)} patients for {s} slides and "
                f"{self.inner} inner folds: expected (outer x inner folds, {s})"
            )

    @property
    def folds(self) -> int:
        """Outer folds: how often there is another test part."""
        return len(self.roles) // self.inner

    def name(self, row: int) -> str:
        """Fold 2 is "fold 2", its first inner fold "fold 2.0"."""
        return f"fold {row}" if self.inner == 1 else f"fold {row // self.inner}.{row % self.inner}"


@dataclass(frozen=True, eq=False)
class _Cohort:
    """Slides with patients as numbers, in the order of their names: so that the rows' order changes nothing."""

    slides: tuple[str, ...]
    patients: tuple[str, ...]
    labels: np.ndarray  # (s)
    of: np.ndarray  # (s) number of the slide's patient
    strata: np.ndarray  # (p) the largest label of the patient

    @classmethod
    def checked(cls, slides: Sequence[str], patients: Sequence[str], labels: Sequence[int]) -> "_Cohort":
        if not len(slides) == len(patients) == len(labels):
            raise CarmilError(
                f"{len(slides)} slides, {len(patients)} patients and {len(labels)} labels: expected as many"
            )
        if twice := [slide for slide, times in Counter(slides).items() if times > 1]:
            raise CarmilError(f"slide {twice[0]!r} is there twice: expected each slide once; keep one of them")
        numbers = np.asarray(labels, dtype=np.int64)
        if len(np.unique(numbers)) < 2:
            raise CarmilError(
                f"{len(slides)} slides of {len(np.unique(numbers))} class: a split needs at least two classes; "
                "look at the labels that found a bag"
            )
        if (numbers < 0).any():
            raise CarmilError(
                f"slide {slides[int(numbers.argmin())]!r} has class {numbers.min()}: expected 0, 1, 2, ..."
            )
        names, of = np.unique(np.asarray(patients, dtype=object), return_inverse=True)
        strata = np.zeros(len(names), dtype=np.int64)
        np.maximum.at(strata, of, numbers)
        return cls(tuple(slides), tuple(patients), numbers, of, strata)

    @property
    def classes(self) -> tuple[str, ...]:
        return tuple(str(number) for number in range(self.labels.max() + 1))

    def patients_by_class(self, slides: np.ndarray) -> dict[int, int]:
        """How many patients have a slide of each class, among the slides of a mask (s)."""
        return {int(c): len(np.unique(self.of[slides & (self.labels == c)])) for c in np.unique(self.labels)}


def make_splits(
    slides: Sequence[str],
    patients: Sequence[str],
    labels: Sequence[int],
    *,
    folds: int = 5,
    seed: int = 0,
    validation: float = 0.15,
    inner: int = 1,
    sites: Sequence[str] | None = None,
) -> Splits:
    """Every slide is tested once, patients stay together, classes are spread evenly.

    A patient with slides of several classes counts as the largest of them. `validation` is the share
    of the training patients of each class that selects; with `inner` > 1 the training part is cut into `inner` folds
    instead, and each of them selects once. With `sites` no site is both trained on and tested; selection stays by
    patient. The same arguments give the same split, in whatever order the rows come.
    """
    cohort = _Cohort.checked(slides, patients, labels)
    _check_arguments(folds, inner, validation, seed)
    groups, said = _groups(cohort, sites, folds)
    everyone = np.ones(len(cohort.slides), dtype=bool)
    _check_patients(cohort, everyone, folds)
    how = (
        f"{inner} inner folds" if inner > 1 else f"{validation:.0%} of the training patients of a class for validation"
    )
    said = [f"{folds} folds of {len(cohort.strata)} patients by class, {how} (seed {seed})", *said]
    for draw in range(_DRAWS):
        roles = _drawn(cohort, groups, folds=folds, inner=inner, validation=validation, seed=(seed, draw))
        splits = Splits(cohort.slides, cohort.patients, roles, inner, tuple(said))
        errors, _ = audit(splits, cohort.labels, cohort.classes)
        if not errors:
            return splits
    raise CarmilError(
        f"no way found to cut {len(cohort.strata)} patients into {folds} folds{'' if sites is None else ' by site'} "
        f"(patients by class: {_counts(cohort.patients_by_class(everyone))}): "
        f"{errors[0]}; ask for fewer folds or bring more patients"
    )


def official_splits(
    slides: Sequence[str],
    patients: Sequence[str],
    labels: Sequence[int],
    official: Sequence[str],
    *,
    validation: float = 0.15,
    seed: int = 0,
) -> Splits:
    """One fold, as a column of the label table has it: train, val and test in the usual spellings; empty is unused."""
    cohort = _Cohort.checked(slides, patients, labels)
    if len(official) != len(slides):
        raise CarmilError(f"{len(official)} words of train, val and test for {len(slides)} slides: expected as many")
    roles = np.array([[_role(w, f"slide {s!r}") for w, s in zip(official, slides, strict=True)]], dtype=np.int8)
    return _complete(cohort, roles, validation=validation, seed=seed, where="the split column")


def read_splits(
    path: Path,
    slides: Sequence[str],
    patients: Sequence[str],
    labels: Sequence[int],
    *,
    validation: float = 0.15,
    seed: int = 0,
) -> Splits:
    """The folds in a file or folder of ours, CLAM, Patho-Bench, STAMP or torchmil, which is found by looking.

    A fold without a validation part gets one out of its training patients. What does not fit the cohort is said.
    """
    path = Path(path)
    cohort = _Cohort.checked(slides, patients, labels)
    listing = _listing(path, cohort)
    roles, said = _placed(listing, cohort, path)
    return _complete(
        cohort,
        roles,
        validation=validation,
        seed=seed,
        where=str(path),
        inner=listing.inner,
        said=(*listing.said, *said),
    )


def write_splits(
    path: Path,
    splits: Splits,
    *,
    form: Form = "carmil",
    labels: Sequence[int] | None = None,
    classes: Sequence[str] | None = None,
) -> None:
    """Writes what `read_splits` reads.

    carmil: a TSV of slide, patient, fold_0, ... with train, val, test or nothing. clam: a folder of splits_0.csv, ...
    patho-bench: k=all.tsv and, if `classes` are given, config.yaml. stamp: splits.json, which knows no validation part:
    those patients go with the training ones, of which STAMP takes its own.
    """
    path = Path(path)
    if form not in get_args(Form):
        from carmil.errors import unknown

        raise CarmilError(unknown("form of splits", form, get_args(Form)))
    if splits.inner > 1 and form != "carmil":
        raise CarmilError(
            f"{path}: nested splits cannot be written as {form}, which knows no inner folds; use 'carmil'"
        )
    if labels is not None and len(labels) != len(splits.slides):
        raise CarmilError(f"{path}: {len(labels)} labels for {len(splits.slides)} slides: expected as many")
    match form:
        case "carmil":
            _write_carmil(path, splits)
        case "clam":
            _write_clam(path, splits, labels, classes)
        case "patho-bench":
            _write_patho_bench(path, splits, labels, classes)
        case "stamp":
            _write_stamp(path, splits)


def audit(splits: Splits, labels: Sequence[int] | np.ndarray, classes: Sequence[str]) -> tuple[list[str], list[str]]:
    """What is wrong with a split (errors: nobody should train on it), and what one should know (remarks)."""
    numbers = np.asarray(labels)
    if len(numbers) != len(splits.slides) or numbers.max() >= len(classes):
        raise CarmilError(
            f"{len(numbers)} labels up to {numbers.max()} for {len(splits.slides)} slides and {len(classes)} classes: "
            "expected one label a slide, each the number of a class"
        )
    errors: list[str] = []
    remarks: list[str] = []
    for row, roles in enumerate(splits.roles):
        fold = splits.name(row)
        errors += _in_two_parts("slide", splits.slides, roles, fold)
        errors += _in_two_parts("patient", splits.patients, roles, fold)
        for role in (TRAIN, VALIDATION, TEST):
            there = set(numbers[roles == role].tolist())
            if not there:
                errors.append(f"{fold} has no {NAMES[role]} slides: expected at least one in every part")
                continue
            for number in sorted(set(numbers.tolist()) - there):
                what = f"class {classes[number]!r} has no slide in {NAMES[role]} of {fold}"
                if role == TRAIN:
                    errors.append(f"{what}: it cannot be learned; take other splits or leave the class out")
                else:
                    remarks.append(what)
    tested = splits.roles.reshape(splits.folds, splits.inner, -1) == TEST
    for outer in np.flatnonzero((tested != tested[:, :1]).any(axis=(1, 2))):
        errors.append(f"the inner folds of fold {outer} test different slides: expected the same")
    if splits.folds > 1:
        times = tested[:, 0].sum(axis=0)
        for which, how in ((times > 1, "are tested in more than one fold"), (times == 0, "are never tested")):
            if which.any():
                named = [splits.slides[i] for i in np.flatnonzero(which)]
                remarks.append(f"{len(named)} of {len(times)} slides {how} ({an_example(named)})")
    return errors, remarks


def _in_two_parts(kind: str, names: Sequence[str], roles: np.ndarray, fold: str) -> list[str]:
    different, of = np.unique(np.asarray(names, dtype=object), return_inverse=True)
    there = np.zeros((len(different), len(NAMES)), dtype=bool)
    there[of, roles] = True
    there[:, UNUSED] = False
    return [
        f"{kind} {different[i]!r} is in {' and '.join(NAMES[role] for role in np.flatnonzero(there[i]))} of {fold}: "
        f"expected in one part only; move all of it to one"
        for i in np.flatnonzero(there.sum(axis=1) > 1)
    ]


def _check_arguments(folds: int, inner: int, validation: float, seed: int) -> None:
    if folds < 2:
        raise CarmilError(
            f"{folds} folds: expected at least 2, so that every slide is tested by a model that has not seen it"
        )
    if inner < 1:
        raise CarmilError(f"{inner} inner folds: expected 1 (one validation part) or more (nested)")
    _check_validation(validation, seed)


def _check_validation(validation: float, seed: int) -> None:
    if seed < 0:
        raise CarmilError(f"seed {seed}: expected 0 or more")
    if not 0 < validation < 1:
        raise CarmilError(f"validation share {validation}: expected between 0 and 1, like 0.15")


def _check_patients(cohort: _Cohort, slides: np.ndarray, folds: int, what: str = "folds") -> None:
    counts = cohort.patients_by_class(slides)
    rarest = min(counts, key=lambda c: counts[c])
    if counts[rarest] < folds:
        raise CarmilError(
            f"class {rarest} has {counts[rarest]} patients for {folds} {what}: expected at least one a fold "
            f"(patients by class: {_counts(counts)}); ask for fewer or leave the class out"
        )


def _counts(counts: dict[int, int]) -> str:
    return ", ".join(f"{number}: {count}" for number, count in counts.items())


def _groups(cohort: _Cohort, sites: Sequence[str] | None, folds: int) -> tuple[np.ndarray, list[str]]:
    """(s) what has to stay in one fold: the patient, or the whole site."""
    if sites is None:
        return cohort.of, []
    if len(sites) != len(cohort.slides):
        raise CarmilError(f"{len(sites)} sites for {len(cohort.slides)} slides: expected one a slide")
    site_of: dict[str, str] = {}
    for patient, site in zip(cohort.patients, sites, strict=True):
        if site_of.setdefault(patient, site) != site:
            raise CarmilError(
                f"patient {patient!r} has slides of the sites {site_of[patient]!r} and {site!r}: expected one site a "
                "patient; correct the table or split without sites"
            )
    counts = Counter(site_of.values())
    if len(counts) < folds:
        raise CarmilError(f"{len(counts)} sites for {folds} folds: expected at least one a fold; ask for fewer folds")
    said = [f"{len(counts)} sites, each in the test part of one fold only"]
    largest, patients = counts.most_common(1)[0]
    if 2 * patients > len(site_of):
        said.append(
            f"WARNING: site {largest!r} has {patients} of {len(site_of)} patients: "
            "the fold that tests it trains on little"
        )
    return np.unique(np.asarray(sites, dtype=object), return_inverse=True)[1], said


def _drawn(
    cohort: _Cohort, groups: np.ndarray, *, folds: int, inner: int, validation: float, seed: tuple[int, int]
) -> np.ndarray:
    everyone = np.ones(len(cohort.slides), dtype=bool)
    fold_of = _divided(cohort, everyone, groups, folds, seed)
    roles = np.full((folds * inner, len(cohort.slides)), TRAIN, dtype=np.int8)
    for fold in range(folds):
        test = fold_of == fold
        roles[fold * inner : (fold + 1) * inner, test] = TEST
        if inner == 1:
            roles[fold, _validation_of(cohort, ~test, validation, (*seed, fold))] = VALIDATION
            continue
        _check_patients(cohort, ~test, inner, f"inner folds in the training part of fold {fold}")
        inner_of = _divided(cohort, ~test, cohort.of, inner, (*seed, fold))
        for i in range(inner):
            roles[fold * inner + i, inner_of == i] = VALIDATION
    return roles


def _divided(cohort: _Cohort, chosen: np.ndarray, groups: np.ndarray, folds: int, seed: tuple[int, ...]) -> np.ndarray:
    """(s) the fold of each chosen slide, -1 for the others; a group is never torn."""
    from sklearn.model_selection import StratifiedGroupKFold

    # the library sorts groups by number and looks at counts only, so that the order of the rows does not matter
    strata = _merged(cohort.strata, np.unique(cohort.of[chosen]), folds)[cohort.of[chosen]]
    state = int(np.random.SeedSequence(seed).generate_state(1)[0])
    cut = StratifiedGroupKFold(folds, shuffle=True, random_state=state)
    where = np.flatnonzero(chosen)
    fold_of = np.full(len(chosen), -1)
    for fold, (_, held) in enumerate(cut.split(where, strata, groups[chosen])):
        fold_of[where[held]] = fold
    return fold_of


def _merged(strata: np.ndarray, patients: np.ndarray, least: int) -> np.ndarray:
    """Patients with slides of several classes can leave a class with few of its own: those join their neighbours."""
    merged = strata.copy()
    there = np.unique(strata[patients])
    for one, below in zip(there[:0:-1], there[-2::-1], strict=True):
        if (merged[patients] == one).sum() < least:
            merged[merged == one] = below
    there = np.unique(merged[patients])
    if len(there) > 1 and (merged[patients] == there[0]).sum() < least:
        merged[merged == there[0]] = there[1]
    return merged


def _validation_of(cohort: _Cohort, train: np.ndarray, share: float, seed: tuple[int, ...]) -> np.ndarray:
    """A mask (s) of slides: a share of the training patients of each class, at least one of two."""
    draw = np.random.default_rng(seed)
    chosen: list[int] = []
    patients = np.unique(cohort.of[train])
    for stratum in np.unique(cohort.strata[patients]):
        members = patients[cohort.strata[patients] == stratum]
        if len(members) > 1:
            many = min(max(1, round(share * len(members))), len(members) - 1)
            chosen += draw.permutation(members)[:many].tolist()
    return train & np.isin(cohort.of, chosen)


def _complete(
    cohort: _Cohort,
    roles: np.ndarray,
    *,
    validation: float,
    seed: int,
    where: str,
    inner: int = 1,
    said: Iterable[str] = (),
) -> Splits:
    """Folds that came from outside: with a validation part each, and audited."""
    _check_validation(validation, seed)
    said = list(said)
    without = [row for row in range(len(roles)) if not (roles[row] == VALIDATION).any()]
    # a patient torn between two parts must be found as the file has it, before the validation part is taken
    torn = (_in_two_parts("patient", cohort.patients, parts, f"fold {row}") for row, parts in enumerate(roles))
    _refuse([error for errors in torn for error in errors], where)
    for row in without:
        roles[row, _validation_of(cohort, roles[row] == TRAIN, validation, (seed, row))] = VALIDATION
    if without:
        said.append(
            f"{len(without)} of {len(roles)} folds have no validation part: {validation:.0%} of the training patients "
            f"of each class are taken for it (seed {seed})"
        )
    unused = roles == UNUSED
    for which, how in (
        (unused.all(axis=0), "in no fold"),
        (unused.any(axis=0) & ~unused.all(axis=0), "in some folds only"),
    ):
        if which.any():
            named = [cohort.slides[i] for i in np.flatnonzero(which)]
            said.append(f"{len(named)} of {len(cohort.slides)} slides are {how} ({an_example(named)})")
    splits = Splits(cohort.slides, cohort.patients, roles, inner, tuple(said))
    _refuse(audit(splits, cohort.labels, cohort.classes)[0], where)
    return splits


def _refuse(errors: list[str], where: str) -> None:
    if errors:
        more = f" ({len(errors) - 1} more like this)" if len(errors) > 1 else ""
        raise CarmilError(f"{where}: {errors[0]}{more}")


@dataclass(frozen=True)
class _Listing:
    """What a file says, before it is laid over the cohort: for each fold the ids and their roles."""

    folds: tuple[tuple[tuple[str, int], ...], ...]
    inner: int = 1
    said: tuple[str, ...] = ()


def _listing(path: Path, cohort: _Cohort) -> _Listing:
    if path.is_dir():
        return _folder(path, cohort)
    if path.suffix.casefold() == ".json":
        return _stamp(path)
    frame = read_table(path, counter=True)
    columns = {column.casefold(): column for column in frame.columns}
    if any(re.fullmatch(r"fold_\d+(\.\d+)?", name) for name in columns):
        return _fold_columns(path, frame, columns, cohort)
    if {"train", "test"} <= set(columns):
        return _Listing((_clam(path, frame, columns),))
    if split := next((columns[name] for name in _SPLIT_COLUMNS if name in columns), None):
        ids = _id_column(path, frame, columns, cohort)
        return _Listing((_words(path, frame, ids, split),))
    raise CarmilError(
        f"{path}: not a split we know, with columns {', '.join(map(repr, frame.columns))}; "
        "expected fold_0, fold_1, ... (carmil, Patho-Bench), train, val, test (CLAM), or split (torchmil)"
    )


def _folder(path: Path, cohort: _Cohort) -> _Listing:
    numbered: dict[int, Path] = {}
    for form in (r"splits_(\d+)\.csv", r"splits_(\d+)_bool\.csv"):
        if not numbered:
            numbered = {int(m[1]): file for file in path.iterdir() if (m := re.fullmatch(form, file.name))}
    single = [
        path / name for name in ("k=all.tsv", "splits.json", "splits.csv", "splits.tsv") if (path / name).is_file()
    ]
    if len(single) + bool(numbered) > 1:
        names = [file.name for file in (*[numbered[i] for i in sorted(numbered)][:1], *single)]
        raise CarmilError(f"{path}: holds several splits ({', '.join(names)}); name the one you mean")
    if single:
        return _listing(single[0], cohort)
    if not numbered:
        raise CarmilError(
            f"{path}: no splits in this folder; expected splits_0.csv, ... (CLAM), k=all.tsv (Patho-Bench), "
            "splits.json (STAMP), splits.csv (torchmil) or splits.tsv (carmil)"
        )
    folds, said = [], []
    for number in sorted(numbered):
        frame = read_table(numbered[number], counter=True)
        folds.append(_clam(numbered[number], frame, {column.casefold(): column for column in frame.columns}))
    if sorted(numbered) != list(range(len(numbered))):
        said.append(f"{path.name} holds the splits {', '.join(map(str, sorted(numbered)))}: some numbers are missing")
    return _Listing(tuple(folds), said=tuple(said))


def _clam(path: Path, frame: "pd.DataFrame", columns: dict[str, str]) -> tuple[tuple[str, int], ...]:
    """Three columns of ids, or of True and False behind a first column of ids."""
    if not {"train", "test"} <= set(columns):
        raise CarmilError(f"{path}: no columns train and test, there is {', '.join(map(repr, frame.columns))}")
    parts = {columns[word]: NAMES.index(part) for word, part in PART_OF_WORD.items() if word in columns}
    values = {value.casefold() for column in parts for value in frame[column]}
    if not values <= {"true", "false", ""}:
        return tuple((value, role) for column, role in parts.items() for value in frame[column] if value)
    ids = frame.columns[0]
    if ids in parts:
        raise CarmilError(f"{path}: columns of True and False, but none of slide ids before them")
    return tuple(
        (name, role)
        for column, role in parts.items()
        for name, value in zip(frame[ids], frame[column], strict=True)
        if value.casefold() == "true"
    )


def _fold_columns(path: Path, frame: "pd.DataFrame", columns: dict[str, str], cohort: _Cohort) -> _Listing:
    numbers = sorted(
        tuple(int(part) for part in name[len("fold_") :].split("."))
        for name in columns
        if re.fullmatch(r"fold_\d+(\.\d+)?", name)
    )
    inner = len({number[1] for number in numbers if len(number) > 1}) or 1
    outer = len({number[0] for number in numbers})
    if len({len(number) for number in numbers}) > 1 or outer * inner != len(numbers):
        raise CarmilError(f"{path}: {len(numbers)} columns of folds do not make {outer} outer x {inner} inner ones")
    ids = _id_column(path, frame, columns, cohort)
    names = ["fold_" + ".".join(map(str, number)) for number in numbers]
    return _Listing(tuple(_words(path, frame, ids, columns[name]) for name in names), inner)


def _id_column(path: Path, frame: "pd.DataFrame", columns: dict[str, str], cohort: _Cohort) -> str:
    """The column of slides or of patients, whichever the cohort knows better."""
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
    listed = ((name, _role(word, f"{path}: line {line}, column {column!r}")) for line, name, word in rows)
    return tuple((name, role) for name, role in listed if role != UNUSED)


def _role(word: str, where: str) -> int:
    if not word.strip():
        return UNUSED
    part = PART_OF_WORD.get(word.strip().casefold())
    if part is None:
        raise CarmilError(f"{where} says {word!r}: expected train, val or test, or nothing")
    return NAMES.index(part)


def _stamp(path: Path) -> _Listing:
    expected = 'expected {"splits": [{"train_patients": [...], "test_patients": [...]}, ...]}'
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise CarmilError(f"{path}: there is no such file; expected splits") from None
    except (ValueError, RecursionError, OSError) as error:
        raise CarmilError(f"{path}: cannot be read as JSON ({error}); {expected}") from None
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
    """The id the cohort knows: as written, without folder and extension, or without the .0 of ids saved as numbers."""
    for spelling in (name, bare_id(name), name.removesuffix(".0")):
        if spelling in ids:
            return spelling
    return None


def _placed(listing: _Listing, cohort: _Cohort, path: Path) -> tuple[np.ndarray, list[str]]:
    """Roles (f, s), and what had to be said about ids."""
    slides: dict[str, list[int]] = {}
    patients: dict[str, list[int]] = {}
    for i, (slide, patient) in enumerate(zip(cohort.slides, cohort.patients, strict=True)):
        slides.setdefault(bare_id(slide), []).append(i)
        patients.setdefault(patient, []).append(i)
    names = list(dict.fromkeys(name for fold in listing.folds for name, _ in fold))
    if not names:
        raise CarmilError(f"{path}: lists no ids; expected slides or patients for train and test")

    def understood(ids: dict[str, list[int]]) -> dict[str, str]:
        return {name: known for name in names if (known := _known_as(name, ids)) is not None}

    ids, known, what = max(
        ((slides, understood(slides), "slides"), (patients, understood(patients), "patients")), key=lambda c: len(c[1])
    )
    if not known:
        raise CarmilError(
            f"{path}: none of its {len(names)} ids is in the cohort; it has ids like {names[0]!r}, "
            f"the cohort slides like {cohort.slides[0]!r} and patients like {cohort.patients[0]!r}; "
            "take the splits of this cohort"
        )
    said = [] if what == "slides" or set(slides) == set(patients) else [f"the ids of {path.name} are patients"]
    if repaired := [name for name in known if name.endswith(".0") and known[name] == name[:-2]]:
        said.append(
            f"{len(repaired)} ids end in '.0' (saved as numbers): {repaired[0]!r} read as {known[repaired[0]]!r}"
        )
    if strangers := [name for name in names if name not in known]:
        said.append(
            f"{len(strangers)} of {len(names)} ids of {path.name} are not in the cohort ({an_example(strangers)})"
        )

    roles = np.zeros((len(listing.folds), len(cohort.slides)), dtype=np.int8)
    for row, fold in enumerate(listing.folds):
        for name, role in fold:
            for i in ids[known[name]] if name in known else ():
                if roles[row, i] not in (UNUSED, role):
                    raise CarmilError(
                        f"{path}: {what[:-1]} {name!r} is in {NAMES[roles[row, i]]} and {NAMES[role]} of fold {row}: "
                        "expected in one part only; take it out of one"
                    )
                roles[row, i] = role
    return roles, said


def _delimited(rows: Iterable[Sequence[object]], delimiter: str) -> str:
    text = io.StringIO()
    csv.writer(text, delimiter=delimiter, lineterminator="\n").writerows(rows)
    return text.getvalue()


def _write_carmil(path: Path, splits: Splits) -> None:
    names = [splits.name(row).replace(" ", "_") for row in range(len(splits.roles))]
    words = [[NAMES[role] for role in roles] for roles in splits.roles.T]
    rows = zip(splits.slides, splits.patients, words, strict=True)
    table = [["slide", "patient", *names], *([slide, patient, *parts] for slide, patient, parts in rows)]
    file = path if path.suffix in (".tsv", ".csv", ".txt") else path / "splits.tsv"
    write_text(file, _delimited(table, "\t"))


def _write_clam(path: Path, splits: Splits, labels: Sequence[int] | None, classes: Sequence[str] | None) -> None:
    """As CLAM's create_splits_seq.py leaves them: ids, the same as True and False, and with labels the counts."""
    if path.is_file():
        raise CarmilError(f"{path}: is a file; CLAM's splits are a folder of them; name a folder")
    ours = {f"splits_{row}{kind}.csv" for row in range(len(splits.roles)) for kind in ("", "_bool", "_descriptor")}
    others = sorted(file.name for file in path.glob("splits_*.csv") if file.name not in ours)
    if others:
        raise CarmilError(
            f"{path}: holds {others[0]} of other splits, which CLAM would read with these; name a new folder"
        )
    header = ["", *NAMES[TRAIN:]]
    for row, roles in enumerate(splits.roles):
        parts = [[splits.slides[i] for i in np.flatnonzero(roles == role)] for role in (TRAIN, VALIDATION, TEST)]
        longest = max(len(part) for part in parts)
        listed = [[i, *(part[i] if i < len(part) else "" for part in parts)] for i in range(longest)]
        write_text(path / f"splits_{row}.csv", _delimited([header, *listed], ","))
        flags = [
            [slide, *(str(role == part) for part in (TRAIN, VALIDATION, TEST))]
            for slide, role in zip(splits.slides, roles, strict=True)
        ]
        write_text(path / f"splits_{row}_bool.csv", _delimited([header, *flags], ","))
        if labels is not None:
            numbers = np.asarray(labels)
            names = classes or [str(number) for number in range(numbers.max() + 1)]
            counts = [
                [name, *(int(((numbers == number) & (roles == role)).sum()) for role in (TRAIN, VALIDATION, TEST))]
                for number, name in enumerate(names)
            ]
            write_text(path / f"splits_{row}_descriptor.csv", _delimited([header, *counts], ","))


def _write_patho_bench(path: Path, splits: Splits, labels: Sequence[int] | None, classes: Sequence[str] | None) -> None:
    if labels is None:
        raise CarmilError(f"{path}: Patho-Bench keeps labels and splits in one table; give the labels too")
    file = path if path.suffix == ".tsv" else path / "k=all.tsv"
    words = [[NAMES[role] for role in roles] for roles in splits.roles.T]
    rows = zip(splits.patients, splits.slides, labels, words, strict=True)
    header = ["case_id", "slide_id", "label", *(f"fold_{row}" for row in range(len(splits.roles)))]
    write_text(file, _delimited([header, *([p, s, int(label), *w] for p, s, label, w in rows)], "\t"))
    if classes is not None:
        lines = ["task_col: label", "sample_col: slide_id", "extra_cols: []", "label_dict:"]
        lines += [f"  {number}: {json.dumps(name)}" for number, name in enumerate(classes)]
        write_text(file.with_name("config.yaml"), "\n".join(lines) + "\n")


def _write_stamp(path: Path, splits: Splits) -> None:
    file = path if path.suffix == ".json" else path / "splits.json"

    def patients(chosen: np.ndarray) -> list[str]:
        return sorted({splits.patients[i] for i in np.flatnonzero(chosen)})

    folds = [
        {"train_patients": patients((row == TRAIN) | (row == VALIDATION)), "test_patients": patients(row == TEST)}
        for row in splits.roles
    ]
    write_text(file, json.dumps({"splits": folds}, indent=2) + "\n")
