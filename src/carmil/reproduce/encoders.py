"""Table 4: ABMIL and CAR-MIL on features of other encoders."""

from carmil.datasets.paper_cohorts import DATASETS
from carmil.datasets.paper_files import has_files
from carmil.reproduce.method_runs import train_methods
from carmil.reproduce.paper_slides import ENCODERS, paper_table
from carmil.reproduce.recipes import Finding, Request
from carmil.reproduce.slide_cohorts import CohortSet, find_cohorts
from carmil.reproduce.slide_table import ABMIL, CAR_L1, Difference, MethodComparison, pairs_of, write_slide_finding

SLIDE_ENCODERS, STAND_IN_ENCODERS = ("uni", "resnet50"), ("resnet50", "pixels")
TITLE = "The paper's, ResNet50 features of TCGA; the distance of its CAR-MIL is not given"


def reproduce(request: Request) -> Finding:
    """The cohorts of slides by each encoder that any of them has; else the stand-in's by its own."""
    present = [name for name in SLIDE_ENCODERS if any(has_files(request.data, dataset, name) for dataset in DATASETS)]
    compared: list[Difference] = []
    tables, lines, rows, missing = [], [], [], []
    for encoder in present or STAND_IN_ENCODERS:
        found = find_cohorts(request, encoder=encoder)
        own = train_methods(found.cohorts, (ABMIL, CAR_L1), request)
        beside = MethodComparison.of(own, pairs_of(own, (CAR_L1,), (ABMIL,)), f"Ours, {encoder} features")
        tables += beside.tables
        lines += [f"{encoder} features: {line}" for line in beside.lines]
        missing += [line for line in found.missing if line not in missing]
        rows += own
        compared += beside.differences
    theirs = paper_table(ENCODERS, ("BRCA", "NSCLC", "LUAD"), TITLE)
    found = CohortSet((), tuple(missing))
    return write_slide_finding("encoders", request, found, rows, compared, tables=(*tables, theirs), lines=lines)
