"""The cohorts of slides that a recipe runs on: the paper's where DATA has them, else a stand-in made of crc's nuclei."""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from carmil.bags.finding import find_bags
from carmil.bags.labels import read_labels
from carmil.bags.readers import read_bag
from carmil.bags.store import is_store, open_store
from carmil.datasets.paper_cohorts import DATASETS, Dataset
from carmil.datasets.paper_files import count_notes, has_files, missing_files, read_slides
from carmil.datasets.stand_in import build_stand_in
from carmil.datasets.study_cohort import Protocol, StudyCohort
from carmil.errors import CarmilError
from carmil.reproduce.recipes import Request


@dataclass(frozen=True)
class CohortSet:
    """The cohorts that are there, and one line for each that is not: which files were expected where."""

    cohorts: tuple[StudyCohort, ...]
    missing: tuple[str, ...]

    def named(self, names: Collection[str]) -> "CohortSet":
        """The cohorts of these names; at least one must be there."""
        chosen = tuple(cohort for cohort in self.cohorts if cohort.name in names)
        if not chosen:
            raise CarmilError(f"none of {', '.join(names)} is there: {'; '.join(self.missing)}")
        return CohortSet(chosen, self.missing)


def find_cohorts(request: Request, *, encoder: str | None = None) -> CohortSet:
    """The paper's cohorts that DATA has with features of the encoder, or the stand-in where DATA has none; at least one.

    A cohort that is there but cannot be used is among the missing, with the reason.
    """
    encoder = encoder or request.encoder
    present = [dataset for dataset in DATASETS if has_files(request.data, dataset, encoder)]
    missing = [missing_files(request.data, dataset, encoder) for dataset in DATASETS if dataset not in present]
    if not present:
        return CohortSet(_stand_in(request, encoder), tuple(missing))
    assert request.data is not None
    cohorts = []
    for dataset in present:
        try:
            cohorts.append(_cohort(request.data, dataset, encoder))
        except CarmilError as error:
            missing.append(f"{dataset.title} is there and cannot be used: {error}")
    if not cohorts:
        raise CarmilError(f"no cohort of slides is there: {'; '.join(missing)}")
    return CohortSet(tuple(cohorts), tuple(missing))


def _stand_in(request: Request, encoder: str) -> tuple[StudyCohort, ...]:
    crc = request.folder("crc")
    if crc is None:
        data = (
            "no DATA was given" if request.data is None else f"{request.data} has none of them, and no crc to stand in"
        )
        raise CarmilError(
            f"slides are needed: expected DATA/NAME/labels.csv and DATA/NAME/{encoder} of one of "
            f"{', '.join(dataset.name for dataset in DATASETS)}; {data}; `carmil dataset show NAME` says how to make them"
        )
    return build_stand_in(crc, request.shared / "stand-in", fast=request.fast, seed=request.seed, encoder=encoder)


def _cohort(data: Path, dataset: Dataset, encoder: str) -> StudyCohort:
    home = data / dataset.name
    slides = read_slides(dataset, home, encoder)
    if dataset.official and slides.parts is None:
        raise CarmilError(f"{home / 'labels.csv'} has no column `split`, and its official split is needed")
    return StudyCohort(
        name=dataset.name,
        title=dataset.title,
        bags=home / encoder,
        labels=home / "labels.csv",
        measures=dataset.measures,
        encoder=encoder,
        protocol=Protocol(official=dataset.official, seeds=dataset.seeds, lr=dataset.lr),
        notes=tuple(count_notes(dataset, slides)),
    )


def several_classes(request: Request) -> tuple[StudyCohort | None, list[str]]:
    """The cohort with the most classes, if any has more than two (BRACS where it is there); else the reason."""
    try:
        found = find_cohorts(request)
    except CarmilError as error:
        return None, [f"not on slides: {error}"]
    largest = max(found.cohorts, key=_classes, default=None)
    if largest is None or _classes(largest) < 3:
        return None, ["not on slides: no cohort with more than two classes is there", *found.missing]
    return largest, []


def with_coordinates(request: Request) -> StudyCohort:
    """The cohort that heat maps are drawn of: BRACS where it is there, as in the paper; else one of two classes with coordinates
    and instance truth; else any with coordinates."""
    ranked = []
    for cohort in find_cohorts(request).cohorts:
        coordinates, truth = _instance_facts(cohort)
        if coordinates:
            ranked.append((cohort.name != "bracs", not truth, _classes(cohort) > 2, cohort))
    if not ranked:
        raise CarmilError(
            "no cohort of slides has coordinates: there is nothing to draw maps on; features must come with them"
        )
    return min(ranked, key=lambda line: line[:3])[3]


def _classes(cohort: StudyCohort) -> int:
    return len(read_labels(cohort.labels).classes)


def _instance_facts(cohort: StudyCohort) -> tuple[bool, bool]:
    """Whether the tiles have coordinates, and a truth; of a folder of features the first bag decides."""
    if is_store(cohort.bags):
        entries = open_store(cohort.bags).entries
        return all(entry.unit is not None for entry in entries), all(entry.truth for entry in entries)
    first = read_bag(find_bags(cohort.bags).sources[0])
    return first.coordinates is not None, first.instance_labels is not None
