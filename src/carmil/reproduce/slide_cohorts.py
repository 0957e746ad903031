"""The cohorts of slides for a recipe: those of the paper in DATA, otherwise a stand-in made from crc's nuclei."""

from collections.abc import Collection
from dataclasses import dataclass

from carmil.bags.finding import find_bags
from carmil.bags.labels import read_labels
from carmil.bags.readers import read_bag
from carmil.bags.store import is_store, open_store
from carmil.datasets.paper_cohorts import DATASETS
from carmil.datasets.paper_files import has_files, missing_files, study_cohort
from carmil.datasets.stand_in import build_stand_in
from carmil.datasets.study_cohort import StudyCohort
from carmil.errors import CarmilError
from carmil.reproduce.recipes import Request


@dataclass(frozen=True)
class CohortSet:
    """The available cohorts, and one line for each missing cohort with the files that were expected."""

    cohorts: tuple[StudyCohort, ...]
    missing: tuple[str, ...]

    def named(self, names: Collection[str]) -> "CohortSet":
        """Return the cohorts of these names; at least one must be available."""
        chosen = tuple(cohort for cohort in self.cohorts if cohort.name in names)
        if not chosen:
            raise CarmilError(f"none of {', '.join(names)} is available: {'; '.join(self.missing)}")
        return CohortSet(chosen, self.missing)


def find_cohorts(request: Request, *, encoder: str | None = None) -> CohortSet:
    """Return the paper's cohorts in DATA with features of the encoder, or the stand-in if there is none; at least one.

    A cohort that exists but cannot be used is listed as missing, with the reason.
    """
    encoder = encoder or request.encoder
    present = [dataset for dataset in DATASETS if has_files(request.data, dataset, encoder)]
    missing = [missing_files(request.data, dataset, encoder) for dataset in DATASETS if dataset not in present]
    if request.data is None or not present:
        return CohortSet(_stand_in(request, encoder), tuple(missing))
    cohorts = []
    for dataset in present:
        try:
            cohorts.append(study_cohort(dataset, request.data, encoder))
        except CarmilError as error:
            missing.append(f"{dataset.title} cannot be used: {error}")
    if not cohorts:
        raise CarmilError(f"no cohort of slides is available: {'; '.join(missing)}")
    return CohortSet(tuple(cohorts), tuple(missing))


def _stand_in(request: Request, encoder: str) -> tuple[StudyCohort, ...]:
    crc = request.folder("crc")
    if crc is None:
        data = (
            "no DATA was given"
            if request.data is None
            else f"{request.data} has none of them, and no crc for a stand-in"
        )
        names = ", ".join(dataset.name for dataset in DATASETS)
        raise CarmilError(
            f"no slides found: expected DATA/NAME/labels.csv and DATA/NAME/{encoder} of one of {names}; "
            f"{data}; `carmil dataset show NAME` shows how to make them"
        )
    return build_stand_in(crc, request.shared / "stand-in", fast=request.fast, seed=request.seed, encoder=encoder)


def several_classes(request: Request) -> tuple[StudyCohort | None, list[str]]:
    """Return the cohort with the most classes, if any has more than two (BRACS if it is available); otherwise the reason."""
    try:
        cohort_set = find_cohorts(request)
    except CarmilError as error:
        return None, [f"not on slides: {error}"]
    largest = max(cohort_set.cohorts, key=_classes, default=None)
    if largest is None or _classes(largest) < 3:
        return None, ["not on slides: no cohort with more than two classes is there", *cohort_set.missing]
    return largest, []


def with_coordinates(request: Request) -> StudyCohort:
    """Return the cohort for heat maps.

    It is BRACS, as in the paper, if available; otherwise one of two classes with coordinates and instance truth;
    otherwise any cohort with coordinates."""
    ranked = []
    for cohort in find_cohorts(request).cohorts:
        coordinates, truth = _instance_facts(cohort)
        if coordinates:
            ranked.append((cohort.name != "bracs", not truth, _classes(cohort) > 2, cohort))
    if not ranked:
        raise CarmilError("no cohort of slides has coordinates, which heat maps need: expected them with the features")
    return min(ranked, key=lambda line: line[:3])[3]


def _classes(cohort: StudyCohort) -> int:
    return len(read_labels(cohort.labels).classes)


def _instance_facts(cohort: StudyCohort) -> tuple[bool, bool]:
    """Return whether the tiles have coordinates, and a truth; in a folder of features this is decided by the first bag."""
    if is_store(cohort.bags):
        entries = open_store(cohort.bags).entries
        return all(entry.unit is not None for entry in entries), all(entry.truth for entry in entries)
    first = read_bag(find_bags(cohort.bags).sources[0])
    return first.coordinates is not None, first.instance_labels is not None
