"""The appendix's comparison with WENO, which tells positive bags from negative ones and so is for two classes only."""

from collections.abc import Sequence

from carmil.reproduce.method_runs import Method, MethodRun, train_methods
from carmil.reproduce.paper_slides import WENO, paper_table
from carmil.reproduce.recipes import Finding, Request, write_finding
from carmil.reproduce.slide_cohorts import Found, cohorts_in
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

COHORTS = ("luad_tp53", "camelyon16", "weak", "foci")  # the paper's two, and what stands in for them
DISTILLED = Method("WENO", "weno")
FIRST_MINED = 11  # epochs are counted from 0; the original's hard mining begins after its tenth
HOW = (
    "WENO is trained as the others are (the original: SGD, up to 1500 epochs, its last epoch), and taken at the epoch of its "
    f"teacher's lowest validation loss; its hard mining begins with epoch {FIRST_MINED}, counted from 0"
)


def reproduce(request: Request) -> Finding:
    found = cohorts_in(request)
    mine = Found(tuple(one for one in there(found) if one.name in COHORTS), found.missing)
    rows = train_methods(there(mine), (ABMIL, DISTILLED, CAR_L1), request)
    pairs = [*pairs_of(rows, (CAR_L1,), (DISTILLED, ABMIL)), *pairs_of(rows, (DISTILLED,), (ABMIL,))]
    compared = differences(pairs)
    tables = (figures_table(rows), difference_table(compared), paper_table(WENO, ("LUAD", "CAMELYON16")))
    lines = (*in_words(compared), *uninformed(rows), *mined([one for one in rows if one.method is DISTILLED]))
    finding = Finding(tables, lines=lines, conditions=(HOW, *READ, *conditions(rows, mine, request)))
    return write_finding("weno", request, finding, as_json(rows, compared))


def mined(rows: Sequence[MethodRun]) -> list[str]:
    """By which epoch WENO is taken, and whether its student had a say by then."""
    lines = []
    for row in rows:
        epochs = [model.best_epoch for model in row.run.models]
        late = sum(epoch >= FIRST_MINED for epoch in epochs)
        lines.append(
            f"{row.cohort.title}: WENO's models are of epochs {', '.join(map(str, epochs))}; {late} of {len(epochs)} had mined"
        )
    return lines
