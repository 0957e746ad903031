"""Table 4: ABMIL and CAR-MIL on features of other encoders."""

from dataclasses import replace

from carmil.datasets.paper_cohorts import DATASETS
from carmil.datasets.paper_files import has_files
from carmil.report.paper import Finding
from carmil.reproduce.method_runs import train_methods
from carmil.reproduce.paper import ENCODERS, paper_table
from carmil.reproduce.recipes import Request
from carmil.reproduce.slide_cohorts import CohortSet, find_cohorts
from carmil.reproduce.slide_table import ABMIL, CAR_L1, differences, write_slide_finding

SLIDE_ENCODERS, STAND_IN_ENCODERS = ("uni", "resnet50"), ("resnet50", "pixels")
TITLE = "The paper's, ResNet50 features of TCGA; the distance of its CAR-MIL is not given"


def reproduce(request: Request) -> Finding:
    """Use the cohorts of slides with each encoder that any of them has; otherwise the stand-in with its own encoders."""
    present = [name for name in SLIDE_ENCODERS if any(has_files(request.data, dataset, name) for dataset in DATASETS)]
    rows, pairs, missing = [], [], dict[str, None]()
    for encoder in present or STAND_IN_ENCODERS:
        cohorts = find_cohorts(request, encoder=encoder)
        plain, car = (replace(one, title=f"{one.title}, {encoder}") for one in (ABMIL, CAR_L1))
        rows += train_methods(cohorts.cohorts, (plain, car), request)
        pairs.append((car, plain))
        missing |= dict.fromkeys(cohorts.missing)
    theirs = paper_table(ENCODERS, ("BRCA", "NSCLC", "LUAD"), TITLE)
    cohorts = CohortSet((), tuple(missing))
    return write_slide_finding("encoders", request, cohorts, rows, differences(rows, pairs), tables=(theirs,))
