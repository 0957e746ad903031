"""The appendix's comparison with WENO, which is for two classes only, as it separates positive from negative bags."""

from carmil.report.paper import Finding
from carmil.reproduce.method_runs import Method, train_methods
from carmil.reproduce.paper import WENO, paper_table
from carmil.reproduce.recipes import Request
from carmil.reproduce.slide_cohorts import find_cohorts
from carmil.reproduce.slide_table import ABMIL, CAR_L1, differences, write_slide_finding
from carmil.tables import ResultTable

COHORTS = ("luad_tp53", "camelyon16", "weak", "foci")  # the two of the paper, and their stand-ins
METHOD = Method("WENO", "weno")
FIRST_MINING = 11  # counting from 0; in the original, hard mining begins after the tenth epoch
HOW = (
    "WENO is trained as the others are (the original: SGD, up to 1500 epochs, its last epoch), and taken at the epoch of its "
    f"teacher's lowest validation loss; its hard mining begins with epoch {FIRST_MINING}, counted from 0"
)


def reproduce(request: Request) -> Finding:
    cohort_set = find_cohorts(request).named(COHORTS)
    rows = train_methods(cohort_set.cohorts, (ABMIL, METHOD, CAR_L1), request)
    epochs = {row.cohort.title: [one.best_epoch for one in row.run.models] for row in rows if row.method is METHOD}
    mining = tuple(
        (
            cohort,
            ", ".join(map(str, of_models)),
            f"{sum(epoch >= FIRST_MINING for epoch in of_models)} of {len(of_models)}",
        )
        for cohort, of_models in epochs.items()
    )
    return write_slide_finding(
        "weno",
        request,
        cohort_set,
        rows,
        differences(rows, [(CAR_L1, METHOD), (CAR_L1, ABMIL), (METHOD, ABMIL)]),
        tables=(
            ResultTable("Epochs of WENO's models", ("cohort", "epochs", "after hard mining began"), mining),
            paper_table(WENO, ("LUAD", "CAMELYON16")),
        ),
        conditions=(HOW,),
    )
