"""The appendix's comparison with WENO, which separates positive from negative bags and so is for two classes only."""

from carmil.reproduce.method_runs import Method, train_methods
from carmil.reproduce.paper_slides import WENO, paper_table
from carmil.reproduce.recipes import Finding, Request
from carmil.reproduce.slide_cohorts import find_cohorts
from carmil.reproduce.slide_table import ABMIL, CAR_L1, MethodComparison, pairs_of, write_slide_finding

COHORTS = ("luad_tp53", "camelyon16", "weak", "foci")  # the paper's two, and what stands in for them
METHOD = Method("WENO", "weno")
FIRST_MINING = 11  # epochs are counted from 0; the original's hard mining begins after its tenth
HOW = (
    "WENO is trained as the others are (the original: SGD, up to 1500 epochs, its last epoch), and taken at the epoch of its "
    f"teacher's lowest validation loss; its hard mining begins with epoch {FIRST_MINING}, counted from 0"
)


def reproduce(request: Request) -> Finding:
    found = find_cohorts(request).named(COHORTS)
    rows = train_methods(found.cohorts, (ABMIL, METHOD, CAR_L1), request)
    pairs = [*pairs_of(rows, (CAR_L1,), (METHOD, ABMIL)), *pairs_of(rows, (METHOD,), (ABMIL,))]
    compared = MethodComparison.of(rows, pairs)
    mining = []
    for row in rows:
        if row.method is METHOD:
            epochs = [model.best_epoch for model in row.run.models]
            late = sum(epoch >= FIRST_MINING for epoch in epochs)
            mining.append(
                f"{row.cohort.title}: WENO's models are of epochs {', '.join(map(str, epochs))}; {late} of {len(epochs)} had mined"
            )
    return write_slide_finding(
        "weno",
        request,
        found,
        rows,
        compared.differences,
        tables=(*compared.tables, paper_table(WENO, ("LUAD", "CAMELYON16"))),
        lines=(*compared.lines, *mining),
        conditions=(HOW,),
    )
