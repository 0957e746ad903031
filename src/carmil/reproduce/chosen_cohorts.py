"""Which cohort of slides a figure is of, where one is enough."""

from carmil.bags.finding import find_bags
from carmil.bags.labels import read_labels
from carmil.bags.readers import read_bag
from carmil.bags.store import is_store, open_store
from carmil.datasets.study_cohort import StudyCohort
from carmil.errors import CarmilError
from carmil.reproduce import slide_cohorts
from carmil.reproduce.recipes import Request


def several_classes(request: Request) -> tuple[StudyCohort | None, list[str]]:
    """The cohort with the most classes, if any has more than two: BRACS where it is there. If none, what there is to say."""
    try:
        found = slide_cohorts.cohorts_in(request)
    except CarmilError as error:
        return None, [f"not on slides: {error}"]
    classes = {one.name: _classes(one) for one in found.cohorts}
    several = [one for one in found.cohorts if classes[one.name] > 2]
    if not several:
        return None, ["not on slides: no cohort with more than two classes is there", *found.missing]
    return max(several, key=lambda one: classes[one.name]), []


def with_places(request: Request) -> StudyCohort:
    """The cohort that heat maps are drawn of: BRACS where it is there, as in the paper; else one of two classes whose tiles have
    places and are known to be of the class or not; else any whose tiles have places."""
    found = slide_cohorts.cohorts_in(request)
    known = [(one, *_known_of(one)) for one in found.cohorts]
    placed = [(one, truth) for one, places, truth in known if places]
    if not placed:
        raise CarmilError(
            "no cohort of slides has coordinates: there is nothing to draw maps on; features must come with them"
        )
    return min(placed, key=lambda line: (line[0].name != "bracs", not line[1], _classes(line[0]) > 2))[0]


def _classes(cohort: StudyCohort) -> int:
    return len(read_labels(cohort.labels).classes)


def _known_of(cohort: StudyCohort) -> tuple[bool, bool]:
    """Whether its tiles have places, and whether it is known what they are; of a folder of features the first bag is asked."""
    if is_store(cohort.bags):
        entries = open_store(cohort.bags).entries
        return all(one.unit is not None for one in entries), all(one.truth for one in entries)
    first = read_bag(find_bags(cohort.bags).sources[0])
    return first.coordinates is not None, first.instance_labels is not None
