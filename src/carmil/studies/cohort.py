"""The bags of a study with their labels, patients and folds. b bags of the store, l of them with a label."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor

from carmil.bags.bags import Bags
from carmil.bags.building import build_store
from carmil.bags.checking import judge_duplicates, labelled_duplicates
from carmil.bags.labels import LabelTable, match, read_labels
from carmil.bags.split_files import read_splits
from carmil.bags.splits import (
    CALIBRATION,
    TEST,
    TRAIN,
    VALIDATION,
    Splits,
    audit,
    draw_calibration,
    make_splits,
    official_splits,
)
from carmil.bags.store import Dtype, Store, is_store, open_store
from carmil.datasets.packing import regroup
from carmil.errors import CarmilError
from carmil.progress import Log, count_progress
from carmil.runs.settings import Settings
from carmil.statistics.conformal import fewest_cases
from carmil.studies.adjustment import check_covariates
from carmil.studies.cautions import few_patients
from carmil.studies.conformal import TOO_FEW, check_counts, check_patients, check_target, count_patients
from carmil.targets import Classes, Target
from carmil.targets.reading import TargetColumns, columns_of, kind_of, read_outcomes, target_columns
from carmil.words import examples, plural


@dataclass(frozen=True, eq=False)
class Cohort:
    """All bags of a store; those at the positions `known` (l) have an outcome, a patient and, in a study, a role.

    checksums: for each labelled bag, the checksums of the features of its slides. covariates: text, one row per labelled
    bag, of the columns that risks are adjusted for.
    """

    store: Store
    bags: Bags
    known: Tensor
    patients: tuple[str, ...]
    sites: tuple[str, ...] | None
    official: tuple[str, ...] | None
    target: Target
    checksums: dict[str, dict[str, str]]
    covariates: pd.DataFrame | None = None

    @property
    def slides(self) -> tuple[str, ...]:
        return tuple(self.bags.ids[i] for i in self.known.tolist())

    @property
    def outcomes(self) -> NDArray[Any]:
        """Return the outcomes (l) or (l, t): class numbers, or the values of another kind of target."""
        assert self.bags.labels is not None
        return self.bags.labels[self.known].numpy()

    @property
    def strata(self) -> tuple[list[int], tuple[str, ...]]:
        """Return the number (l) of each bag's stratum, such as its class, and the names of the strata."""
        return self.target.strata(self.outcomes)

    def add_labels(self, frame: pd.DataFrame) -> pd.DataFrame:
        """Insert the patient and the label of each row's slide."""
        place = {slide: i for i, slide in enumerate(self.slides)}
        rows = [place[slide] for slide in frame["slide"]]
        frame.insert(1, "patient", [self.patients[row] for row in rows])
        for i, (name, values) in enumerate(self.target.label_values(self.outcomes[rows]).items()):
            frame.insert(2 + i, name, values)
        return frame

    @property
    def has_patients(self) -> bool:
        """Return whether figures can be computed over patients: all slides of each patient have the same label."""
        outcomes: dict[str, str] = {}
        pairs = zip(self.patients, map(str, self.outcomes.tolist()), strict=True)
        return all(outcomes.setdefault(patient, outcome) == outcome for patient, outcome in pairs)

    @property
    def fingerprint(self) -> str:
        """Return a checksum that changes with any feature, label or patient."""
        labelled = self.slides, self.patients, self.outcomes.tolist(), self.target.outputs
        contents = repr((self.store.fingerprint, *labelled))
        return hashlib.sha256(contents.encode()).hexdigest()[:16]

    @property
    def truth(self) -> str | None:
        """Return a checksum that changes with the truth of any instance; None where no truth is known."""
        known = self.bags.instance_labels
        return None if known is None else hashlib.sha256(known.contiguous().numpy().tobytes()).hexdigest()[:16]


