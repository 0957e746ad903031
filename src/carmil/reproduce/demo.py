"""The demo: digit bags, ABMIL and CAR-MIL as ordinary runs, and the report of the evidence for and against each answer."""

from dataclasses import dataclass, replace
from pathlib import Path

from carmil.datasets.digit_cohorts import DIGITS, FAST_SIZES, load_digits
from carmil.explanations.explain import explain_run
from carmil.report.run import write_report
from carmil.reproduce.digits import digit_methods
from carmil.reproduce.method_runs import quietly, train_methods
from carmil.reproduce.recipes import Request
from carmil.reproduce.table1 import MEASURES, agreement_rows, maps_of, row_table
from carmil.tables import ResultTable

MODELS = ("abmil", "car/abmil")
TASKS = ("four_bags", "adjacent_pairs")
SIZES = (2000, 500, 200)  # all test bags are explained
PROTOCOL = replace(DIGITS, seeds=3, epochs=100, patience=20, lr=4e-3)
FAST = replace(PROTOCOL, seeds=2, epochs=12, patience=10, warmup=2)


@dataclass(frozen=True)
class Demo:
    """The output of the demo: one report per CAR-MIL run, that of Four Bags first, and one table per task."""

    reports: tuple[Path, ...]
    tables: tuple[ResultTable, ...]


def run_demo(out: Path, *, fast: bool = False, device: str = "cpu") -> Demo:
    """Train, explain and report; everything is written under `out`.

    fast: fewer bags and epochs, for a quick trial; the answers are worse.
    """
    request, protocol = Request(out=out, shared=out, device=device), FAST if fast else PROTOCOL
    data = load_digits(sizes=FAST_SIZES if fast else SIZES)
    cohorts = [
        replace(data.cohort(task, out / "cohorts", protocol), folder=f"{task}{'-fast' * fast}") for task in TASKS
    ]
    runs = train_methods(cohorts, digit_methods(MODELS), request)
    tables = []
    for cohort in cohorts:
        here = [one for one in runs if one.cohort == cohort]
        rows = [row for one in here for row in agreement_rows(one, maps_of(one.method.model), request)]
        # The demo's bags differ from the paper's, so its table leaves out the paper's figures.
        tables.append(row_table(cohort, [replace(row, paper={}) for row in rows], MEASURES))
    reports = []
    for one in runs:
        if one.method.model.startswith("car/"):
            explain_run(one.run.folder, None, bags=None, methods=(), searched=False, device=device, log=quietly)
            reports.append(out / ("report.html" if one.cohort.name == TASKS[0] else f"report_{one.cohort.name}.html"))
            write_report(one.run, reports[-1])
    return Demo(tuple(reports), tuple(tables))
