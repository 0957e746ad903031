"""Table 3: CAR on ABMIL, DSMIL and TransMIL. The paper shows the better of two distances; here validation bags choose."""

from carmil.datasets.study_cohort import StudyCohort
from carmil.reproduce.method_runs import Method, MethodRun, select_by_fold, train_methods
from carmil.reproduce.paper_slides import TABLE3, paper_table
from carmil.reproduce.recipes import Finding, Request, write_finding
from carmil.reproduce.slide_cohorts import cohorts_in
from carmil.reproduce.slide_table import (
    ABMIL,
    READ,
    as_json,
    conditions,
    difference_table,
    differences,
    figures_table,
    in_words,
    there,
    uninformed,
)
from carmil.studies.point_selection import Choice
from carmil.tables import ResultTable

BASES = {"CAR-MIL": ABMIL, "CAR-DSMIL": Method("DSMIL", "dsmil"), "CAR-TransMIL": Method("TransMIL", "transmil")}
DISTANCES: dict[str, dict[str, str]] = {"L1": {}, "cosine": {"distance": "cosine"}}
CHOSEN = (
    "the distance is chosen by validation bags, each fold and run by its own: no test bag has a say. The paper's rows show for "
    "each cohort the better of both by test figures, which promises more than it keeps"
)


def reproduce(request: Request) -> Finding:
    found = cohorts_in(request)
    several = {
        title: [Method(f"{title} ({name})", f"car/{base.model}", words) for name, words in DISTANCES.items()]
        for title, base in BASES.items()
    }
    methods = [one for title, base in BASES.items() for one in (base, *several[title])]
    of = {(one.cohort.name, one.method.title): one for one in train_methods(there(found), methods, request)}
    rows: list[MethodRun] = []
    pairs, choices = [], []
    for title, base in BASES.items():
        for cohort in there(found):
            plain, *alternatives = (of[cohort.name, one.title] for one in (base, *several[title]))
            row, choice = select_by_fold(alternatives, title)
            rows += [plain, row]
            pairs.append((row, plain))
            choices.append((title, cohort, choice))
    compared = differences(pairs)
    tables = (figures_table(rows), difference_table(compared), _choices(choices), paper_table(TABLE3))
    finding = Finding(
        tables,
        lines=(*in_words(compared), *uninformed(rows)),
        conditions=(CHOSEN, *READ, *conditions(rows, found, request)),
    )
    return write_finding("table3", request, finding, as_json(rows, compared))


def _choices(choices: list[tuple[str, StudyCohort, Choice]]) -> ResultTable:
    """How many folds, or runs, took each distance."""
    cohorts = list(dict.fromkeys(cohort.title for _, cohort, _ in choices))
    of = {(title, cohort.title): list(choice.taken.values()) for title, cohort, choice in choices}
    lines = tuple(
        (
            title,
            *(
                ", ".join(f"{name} {of[title, cohort].count(i)}" for i, name in enumerate(DISTANCES))
                for cohort in cohorts
            ),
        )
        for title in BASES
    )
    return ResultTable("Folds, or runs, whose validation bags chose each distance", ("model", *cohorts), lines)
