"""The cohorts of slides that the paper's tables are about: where they lie, how each is divided and by what it is measured.

DATA/NAME/labels.csv and DATA/NAME/ENCODER, a store or a folder of features. Where DATA has none of them, a stand-in made of
crc's nuclei takes their place, and is called so.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from carmil.errors import CarmilError
from carmil.reproduce.datasets import DATASETS, Dataset

if TYPE_CHECKING:
    from carmil.bags.tables import Matched
    from carmil.reproduce.recipes import Asked


@dataclass(frozen=True)
class SlideCohort:
    """One column of Table 2. measures: the two figures it has there, by their names in a run's metrics.

    official: the table's own split, then `seeds` initialisations; else `folds` by patient.
    said: what a reader must know of it: counts that differ from the paper's, what it stands in for.
    """

    name: str
    title: str
    bags: Path
    labels: Path
    measures: tuple[str, str]
    encoder: str
    official: bool = False
    folds: int = 5
    seeds: int = 1
    lr: float = 2e-4
    stand_in: bool = False
    said: tuple[str, ...] = ()


@dataclass(frozen=True)
class Found:
    """The cohorts that are there, and a line for each that is not: which files were expected where."""

    cohorts: tuple[SlideCohort, ...]
    missing: tuple[str, ...]


def cohorts_in(asked: "Asked", *, encoder: str = "uni") -> Found:
    """The paper's cohorts that DATA has with features by this encoder; where it has none at all, the stand-in ones."""
    there = [dataset for dataset in DATASETS if is_there(asked.data, dataset, encoder)]
    if there:
        assert asked.data is not None
        cohorts = tuple(_cohort(asked.data, dataset, encoder) for dataset in there)
        return Found(cohorts, tuple(missing_line(d, encoder) for d in DATASETS if d not in there))
    crc = asked.folder("crc")
    if crc is None:
        where = "no DATA was given" if asked.data is None else f"{asked.data} has none of them, and no crc to stand in"
        raise CarmilError(
            f"slides are needed: expected DATA/NAME/labels.csv and DATA/NAME/{encoder} of one of "
            f"{', '.join(dataset.name for dataset in DATASETS)}; {where}; `carmil dataset show NAME` says how to make them"
        )
    from carmil.reproduce.stand_in import build_stand_in

    made = build_stand_in(crc, asked.shared / "stand-in", fast=asked.fast, seed=asked.seed, encoder=encoder)
    return Found(made, tuple(missing_line(dataset, encoder) for dataset in DATASETS))


def is_there(data: Path | None, dataset: Dataset, encoder: str) -> bool:
    home = None if data is None else data / dataset.name
    return home is not None and (home / "labels.csv").is_file() and (home / encoder).exists()


def missing_line(dataset: Dataset, encoder: str) -> str:
    return (
        f"{dataset.title} is not there: expected DATA/{dataset.name}/labels.csv (carmil dataset labels {dataset.name}) and "
        f"DATA/{dataset.name}/{encoder} (carmil slides tile, encode; carmil dataset show {dataset.name})"
    )


def _cohort(data: Path, dataset: Dataset, encoder: str) -> SlideCohort:
    home = data / dataset.name
    return SlideCohort(
        name=dataset.name,
        title=dataset.title,
        bags=home / encoder,
        labels=home / "labels.csv",
        measures=dataset.measures,
        encoder=encoder,
        official=dataset.official,
        seeds=dataset.seeds,
        lr=dataset.lr,
        said=tuple(counts_said(dataset, matched_in(home, encoder))),
    )


def matched_in(home: Path, encoder: str) -> "tuple[Matched, tuple[str, ...]]":
    """The bags of a cohort that have a label, and the names of its classes."""
    from carmil.bags.finding import find_bags
    from carmil.bags.store import is_store, open_store
    from carmil.bags.tables import match, read_labels

    bags, table = home / encoder, read_labels(home / "labels.csv")
    ids = open_store(bags).ids if is_store(bags) else tuple(source.id for source in find_bags(bags).sources)
    return match(table, ids), table.classes


def counts_said(dataset: Dataset, found: "tuple[Matched, tuple[str, ...]]") -> list[str]:
    """A line for each count that is not the paper's; nothing where all are."""
    matched, classes = found
    names = [_class_name(dataset, name) for name in classes]
    of = [names[label] for label in matched.labels]
    slides = Counter(of)
    patients = Counter(dict(zip(matched.patients, of, strict=True)).values())
    expected = {one.name: one.slides for one in dataset.classes}
    said = []
    if dict(slides) != expected:
        line = f"{dataset.title}: {_told(slides, expected)} slides, the paper has {_told(expected, expected)}"
        if dict(patients) == expected:
            line += "; the number of patients is the paper's, which may have counted these"
        elif dataset.name == "bracs" and len(of) == 547:
            line += "; 547 is what BRACS has in the wild"
        said.append(line)
    for part, counts in dataset.parts if matched.official is not None else ():
        here = Counter(name for name, split in zip(of, matched.official or (), strict=True) if _part(split) == part)
        wanted = dict(zip(expected, counts, strict=True))
        if dict(here) != wanted:
            said.append(
                f"{dataset.title}, {part}: {_told(here, expected)} slides, the paper has {_told(wanted, expected)}"
            )
    if dataset.official and matched.official is None:
        said.append(f"{dataset.title}: labels.csv has no column `split`: its official split is needed")
    return said


def _part(split: str) -> str:
    """CAMELYON16's validation slides are training slides held out."""
    return "test" if split.casefold().startswith("test") else "train"


def _class_name(dataset: Dataset, word: str) -> str:
    for one in dataset.classes:
        if word == one.name or word.casefold() in (one.name.casefold(), *one.words):
            return one.name
    return word


def _told(counts: "dict[str, int] | Counter[str]", order: Sequence[str] | dict[str, int]) -> str:
    names = [*order, *sorted(set(counts) - set(order))]
    return f"{sum(counts.values())} ({', '.join(f'{name} {counts.get(name, 0)}' for name in names)})"
