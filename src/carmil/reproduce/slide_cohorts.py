"""The cohorts of slides that the paper's tables are about: where they lie, how each is divided and by what it is measured.

DATA/NAME/labels.csv and DATA/NAME/ENCODER, a store or a folder of features. Where DATA has none of them, a stand-in made of
crc's nuclei takes their place, and is called so.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from carmil.bags.tables import PART_OF_WORD
from carmil.datasets.paper_cohorts import DATASETS, Dataset
from carmil.datasets.stand_in import build_stand_in
from carmil.datasets.study_cohort import Protocol, StudyCohort
from carmil.errors import CarmilError

if TYPE_CHECKING:
    from carmil.reproduce.recipes import Request

BRACS_IN_THE_WILD = 547


@dataclass(frozen=True)
class Found:
    """The cohorts that are there, and a line for each that is not: which files were expected where."""

    cohorts: tuple[StudyCohort, ...]
    missing: tuple[str, ...]


def cohorts_in(request: "Request", *, encoder: str | None = None) -> Found:
    """The paper's cohorts that DATA has with features by this encoder (or the request one); where it has none with such, the
    stand-in ones. One that is there and cannot be used is among the missing, and says why."""
    encoder = encoder or request.encoder
    there = [dataset for dataset in DATASETS if is_there(request.data, dataset, encoder)]
    if there:
        assert request.data is not None
        cohorts: list[StudyCohort] = []
        missing = [missing_line(request.data, dataset, encoder) for dataset in DATASETS if dataset not in there]
        for dataset in there:
            try:
                cohorts.append(_cohort(request.data, dataset, encoder))
            except CarmilError as error:
                missing.append(f"{dataset.title} is there and cannot be used: {error}")
        return Found(tuple(cohorts), tuple(missing))
    crc = request.folder("crc")
    if crc is None:
        where = (
            "no DATA was given" if request.data is None else f"{request.data} has none of them, and no crc to stand in"
        )
        raise CarmilError(
            f"slides are needed: expected DATA/NAME/labels.csv and DATA/NAME/{encoder} of one of "
            f"{', '.join(dataset.name for dataset in DATASETS)}; {where}; `carmil dataset show NAME` says how to make them"
        )
    made = build_stand_in(crc, request.shared / "stand-in", fast=request.fast, seed=request.seed, encoder=encoder)
    return Found(made, tuple(missing_line(request.data, dataset, encoder) for dataset in DATASETS))


def is_there(data: Path | None, dataset: Dataset, encoder: str) -> bool:
    home = None if data is None else data / dataset.name
    return home is not None and (home / "labels.csv").is_file() and (home / encoder).exists()


def missing_line(data: Path | None, dataset: Dataset, encoder: str) -> str:
    """Which of a cohort's files were expected where, and the command that makes or explains them."""
    home, expected = Path("DATA") / dataset.name, []
    if data is None or not (data / dataset.name / "labels.csv").is_file():
        expected.append(f"{home / 'labels.csv'} (carmil dataset labels {dataset.name} makes it)")
    if data is None or not (data / dataset.name / encoder).exists():
        expected.append(f"features in {home / encoder} (carmil dataset show {dataset.name} says how)")
    return f"{dataset.title} is not there: expected {' and '.join(expected)}"


def _cohort(data: Path, dataset: Dataset, encoder: str) -> StudyCohort:
    home = data / dataset.name
    counted = slides_in(dataset, home, encoder)
    if dataset.official and counted.parts is None:
        raise CarmilError(f"{home / 'labels.csv'} has no column `split`, and its official split is needed")
    return StudyCohort(
        name=dataset.name,
        title=dataset.title,
        bags=home / encoder,
        labels=home / "labels.csv",
        measures=dataset.measures,
        encoder=encoder,
        protocol=Protocol(official=dataset.official, seeds=dataset.seeds, lr=dataset.lr),
        notes=tuple(counts_said(dataset, counted)),
    )


@dataclass(frozen=True)
class Counted:
    """Slides with a label: of which class each is, whose, and in which part; None where a table knows no parts."""

    classes: tuple[str, ...]
    patients: tuple[str, ...]
    parts: tuple[str, ...] | None


def slides_in(dataset: Dataset, home: Path, encoder: str) -> Counted:
    """The slides of a cohort that have both features and a label."""
    from carmil.bags.finding import find_bags
    from carmil.bags.labels import match, read_labels
    from carmil.bags.store import is_store, open_store

    bags, table = home / encoder, read_labels(home / "labels.csv")
    ids = open_store(bags).ids if is_store(bags) else tuple(source.id for source in find_bags(bags).sources)
    found = match(table, ids)
    known = [dataset.class_of(name) for name in table.classes]
    names = [name if one is None else one.name for name, one in zip(table.classes, known, strict=True)]
    return Counted(tuple(names[label] for label in found.labels), found.patients, found.official)


def counts_said(dataset: Dataset, found: Counted) -> list[str]:
    """A line for each count that is not the paper's; nothing where all are."""
    slides = Counter(found.classes)
    patients = Counter(dict(zip(found.patients, found.classes, strict=True)).values())
    expected = {one.name: one.slides for one in dataset.classes}
    said = []
    if slides != expected:
        line = f"{dataset.title}: {_told(slides, expected)} slides, the paper has {_told(expected, expected)}"
        if patients == expected:
            line += "; patients are as many as the paper's slides: it may have counted these"
        elif dataset.name == "bracs" and slides.total() == BRACS_IN_THE_WILD:
            line += f"; BRACS as it is published has {BRACS_IN_THE_WILD}"
        said.append(line)
    for part, counts in dataset.parts if found.parts is not None else ():
        here = Counter(name for name, word in zip(found.classes, found.parts or (), strict=True) if _part(word) == part)
        wanted = dict(zip(expected, counts, strict=True))
        if here != wanted:
            said.append(
                f"{dataset.title}, {part}: {_told(here, expected)} slides, the paper has {_told(wanted, expected)}"
            )
    whose = dict[str, set[str]]()
    for patient, name in zip(found.patients, found.classes, strict=True):
        whose.setdefault(patient, set()).add(name)
    if len(whose) < len(found.classes) and all(len(names) == 1 for names in whose.values()):
        said.append(
            f"{dataset.title}: {len(found.classes)} slides of {len(whose)} patients: figures are of patients, each by the mean "
            "of its slides; the paper says slides"
        )
    if dataset.official and found.parts is None:
        said.append(f"{dataset.title}: labels.csv has no column `split`, and its official split is needed")
    return said


def _part(word: str) -> str:
    """Of train and test; slides that validate are held out of the training ones."""
    return "test" if PART_OF_WORD.get(word.casefold()) == "test" else "train"


def _told(counts: Mapping[str, int], order: Iterable[str]) -> str:
    names = [*order, *sorted(set(counts) - set(order))]
    return f"{sum(counts.values())} ({', '.join(f'{name} {counts.get(name, 0)}' for name in names)})"