@dataclass(frozen=True, eq=False)
class Material:
    """The cohort of a study and its splits. roles (d, f, b): see `roles_of`. notes: guesses and omissions."""

    cohort: Cohort
    splits: list[Splits]
    roles: Tensor
    notes: tuple[str, ...]

    @property
    def divisions(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """Return the role of every labelled slide in each fold of each division."""
        return tuple(tuple(tuple(fold) for fold in split.roles.tolist()) for split in self.splits)


def open_material(settings: Settings, *, log: Log) -> Material:
    """Open the cohort of a study and split it into folds. A cohort or split with errors is refused."""
    remarks: list[str] = []

    def tell(line: str) -> None:
        remarks.append(line)
        log(line)

    cohort = open_cohort(settings, log=tell)
    strata, names = cohort.strata
    if settings.conformal is not None:
        check_target(cohort.target)
        check_patients(cohort.patients, strata)
    for line in few_patients(names, strata, cohort.patients, cohort.target.strata_word):
        tell(line)
    splits = split_cohort(cohort, settings, log=tell)
    for split in splits:
        errors, found = audit(split, strata, names, cohort.target.strata_word)
        if errors:
            raise CarmilError(f"the split has errors: {errors[0]}")
        for line in found:
            if line not in remarks:
                tell(line)
    return Material(cohort, splits, roles_of(splits, cohort), tuple(remarks))


def log_once(log: Log) -> Log:
    """Return a log that passes on each distinct line once."""
    passed: set[str] = set()

    def pass_on(line: str) -> None:
        if line not in passed:
            passed.add(line)
            log(line)

    return pass_on


def open_bags(
    path: Path, aside: Path, *, dtype: Dtype, truth: str | None = None, skip_broken: bool = False, log: Log
) -> Store:
    """Open the store at `path`; if `path` contains files, pack them into a store at `aside` first."""
    if is_store(path):
        return open_store(path)
    if path.exists():
        log(f"{path} is packed once into {aside}; `carmil cohort build` would make a store to share between runs")
    with count_progress(f"packing {path.name}", "bags") as on_bag:
        return build_store(path, aside, dtype=dtype, truth=truth, skip_broken=skip_broken, log=log, on_bag=on_bag)


def label_cohort(
    store: Store,
    labels_read: "LabelsRead",
    *,
    one_bag: Path | None,
    allow_duplicates: bool = False,
    log: Log,
) -> Cohort:
    """Join bags and labels. Equal features under two patients are refused, unless allowed.

    one_bag: the folder of the store in which all slides of a patient are one bag, if slides are to be merged.
    """
    table, target = labels_read.table, labels_read.target
    labelled = match(table, store.ids)
    checksums = store.checksums
    pairs = labelled_duplicates(table, labelled, store.ids, checksums)
    for line in (*table.notes, *labelled.notes, *judge_duplicates(pairs, allowed=allow_duplicates)):
        log(line)
    patients, official = labelled.patients, labelled.official
    labels = dict(zip((store.ids[i] for i in labelled.bags), labelled.labels, strict=True))
    row_of = dict(zip(labels, labelled.rows, strict=True))
    sites = labelled.sites
    slides = {name: [name] for name in labels}
    if one_bag is not None:
        of = dict(zip((store.ids[i] for i in labelled.bags), patients, strict=True))
        labels = _by_patient(of, labels, "labels")
        row_of = {patient: row_of[slide] for slide, patient in of.items()}
        sites = None if sites is None else tuple(_by_patient(of, dict(zip(of, sites, strict=True)), "sites").values())
        if official is not None:
            official = tuple(_by_patient(of, dict(zip(of, official, strict=True)), "official splits").values())
        store = regroup(store, of, one_bag)
        patients = tuple(labels)
        slides = {patient: [] for patient in patients}
        for slide, patient in of.items():
            slides[patient].append(slide)
        log(f"one bag per patient: {plural(len(of), 'slide')} of {plural(len(patients), 'patient')}")
    if store.truth_classes not in (None, target.outputs):
        raise CarmilError(
            f"{store.path} has the truth of instances about the classes "
            f"{', '.join(store.truth_classes or ())}, the labels have {', '.join(target.outputs)}: expected the "
            "same classes in the same order"
        )
    at = {name: i for i, name in enumerate(store.ids)}
    known = torch.tensor([at[name] for name in labels])
    outcomes = torch.as_tensor(labels_read.outcomes[[row_of[name] for name in labels]])
    outcomes = outcomes.float() if outcomes.is_floating_point() else outcomes.long()
    every = outcomes.new_zeros(len(store.ids), *outcomes.shape[1:]).index_copy(0, known, outcomes)
    bags = replace_labels(store.bags(), every)
    in_bags = {bag: {slide: checksums[slide] for slide in members} for bag, members in slides.items()}
    covariates = None
    if table.other_names:
        rows = [table.others[row_of[name]] for name in labels]
        covariates = pd.DataFrame(rows, columns=[*table.other_names], index=[*labels])
        check_covariates(covariates, patients)
    return Cohort(store, bags, known, patients, sites, official, target, in_bags, covariates)


def open_cohort(settings: Settings, *, log: Log) -> Cohort:
    """Open the bags of a study and join them with its labels."""
    out = settings.out
    if settings.labels is not None:
        read_outcome_table(settings, settings.labels)  # refuse an unreadable table before anything is packed
    store = open_bags(
        settings.bags,
        out / "cohort",
        dtype=settings.dtype,
        truth=settings.truth,
        skip_broken=settings.skip_broken,
        log=log,
    )
    labels = settings.labels or store.labels
    if labels is None:
        raise CarmilError(f"{settings.bags} came without labels: name a table with --labels")
    return label_cohort(
        store,
        read_outcome_table(settings, labels),
        one_bag=out / "patients" if settings.patients == "one-bag" else None,
        allow_duplicates=settings.allow_duplicates,
        log=log,
    )


@dataclass(frozen=True, eq=False)
class LabelsRead:
    """A label table, the target it is read for, and the outcomes of its rows (s) or (s, t)."""

    table: LabelTable
    target: Target
    outcomes: NDArray[Any]


def read_outcome_table(settings: Settings, path: Path) -> LabelsRead:
    """Read the outcomes of a study from its label table. The kind of target is guessed unless it is named."""
    read = partial(
        read_labels, path, slide=settings.slide, patient=settings.patient, site=settings.site, split=settings.split
    )
    named = target_columns(
        settings.target, settings.event, settings.kind, settings.loss, grades=settings.grades, label=settings.label
    )
    adjust = tuple(part.strip() for part in (settings.adjust or "").split(",") if part.strip())
    if adjust and (named is None or named.kind != "survival"):
        raise CarmilError(f"--adjust {settings.adjust} is for survival: expected --target TIME --event EVENT")
    if named is None:
        return class_labels(read(label=settings.label, positive=settings.positive))
    if surplus := set(adjust) & set(named.all_columns):
        raise CarmilError(f"--adjust {min(surplus)}: the column is predicted: leave it out")
    table, notes = read(target=named.all_columns, others=adjust), list[str]()
    kind = kind_of(named, _cells(table, named), notes)
    if kind == "classes":
        table = read(label=named.columns[0], positive=settings.positive)
        return class_labels(replace(table, notes=(*table.notes, *notes)))
    return _outcomes(table, named, kind, notes)


def read_target_table(path: Path, target: Target, *, slide: str | None, patient: str | None) -> LabelsRead:
    """Read the outcomes of a run's target from another table, which must have its columns."""
    named = columns_of(target)
    return _outcomes(read_labels(path, slide=slide, patient=patient, target=named.all_columns), named, target.kind, [])


def _cells(table: LabelTable, named: TargetColumns) -> pd.DataFrame:
    return pd.DataFrame(table.cells, columns=[*named.all_columns])


def _outcomes(table: LabelTable, named: TargetColumns, kind: str, notes: list[str]) -> LabelsRead:
    target, outcomes = read_outcomes(named, kind, _cells(table, named), table.slides, str(table.path), notes)
    return LabelsRead(replace(table, notes=(*table.notes, *notes)), target, outcomes)


def class_labels(table: LabelTable) -> LabelsRead:
    """Return the class numbers of a table of classes."""
    of = {name: number for number, name in enumerate(table.classes)}
    return LabelsRead(table, Classes(names=table.classes), np.array([of[label] for label in table.labels]))


def split_cohort(cohort: Cohort, settings: Settings, *, log: Log) -> list[Splits]:
    """Split a cohort into folds: once for all seeds, or with `reshuffle` once per seed.

    For prediction sets, some patients are set aside from all folds, unless the splits of a file have a calibration part.
    """
    strata, names = cohort.strata
    who = (cohort.slides, cohort.patients, strata)
    common: dict[str, Any] = {"validation": settings.validation, "seed": settings.seed, "classes": names}
    common["word"] = cohort.target.strata_word
    if settings.splits is not None:
        splits = [read_splits(settings.splits, *who, **common)]
    elif settings.official:
        if cohort.official is None:
            raise CarmilError(f"{settings.labels} has no column with an official split: name it with --split")
        splits = [official_splits(*who, cohort.official, **common)]
    else:
        aside = np.zeros(len(strata), dtype=bool)
        if settings.conformal is not None:
            aside = _calibration_part(cohort, settings)
        seeds = range(settings.seed, settings.seed + (settings.seeds if settings.reshuffle else 1))
        splits = [_draw_folds(cohort, settings, ~aside, {**common, "seed": seed}) for seed in seeds]
    if settings.conformal is not None:
        splits = [_with_calibration(split, cohort, settings) for split in splits]
    for line in splits[0].notes:
        log(line)
    return splits


def _draw_folds(cohort: Cohort, settings: Settings, used: NDArray[np.bool_], common: Mapping[str, Any]) -> Splits:
    """Divide the used slides (l) into folds; the others are the calibration part."""
    rows = np.flatnonzero(used).tolist()
    drawn = make_splits(
        [cohort.slides[row] for row in rows],
        [cohort.patients[row] for row in rows],
        [cohort.strata[0][row] for row in rows],
        folds=settings.folds,
        inner=settings.inner,
        sites=None if settings.site is None or cohort.sites is None else [cohort.sites[row] for row in rows],
        **common,
    )
    roles = np.full((len(drawn.roles), len(used)), CALIBRATION, dtype=drawn.roles.dtype)
    roles[:, used] = drawn.roles
    return Splits(cohort.slides, cohort.patients, roles, drawn.inner, drawn.notes)


def _with_calibration(split: Splits, cohort: Cohort, settings: Settings) -> Splits:
    """Return splits with a calibration part: that of the file or the draw, otherwise patients who are in no test part."""
    assert settings.conformal is not None
    if not split.calibration.any():
        aside = _calibration_part(cohort, settings, ~(split.roles == TEST).any(0))
        split = replace(split, roles=np.where(aside, CALIBRATION, split.roles).astype(split.roles.dtype))
    numbers, names = cohort.strata
    counts = count_patients(np.array(cohort.patients)[split.calibration], np.array(numbers)[split.calibration], names)
    check_counts(counts, settings.conformal, cohort.target.strata_word, "the calibration part of the splits")
    listed = ", ".join(f"{name!r}: {count}" for name, count in counts.items())
    note = f"prediction sets: calibrated on patients set aside from all folds ({listed})"
    sites = [] if cohort.sites is None else [_site_note(split, cohort.sites)]
    return replace(split, notes=(*split.notes, note, *sites))


def _site_note(split: Splits, sites: Sequence[str]) -> str:
    """Describe the patients for whom prediction sets are valid, by the sites of the calibration patients. sites (l)."""
    names = np.array(sites, dtype=object)
    trained = (split.roles == TRAIN) | (split.roles == VALIDATION)
    own = set(names[split.calibration])
    holds = (
        f"prediction sets hold for new patients of the sites of the calibration patients ({examples(sorted(own))}), in the same "
        "proportions"
    )
    if own.isdisjoint(names[trained.any(0)]):
        return f"{holds}; no model was trained on these sites"
    unseen = all(
        set(names[roles == TEST]).isdisjoint(names[used]) for roles, used in zip(split.roles, trained, strict=True)
    )
    tested = (
        ", and not for the test patients of the folds, whose models have seen none of their site: the measured coverage shows "
        "how the sets transfer to another site, and may lie below the level"
    )
    return f"WARNING: {holds}, answered by all models; not for patients of another site{tested if unseen else ''}"


def _calibration_part(cohort: Cohort, settings: Settings, free: NDArray[np.bool_] | None = None) -> NDArray[np.bool_]:
    assert settings.conformal is not None
    strata, names = cohort.strata
    try:
        return draw_calibration(
            cohort.slides,
            cohort.patients,
            strata,
            fewest=fewest_cases(settings.conformal),
            free=free,
            seed=settings.seed,
            classes=names,
            word=cohort.target.strata_word,
        )
    except CarmilError as error:
        raise CarmilError(f"--conformal {settings.conformal:g}: {error}; {TOO_FEW}") from None


def roles_of(splits: Sequence[Splits], cohort: Cohort) -> Tensor:
    """Return (d, f, b) the role of every bag of the store in each fold of each division, numbered as in carmil.bags.splits."""
    at = {name: i for i, name in enumerate(cohort.bags.ids)}
    roles = torch.zeros(len(splits), len(splits[0].roles), len(cohort.bags), dtype=torch.long)
    for i, split in enumerate(splits):
        columns = torch.tensor([at[slide] for slide in split.slides])
        roles[i, :, columns] = torch.from_numpy(np.asarray(split.roles)).long()
    return roles


def worker_bags(path: Path, fingerprint: str, labels: Tensor) -> Bags:
    """Open the bags of a store on a worker of a cluster, and check that it is the store whose labels were read."""
    if not is_store(path):
        raise CarmilError(
            f"the store {path} does not exist on this machine: it must be on a disk that every "
            "machine of the cluster can read"
        )
    store = open_store(path)
    if store.fingerprint != fingerprint:
        raise CarmilError(
            f"the store {path} differs from that on the machine where the study was started: expected the same store"
        )
    return replace_labels(store.bags(), labels)


def replace_labels(bags: Bags, labels: Tensor) -> Bags:
    return Bags.trusted(**{**vars(bags), "labels": labels})


def _by_patient(of: dict[str, str], values: dict[str, Any], what: str) -> dict[str, Any]:
    """Return one value per patient. Different values are refused, since one bag has one value."""
    merged: dict[str, Any] = {}
    for slide, patient in of.items():
        if merged.setdefault(patient, values[slide]) != values[slide]:
            raise CarmilError(
                f"patient {patient!r} has slides with different {what}: expected the same for all, as they "
                "become one bag; use --patients mean or max"
            )
    return merged
