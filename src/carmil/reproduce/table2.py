"""Table 2: five pathology tasks, all methods; and its claim that no attention-based method does significantly better than CAR."""

from collections.abc import Mapping, Sequence

from carmil.errors import CarmilError, unknown
from carmil.reproduce.method_runs import Method, train_methods
from carmil.reproduce.paper_slides import TABLE2, paper_table
from carmil.reproduce.recipes import Finding, Request
from carmil.reproduce.slide_cohorts import find_cohorts
from carmil.reproduce.slide_table import (
    ABMIL,
    CAR_COSINE,
    CAR_L1,
    MEASURES,
    Difference,
    MethodComparison,
    differences,
    pairs_of,
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
CHAMPIONS = (*CARS, ABMIL)  # the last, without CAR, is a control
SIGNIFICANCE = 0.05
CONTROL = (
    "ABMIL stands in that table beside CAR as a control: where nothing does significantly better than ABMIL either, the claim "
    "shows the power of these tests, not the worth of CAR"
)


def reproduce(request: Request, *, models: Sequence[str] = ()) -> Finding:
    """models: some of METHODS, by model or title; all if none is named."""
    for name in models:
        if not any(name in (method.title, method.model) for method in METHODS):
            raise CarmilError(unknown("model", name, list(dict.fromkeys(method.model for method in METHODS))))
    methods = [method for method in METHODS if not models or method.title in models or method.model in models]
    found = find_cohorts(request)
    rows = train_methods(found.cohorts, methods, request)
    beside = MethodComparison.of(rows, pairs_of(rows, CARS, (ABMIL,)))
    rivals = [method for method in methods if method not in (*POOLING, *CARS)]
    claims = {
        champion.title: differences(pairs_of(rows, (champion,), [rival for rival in rivals if rival != champion]))
        for champion in CHAMPIONS
    }
    return write_slide_finding(
        "table2",
        request,
        found,
        rows,
        [*beside.differences, *(one for claim in claims.values() for one in claim)],
        tables=(*beside.tables, *claim_tables(claims), paper_table(TABLE2)),
        lines=(*beside.lines, *claim_lines(claims)),
    )


def claim_tables(claims: Mapping[str, Sequence[Difference]]) -> list[ResultTable]:
    """The methods that do better than each champion: by the paper's test, and by the interval over test cases."""
    known = {champion: compared for champion, compared in claims.items() if compared}
    lines = []
    for title, measure in {(one.cohort.title, one.measure): None for compared in known.values() for one in compared}:
        cells = []
        for compared in known.values():
            own = [one for one in compared if one.informed and (one.cohort.title, one.measure) == (title, measure)]
            names = [", ".join(_better(own, test)) or "none" for test in ("t", "cases")]
            cells.append("; ".join(names) if own else "–")
        lines.append((title, MEASURES[measure], *cells))
    heads = ("cohort", "measure", *(f"better than {champion}" for champion in known))
    title = "Attention-based methods that do better: by paired t (5 %, Holm); by the 95 % interval over test cases (not corrected)"
    return [ResultTable(title, heads, tuple(lines), names=2 + len(known))] if lines else []


def claim_lines(claims: Mapping[str, Sequence[Difference]]) -> list[str]:
    """The paper's claim by our runs, for each champion."""
    lines = []
    for champion, compared in claims.items():
        if not compared:
            continue
        counted = [one for one in compared if one.informed]
        by_t, by_cases = (_better(counted, test, where=True) for test in ("t", "cases"))
        left = len(compared) - len(counted)
        idle = f" ({left} more, of two that predict no better than the class frequencies, are left out)" if left else ""
        better = f"in {len(by_t)} the other better ({', '.join(by_t)})" if by_t else "in none the other better"
        lines.append(
            f"of {len(counted)} comparisons of {champion} with attention-based methods{idle} the paired t-test, corrected, finds "
            f"{better}; the interval over test cases, which is not corrected, in {len(by_cases) or 'none'}"
        )
    if claims.get(ABMIL.title) and any(claims[car.title] for car in CARS):
        lines.append(CONTROL)
    return lines


def _better(compared: Sequence[Difference], test: str, *, where: bool = False) -> list[str]:
    """The second methods that are significantly better by a test; `where`: with cohort and measure."""
    names = []
    for one in compared:
        pair = one.comparison
        if (pair.holm_t < SIGNIFICANCE and pair.difference < 0) if test == "t" else pair.high < 0:
            names.append(f"{pair.second} on {one.cohort.title} by {MEASURES[one.measure]}" if where else pair.second)
    return names
