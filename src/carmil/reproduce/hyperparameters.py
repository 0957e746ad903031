"""Figure 3: how much alpha, lambda and the distance matter. All points of the grid, and the plain model, are one population."""

from dataclasses import replace
from math import isnan
from typing import Any

import numpy as np

from carmil.datasets.study_cohort import StudyCohort
from carmil.report.sensitivity import write_picture
from carmil.report.sweep import CHOSEN, IDLE, sweep_table
from carmil.reproduce.method_runs import Method, MethodRun, quietly, select_by_fold, study_settings
from carmil.reproduce.paper_slides import SENSITIVITY
from carmil.reproduce.recipes import Finding, Picture, Request
from carmil.reproduce.slide_cohorts import find_cohorts
from carmil.reproduce.slide_table import ABMIL, CAR_L1, MethodComparison, Pair, write_slide_finding
from carmil.studies.point_selection import choose
from carmil.studies.sweep import Sweep, SweepResult, run_sweep, sweep_of

COHORTS = ("brca", "luad_tp53", "crc", "weak")  # the paper's two, and what stands in for them
GRID, FAST_GRID = [0.2, 0.8, 1.0], [0.2, 1.0]
DISTANCES = ["l1", "cosine"]
HOW = (
    "a single run, as the paper's: one initialisation of every fold, the same for all points; the paper does not say which fold "
    "its figures are of",
    f"{CHOSEN} the point chosen on validation bags; {IDLE} the branch has no weight: ABMIL but for rounding. Test AUCs of all "
    "points show how much the weights matter: to take the best of them is to choose on the test set",
    "CAR-MIL, chosen by fold: of the points with CAR each fold takes that of its own lowest validation loss; no test bag takes "
    "part. The table's last line may take the plain model, too",
)


def reproduce(request: Request) -> Finding:
    found = find_cohorts(request).named(COHORTS)
    tables, pictures, lines, pairs = [], [], [], []
    for cohort in found.cohorts:
        swept = sweep_cohort(cohort, request)
        choice = choose(swept.runs)
        title = f"{cohort.title}: mean ± standard deviation over the folds, per cent"
        tables.append(replace(sweep_table(swept, choice), title=title))
        path = request.out / f"hyperparameters_{cohort.name}.png"
        pictures.append(Picture(path, f"{cohort.title}. {write_picture(swept, choice.best, path)}"))
        pairs.append(_pair(cohort, swept))
        lines.append(_range(cohort, swept))
    compared = MethodComparison.of([row for car, plain in pairs for row in (plain, car)], pairs)
    return write_slide_finding(
        "hyperparameters",
        request,
        found,
        compared.rows,
        compared.differences,
        tables=(*tables, *compared.tables[1:]),
        pictures=pictures,
        lines=(*lines, *compared.lines, SENSITIVITY),
        conditions=HOW,
        weights="CAR's weights: the grid's",
    )


def sweep_cohort(cohort: StudyCohort, request: Request) -> SweepResult:
    """The grid and, for both distances, alpha = lambda = 0: one population, every point a run of its own."""
    settings: dict[str, Any] = study_settings(cohort, CAR_L1.model, request, "alpha-lambda-distance", seeds=1)
    values = FAST_GRID if request.fast else GRID
    where = f"{cohort.name}, alpha and lambda"
    grid = sweep_of(settings, {"alpha": values, "lambda_": values, "distance": DISTANCES}, where=where)
    plain = sweep_of(settings, {"alpha": [0.0], "lambda_": [0.0], "distance": DISTANCES}, where=where)
    return run_sweep(Sweep(grid.out, grid.over, (*plain.points, *grid.points)), log=quietly)


def _pair(cohort: StudyCohort, swept: SweepResult) -> Pair:
    """CAR with the weights and distance that each fold's validation bags choose, and the plain model."""
    points = list(zip(swept.sweep.points, swept.runs, strict=True))
    cars = [MethodRun.of(cohort, Method(point.name, CAR_L1.model), run) for point, run in points if not point.idle]
    plain = next(run for point, run in points if point.idle)
    return select_by_fold(cars, "CAR-MIL, chosen by fold,")[0], MethodRun.of(cohort, ABMIL, plain)


def _range(cohort: StudyCohort, swept: SweepResult) -> str:
    """How far the points of the grid lie apart, beside how far the folds of one do."""
    points = [(point, run.metrics.summary["auc"]) for point, run in zip(swept.sweep.points, swept.runs, strict=True)]
    means = [100 * auc.mean for point, auc in points if not point.idle]
    plain = next(100 * auc.mean for point, auc in points if point.idle)
    spread = 100 * float(np.mean([auc.std for point, auc in points if not point.idle]))
    line = f"{cohort.title}: AUC {min(means):.1f} to {max(means):.1f} over {len(means)} points with CAR, {plain:.1f} without"
    return line if isnan(spread) else f"{line}; the folds of one point have a standard deviation of {spread:.1f}"
