"""Figure 3: the effect of alpha, lambda and the distance. All grid points, and the plain model, are one population."""

from dataclasses import replace
from typing import Any

from carmil.datasets.study_cohort import StudyCohort
from carmil.report.paper import Finding, Picture
from carmil.report.sensitivity import write_picture
from carmil.report.sweep import CHOSEN, IDLE, sweep_table
from carmil.reproduce.method_runs import Method, MethodRun, quietly, select_by_fold, study_settings
from carmil.reproduce.paper import SENSITIVITY
from carmil.reproduce.recipes import Request
from carmil.reproduce.slide_cohorts import find_cohorts
from carmil.reproduce.slide_table import ABMIL, CAR_L1, differences, write_slide_finding
from carmil.studies.point_selection import choose
from carmil.studies.sweep import Sweep, SweepResult, run_sweep, sweep_of

COHORTS = ("brca", "luad_tp53", "crc", "weak")  # the two of the paper, and their stand-ins
GRID, FAST_GRID = [0.2, 0.8, 1.0], [0.2, 1.0]
DISTANCES = ["l1", "cosine"]
CHOSEN_CAR = Method("CAR-MIL, chosen by fold", CAR_L1.model)
HOW = (
    "a single run, as the paper's: one initialisation of every fold, the same for all points; the paper does not say which fold "
    "its figures are of",
    f"{CHOSEN} the point chosen on validation bags; {IDLE} the branch has no weight: ABMIL but for rounding. Test AUCs of all "
    "points show how much the weights matter: to take the best of them is to choose on the test set",
    "CAR-MIL, chosen by fold: of the points with CAR each fold takes that of its own lowest validation loss; no test bag takes "
    "part. The last line of a grid may take the plain model, too",
)


def reproduce(request: Request) -> Finding:
    cohorts = find_cohorts(request).named(COHORTS)
    tables, pictures = [], []
    rows: list[MethodRun] = []
    for cohort in cohorts.cohorts:
        swept = sweep_cohort(cohort, request)
        choice = choose(swept.runs)
        title = f"{cohort.title}: mean ± standard deviation over the folds, per cent"
        tables.append(replace(sweep_table(swept, choice), title=title))
        path = request.out / f"hyperparameters_{cohort.name}.png"
        pictures.append(Picture(path, f"{cohort.title}. {write_picture(swept, choice.best, path)}"))
        rows += _methods(cohort, swept)
    return write_slide_finding(
        "hyperparameters",
        request,
        cohorts,
        rows,
        differences(rows, [(CHOSEN_CAR, ABMIL)]),
        tables=tables,
        pictures=pictures,
        lines=(SENSITIVITY,),
        conditions=HOW,
        weights="CAR's weights: the grid's",
    )


def sweep_cohort(cohort: StudyCohort, request: Request) -> SweepResult:
    """Sweep the grid and, for both distances, alpha = lambda = 0, as one population; every point is a run."""
    settings: dict[str, Any] = study_settings(cohort, CAR_L1.model, request, "alpha-lambda-distance", seeds=1)
    values = FAST_GRID if request.fast else GRID
    where = f"{cohort.name}, alpha and lambda"
    grid = sweep_of(settings, {"alpha": values, "lambda_": values, "distance": DISTANCES}, where=where)
    plain = sweep_of(settings, {"alpha": [0.0], "lambda_": [0.0], "distance": DISTANCES}, where=where)
    return run_sweep(Sweep(grid.out, grid.over, (*plain.points, *grid.points)), log=quietly)


def _methods(cohort: StudyCohort, swept: SweepResult) -> list[MethodRun]:
    """Return the plain model, and CAR with the weights and distance selected on each fold's validation bags."""
    points = list(zip(swept.sweep.points, swept.runs, strict=True))
    cars = [MethodRun.of(cohort, Method(point.name, CAR_L1.model), run) for point, run in points if not point.idle]
    plain = next(run for point, run in points if point.idle)
    return [MethodRun.of(cohort, ABMIL, plain), select_by_fold(cars, CHOSEN_CAR.title)[0]]
