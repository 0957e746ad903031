"""Table 3: CAR on ABMIL, DSMIL and TransMIL. The paper reports the better of two distances; here validation bags decide."""

from carmil.report.paper import Finding
from carmil.reproduce.method_runs import Method, MethodRun, select_by_fold, train_methods
from carmil.reproduce.paper import TABLE3, paper_table
from carmil.reproduce.recipes import Request
from carmil.reproduce.slide_cohorts import find_cohorts
from carmil.reproduce.slide_table import ABMIL, differences, write_slide_finding
from carmil.tables import ResultTable

BASES = {"CAR-MIL": ABMIL, "CAR-DSMIL": Method("DSMIL", "dsmil"), "CAR-TransMIL": Method("TransMIL", "transmil")}
DISTANCES: dict[str, dict[str, str]] = {"L1": {}, "cosine": {"distance": "cosine"}}
SELECTION = (
    "the distance is chosen on validation bags, by each fold and run for itself: no test bag takes part. The paper's rows show for "
    "each cohort the better of both by test figures, which is too optimistic"
)


def reproduce(request: Request) -> Finding:
    cohort_set = find_cohorts(request)
    families = {
        title: [base, *(Method(f"{title} ({name})", f"car/{base.model}", given) for name, given in DISTANCES.items())]
        for title, base in BASES.items()
    }
    methods = [method for family in families.values() for method in family]
    runs = {(row.cohort.name, row.method.title): row for row in train_methods(cohort_set.cohorts, methods, request)}
    rows: list[MethodRun] = []
    choices = []
    for title, family in families.items():
        counts = []
        for cohort in cohort_set.cohorts:
            plain, *alternatives = (runs[cohort.name, method.title] for method in family)
            row, choice = select_by_fold(alternatives, title)
            rows += [plain, row]
            taken = list(choice.taken.values())
            counts.append(", ".join(f"{name} {taken.count(i)}" for i, name in enumerate(DISTANCES)))
        choices.append((title, *counts))
    heads = ("model", *(cohort.title for cohort in cohort_set.cohorts))
    chosen = ResultTable("Folds, or runs, whose validation bags chose each distance", heads, tuple(choices))
    return write_slide_finding(
        "table3",
        request,
        cohort_set,
        rows,
        differences(rows, [(Method(title, base.model), base) for title, base in BASES.items()]),
        tables=(chosen, paper_table(TABLE3)),
        conditions=(SELECTION,),
    )
