"""Table 4: ABMIL and CAR-MIL on features of other encoders."""

from carmil.datasets.paper_cohorts import DATASETS
from carmil.reproduce.paper_slides import ENCODERS, paper_table
from carmil.reproduce.recipes import Asked, Finding
from carmil.reproduce.slide_cohorts import Found, cohorts_in, is_there
from carmil.reproduce.slide_runs import answered
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
from carmil.reproduce.written import written

OF_SLIDES, OF_THE_STAND_IN = ("uni", "resnet50"), ("resnet50", "pixels")
TITLE = "The paper's, ResNet50 features of TCGA; its CAR-MIL's distance is not said"


def reproduce(asked: Asked) -> Finding:
    tables, lines, rows, compared = [], [], [], []
    missing: dict[str, None] = {}
    for encoder, found in _found(asked).items():
        mine = answered(there(found), (ABMIL, CAR_L1), asked)
        between = differences(pairs_of(mine, (CAR_L1,), (ABMIL,)))
        tables += [figures_table(mine, f"Ours, {encoder} features"), difference_table(between)]
        lines += [f"{encoder} features: {line}" for line in (*in_words(between), *uninformed(mine))]
        missing |= dict.fromkeys(found.missing)
        rows += mine
        compared += between
    told = conditions(rows, Found((), tuple(missing)), asked)
    table = paper_table(ENCODERS, ("BRCA", "NSCLC", "LUAD"), TITLE)
    finding = Finding((*tables, table), lines=tuple(lines), conditions=(*READ, *told))
    return written("encoders", asked, finding, as_json(rows, compared))


def _found(asked: Asked) -> dict[str, Found]:
    """The cohorts by encoder: those of slides where any is there, else the stand-in's."""
    real = [name for name in OF_SLIDES if any(is_there(asked.data, dataset, name) for dataset in DATASETS)]
    return {name: cohorts_in(asked, encoder=name) for name in real or OF_THE_STAND_IN}
