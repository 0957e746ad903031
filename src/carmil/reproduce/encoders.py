"""Table 4: ABMIL and CAR-MIL on features of other encoders."""

from carmil.datasets.paper_cohorts import DATASETS
from carmil.reproduce.method_runs import train_methods
from carmil.reproduce.paper_slides import ENCODERS, paper_table
from carmil.reproduce.recipes import Finding, Request, write_finding
from carmil.reproduce.slide_cohorts import Found, cohorts_in, is_there
from carmil.reproduce.slide_table import (
    ABMIL,
    CAR_L1,
    READ,
    as_json,
    conditions,
    difference_table,
    differences,
    figures_table,
    in_words,
    pairs_of,
    there,
    uninformed,
)

OF_SLIDES, OF_THE_STAND_IN = ("uni", "resnet50"), ("resnet50", "pixels")
TITLE = "The paper's, ResNet50 features of TCGA; its CAR-MIL's distance is not said"


def reproduce(request: Request) -> Finding:
    tables, lines, rows, compared = [], [], [], []
    missing: dict[str, None] = {}
    for encoder, found in _found(request).items():
        mine = train_methods(there(found), (ABMIL, CAR_L1), request)
        between = differences(pairs_of(mine, (CAR_L1,), (ABMIL,)))
        tables += [figures_table(mine, f"Ours, {encoder} features"), difference_table(between)]
        lines += [f"{encoder} features: {line}" for line in (*in_words(between), *uninformed(mine))]
        missing |= dict.fromkeys(found.missing)
        rows += mine
        compared += between
    told = conditions(rows, Found((), tuple(missing)), request)
    table = paper_table(ENCODERS, ("BRCA", "NSCLC", "LUAD"), TITLE)
    finding = Finding((*tables, table), lines=tuple(lines), conditions=(*READ, *told))
    return write_finding("encoders", request, finding, as_json(rows, compared))


def _found(request: Request) -> dict[str, Found]:
    """The cohorts by encoder: those of slides where any is there, else the stand-in's."""
    real = [name for name in OF_SLIDES if any(is_there(request.data, dataset, name) for dataset in DATASETS)]
    return {name: cohorts_in(request, encoder=name) for name in real or OF_THE_STAND_IN}
