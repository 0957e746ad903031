"""Table 2: five pathology tasks, all methods; and the claim that no attention-based method is significantly better than CAR."""

from collections.abc import Callable, Mapping, Sequence

from carmil.errors import CarmilError, unknown
from carmil.report.paper import Finding
from carmil.reproduce.method_runs import Method, train_methods
from carmil.reproduce.paper import TABLE2, paper_table
from carmil.reproduce.recipes import Request
from carmil.reproduce.slide_cohorts import find_cohorts
from carmil.reproduce.slide_table import (
    ABMIL,
    CAR_COSINE,
    CAR_L1,
    MEASURES,
    Difference,
    differences,
    write_slide_finding,
)
from carmil.tables import ResultTable

CARS = (CAR_L1, CAR_COSINE)
POOLING = (Method("Mean", "mean"), Method("Max", "max"))  # without attention
METHODS = (
    *POOLING,
    Method("CLAM", "clam.sb"),
    Method("AddMIL", "additive"),
    Method("DSMIL", "dsmil"),
    Method("TransMIL", "transmil"),
    Method("ACMIL", "acmil"),
    Method("RRT-MIL", "rrt"),
    Method("CIA-MIL", "cia/abmil.gated"),
    ABMIL,
    *CARS,
)
CHAMPIONS = (*CARS, ABMIL)  # the last one, without CAR, is a control
SIGNIFICANCE = 0.05
CLAIM = (
    "the paper's claim is that no attention-based method is significantly better than CAR, by the paired t-test. ABMIL is a "
    "control: where no method is better than ABMIL either, the claim shows the power of these tests, not the worth of CAR. Left "
    "out are comparisons of two methods that predict no better than the class frequencies"
)


def reproduce(request: Request, *, models: Sequence[str] = ()) -> Finding:
    """Reproduce the table. models: some of METHODS, by model or title; by default all."""
    for name in models:
        if not any(name in (method.title, method.model) for method in METHODS):
            raise CarmilError(unknown("model", name, list(dict.fromkeys(method.model for method in METHODS))))
    methods = [method for method in METHODS if not models or method.title in models or method.model in models]
    cohort_set = find_cohorts(request)
    rows = train_methods(cohort_set.cohorts, methods, request)
    rivals = [method for method in METHODS if method not in (*POOLING, *CARS)]
    claims = {
        champion.title: differences(rows, [(champion, rival) for rival in rivals if rival != champion])
        for champion in CHAMPIONS
    }
    tested = any(claims[car.title] for car in CARS)
    return write_slide_finding(
        "table2",
        request,
        cohort_set,
        rows,
        differences(rows, [(car, ABMIL) for car in CARS]),
        others=[one for claim in claims.values() for one in claim],
        tables=(*([claim_table(claims)] if tested else []), paper_table(TABLE2)),
        conditions=(CLAIM,) if tested else (),
    )


def claim_table(claims: Mapping[str, Sequence[Difference]]) -> ResultTable:
    """Tabulate one row per champion: the methods that are better by the paper's test, and by the interval over test cases."""
    lines = []
    for champion, compared in claims.items():
        counted = [one for one in compared if one.informed]
        by_t = _better(counted, lambda one: one.comparison.holm_t < SIGNIFICANCE and one.comparison.difference < 0)
        by_cases = _better(counted, lambda one: one.comparison.high < 0)
        lines.append((champion, str(len(counted)), str(len(compared) - len(counted)), by_t, by_cases))
    tests = ("better by paired t (5 %, Holm)", "better by the 95 % interval over test cases (not corrected)")
    heads = ("method", "compared", "left out", *tests)
    return ResultTable("Attention-based methods that do better than CAR, or ABMIL", heads, tuple(lines))


def _better(compared: Sequence[Difference], test: Callable[[Difference], bool]) -> str:
    names = [
        f"{one.comparison.second} on {one.cohort.title} by {MEASURES[one.measure]}" for one in compared if test(one)
    ]
    return ", ".join(names) or "none"
