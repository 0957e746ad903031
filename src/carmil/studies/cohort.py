"""The bags of a study with their labels, patients and folds. b bags of the store, l of them with a label."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from carmil.bags.bags import Bags
from carmil.bags.building import build_store
from carmil.bags.duplicates import judge_duplicates, labelled_duplicates
from carmil.bags.labels import LabelTable, match, read_labels
from carmil.bags.packing import regroup
from carmil.bags.split_files import read_splits
from carmil.bags.splits import Splits, audit, make_splits, official_splits
from carmil.bags.store import Dtype, Store, is_store, open_store
from carmil.errors import CarmilError
from carmil.progress import Log, count_progress
from carmil.runs.settings import Settings
from carmil.studies.cautions import few_patients
from carmil.words import plural


@dataclass(frozen=True, eq=False)
class Cohort:
    """All bags of a store; those at the positions `known` (l) have a label, a patient and, in a study, a role.

    checksums: by bag with a label, the checksums of the features of its slides.
    """

    store: Store
    bags: Bags
    known: Tensor
    patients: tuple[str, ...]
    sites: tuple[str, ...] | None
    official: tuple[str, ...] | None
    classes: tuple[str, ...]
    checksums: dict[str, dict[str, str]]

    @property
    def slides(self) -> tuple[str, ...]:
        return tuple(self.bags.ids[i] for i in self.known.tolist())

    @property
    def labels(self) -> Tensor:
        """(l)"""
        assert self.bags.labels is not None
        return self.bags.labels[self.known]

    @property
    def has_patients(self) -> bool:
        """Whether figures can be of patients: all slides of each patient have the same label."""
        labels: dict[str, int] = {}
        pairs = zip(self.patients, self.labels.tolist(), strict=True)
        return all(labels.setdefault(patient, label) == label for patient, label in pairs)

    @property
    def fingerprint(self) -> str:
        """A checksum that changes with any feature, label or patient."""
        told = repr((self.store.fingerprint, self.slides, self.patients, self.labels.tolist(), self.classes))
        return hashlib.sha256(told.encode()).hexdigest()[:16]

    @property
    def truth(self) -> str | None:
        """A checksum that changes with the truth of any instance; None where no truth is known."""
        known = self.bags.instance_labels
        return None if known is None else hashlib.sha256(known.contiguous().numpy().tobytes()).hexdigest()[:16]


@dataclass(frozen=True, eq=False)
class Material:
    """What a study works on. roles (d, f, b): see `roles_of`. notes: what was guessed or left out on the way."""

    cohort: Cohort
    splits: list[Splits]
    roles: Tensor
    notes: tuple[str, ...]

    @property
    def divisions(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """The role of every labelled slide in each fold of each division."""
        return tuple(tuple(tuple(fold) for fold in split.roles.tolist()) for split in self.splits)


def open_material(settings: Settings, *, log: Log) -> Material:
    """Open the cohort of a study and split it into folds. A cohort or split that is not sound is refused."""
    remarks: list[str] = []

    def tell(line: str) -> None:
        remarks.append(line)
        log(line)

    cohort = open_cohort(settings, log=tell)
    for line in few_patients(cohort.classes, cohort.labels.tolist(), cohort.patients):
        tell(line)
    splits = split_cohort(cohort, settings, log=tell)
    for line in _audit(splits, cohort):
        tell(line)
    return Material(cohort, splits, roles_of(splits, cohort), tuple(remarks))


def log_once(log: Log) -> Log:
    """A log that passes every line on once."""
    passed: set[str] = set()

    def pass_on(line: str) -> None:
        if line not in passed:
            passed.add(line)
            log(line)

    return pass_on


def open_bags(
    path: Path, aside: Path, *, dtype: Dtype, truth: str | None = None, skip_broken: bool = False, log: Log
) -> Store:
    """Open the store at `path`; pack a folder of files into a store at `aside` first."""
    if is_store(path):
        return open_store(path)
    if path.exists():
        log(f"{path} is packed once into {aside}; `carmil cohort build` would make a store to share between runs")
    with count_progress(f"packing {path.name}", "bags") as on_bag:
        return build_store(path, aside, dtype=dtype, truth=truth, skip_broken=skip_broken, log=log, on_bag=on_bag)


def label_cohort(
    store: Store, table: LabelTable, *, one_bag: Path | None, allow_duplicates: bool = False, log: Log
) -> Cohort:
    """Join bags and labels. The same features under two patients are refused, unless allowed.

    one_bag: where the store lies in which all slides of a patient are one bag.
    """
    found = match(table, store.ids)
    checksums = store.checksums
    pairs = labelled_duplicates(table, found, store.ids, checksums)
    for line in (*table.notes, *found.notes, *judge_duplicates(pairs, allowed=allow_duplicates)):
        log(line)
    patients, official = found.patients, found.official
    labels = dict(zip((store.ids[i] for i in found.bags), found.labels, strict=True))
    sites = found.sites
    slides = {name: [name] for name in labels}
    if one_bag is not None:
        of = dict(zip((store.ids[i] for i in found.bags), patients, strict=True))
        labels = _by_patient(of, labels, "labels")
        sites = None if sites is None else tuple(_by_patient(of, dict(zip(of, sites, strict=True)), "sites").values())
        if official is not None:
            official = tuple(_by_patient(of, dict(zip(of, official, strict=True)), "official splits").values())
        store = regroup(store, of, one_bag)
        patients = tuple(labels)
        slides = {patient: [] for patient in patients}
        for slide, patient in of.items():
            slides[patient].append(slide)
        log(f"one bag per patient: {plural(len(of), 'slide')} of {plural(len(patients), 'patient')}")
    if store.truth_classes not in (None, table.classes):
        raise CarmilError(
            f"{store.path} has the truth of instances about the classes {', '.join(store.truth_classes or ())}, the labels are "
            f"{', '.join(table.classes)}: expected the same classes in the same order"
        )
    numbers = torch.tensor([labels.get(name, 0) for name in store.ids])
    at = {name: i for i, name in enumerate(store.ids)}
    bags = replace_labels(store.bags(), numbers)
    known = torch.tensor([at[name] for name in labels])
    in_bags = {bag: {slide: checksums[slide] for slide in members} for bag, members in slides.items()}
    return Cohort(store, bags, known, patients, sites, official, table.classes, in_bags)


def open_cohort(settings: Settings, *, log: Log) -> Cohort:
    """Open the bags of a study and join them with its labels."""
    out = settings.out
    if settings.labels is not None:
        _table(settings, settings.labels)  # refused, if it cannot be read, before anything is packed
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
    table = _table(settings, labels)
    return label_cohort(
        store,
        table,
        one_bag=out / "patients" if settings.patients == "one-bag" else None,
        allow_duplicates=settings.allow_duplicates,
        log=log,
    )


def _table(settings: Settings, labels: Path) -> LabelTable:
    return read_labels(
        labels,
        slide=settings.slide,
        patient=settings.patient,
        label=settings.label,
        site=settings.site,
        split=settings.split,
        positive=settings.positive,
    )


def split_cohort(cohort: Cohort, settings: Settings, *, log: Log) -> list[Splits]:
    """Split a cohort into folds: once for all seeds, or with `reshuffle` once per seed."""
    who = (cohort.slides, cohort.patients, cohort.labels.tolist())
    common: dict[str, Any] = {"validation": settings.validation, "seed": settings.seed, "classes": cohort.classes}
    if settings.splits is not None:
        splits = [read_splits(settings.splits, *who, **common)]
    elif settings.official:
        if cohort.official is None:
            raise CarmilError(f"{settings.labels} has no column with an official split: name it with --split")
        splits = [official_splits(*who, cohort.official, **common)]
    else:
        seeds = range(settings.seed, settings.seed + (settings.seeds if settings.reshuffle else 1))
        sites = cohort.sites if settings.site is not None else None
        splits = [
            make_splits(*who, folds=settings.folds, inner=settings.inner, sites=sites, **{**common, "seed": seed})
            for seed in seeds
        ]
    for line in splits[0].notes:
        log(line)
    return splits


def roles_of(splits: Sequence[Splits], cohort: Cohort) -> Tensor:
    """(d, f, b) the role of every bag of the store in each fold of each division, as numbered in carmil.bags.splits."""
    at = {name: i for i, name in enumerate(cohort.bags.ids)}
    roles = torch.zeros(len(splits), len(splits[0].roles), len(cohort.bags), dtype=torch.long)
    for i, split in enumerate(splits):
        columns = torch.tensor([at[slide] for slide in split.slides])
        roles[i, :, columns] = torch.from_numpy(np.asarray(split.roles)).long()
    return roles


def worker_bags(path: Path, fingerprint: str, labels: Tensor) -> Bags:
    """The bags of a store, opened on another machine of a cluster than the one that read their labels."""
    if not is_store(path):
        raise CarmilError(f"the store {path} is not there: it must lie where every machine that trains sees it")
    store = open_store(path)
    if store.fingerprint != fingerprint:
        raise CarmilError(f"the store {path} is another than on the machine the study was started on")
    return replace_labels(store.bags(), labels)


def replace_labels(bags: Bags, labels: Tensor) -> Bags:
    return Bags.trusted(**{**vars(bags), "labels": labels})


def _by_patient(of: dict[str, str], values: dict[str, Any], what: str) -> dict[str, Any]:
    """One value per patient; different values are refused, since one bag has one value."""
    merged: dict[str, Any] = {}
    for slide, patient in of.items():
        if merged.setdefault(patient, values[slide]) != values[slide]:
            raise CarmilError(
                f"patient {patient!r} has slides with different {what}: one bag per patient needs one; use --patients mean or max"
            )
    return merged


def _audit(splits: Sequence[Splits], cohort: Cohort) -> list[str]:
    remarks: list[str] = []
    for split in splits:
        errors, said = audit(split, cohort.labels.tolist(), cohort.classes)
        if errors:
            raise CarmilError(f"the split is not sound: {errors[0]}")
        remarks += [line for line in said if line not in remarks]
    return remarks
