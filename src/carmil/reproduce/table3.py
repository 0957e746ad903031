"""Table 3: CAR on ABMIL, DSMIL and TransMIL. The paper shows the better of two distances; here validation bags choose."""

from carmil.reproduce.method_runs import Method, MethodRun, select_by_fold, train_methods
from carmil.reproduce.paper_slides import TABLE3, paper_table
from carmil.reproduce.recipes import Finding, Request
from carmil.reproduce.slide_cohorts import find_cohorts
from carmil.reproduce.slide_table import ABMIL, MethodComparison, write_slide_finding
from carmil.tables import ResultTable

BASES = {"CAR-MIL": ABMIL, "CAR-DSMIL": Method("DSMIL", "dsmil"), "CAR-TransMIL": Method("TransMIL", "transmil")}
DISTANCES: dict[str, dict[str, str]] = {"L1": {}, "cosine": {"distance": "cosine"}}
SELECTION = (
    "the distance is chosen on validation bags, by each fold and run for itself: no test bag takes part. The paper's rows show for "
    "each cohort the better of both by test figures, which is too optimistic"
)


def reproduce(request: Request) -> Finding:
    found = find_cohorts(request)
    variants = {
        title: [Method(f"{title} ({name})", f"car/{base.model}", settings) for name, settings in DISTANCES.items()]
        for title, base in BASES.items()
    }
    methods = [method for title, base in BASES.items() for method in (base, *variants[title])]
    runs = {(row.cohort.name, row.method.title): row for row in train_methods(found.cohorts, methods, request)}
    rows: list[MethodRun] = []
    pairs, choices = [], []
    for title, base in BASES.items():
        counts = []
        for cohort in found.cohorts:
            plain, *alternatives = (runs[cohort.name, method.title] for method in (base, *variants[title]))
            row, choice = select_by_fold(alternatives, title)
            rows += [plain, row]
            pairs.append((row, plain))
            taken = list(choice.taken.values())
            counts.append(", ".join(f"{name} {taken.count(i)}" for i, name in enumerate(DISTANCES)))
        choices.append((title, *counts))
    compared = MethodComparison.of(rows, pairs)
    heads = ("model", *(cohort.title for cohort in found.cohorts))
    chosen = ResultTable("Folds, or runs, whose validation bags chose each distance", heads, tuple(choices))
    return write_slide_finding(
        "table3",
        request,
        found,
        rows,
        compared.differences,
        tables=(*compared.tables, chosen, paper_table(TABLE3)),
        lines=compared.lines,
        conditions=(SELECTION,),
    )
