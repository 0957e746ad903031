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
from carmil.reproduce.recipes import Finding, Picture, Request, write_finding
from carmil.reproduce.slide_cohorts import Found, cohorts_in
from carmil.reproduce.slide_table import (
    ABMIL,
    CAR_L1,
    READ,
    as_json,
    conditions,
    difference_table,
    differences,
    in_words,
    there,
    uninformed,
)
from carmil.studies.point_selection import choose
from carmil.studies.sweep import Sweep, Swept, run_sweep, sweep_of

COHORTS = ("brca", "luad_tp53", "crc", "weak")  # the paper's two, and what stands in for them
GRID, FAST_GRID = (0.2, 0.8, 1.0), (0.2, 1.0)
DISTANCES = ("l1", "cosine")
GRID_SAID = "CAR's weights: the grid's"
HOW = (
    "a single run, as the paper's: one initialisation of every fold, the same for all points; the paper does not say which fold "
    "its figures are of",
    f"{CHOSEN} the point that validation bags choose; {IDLE} the branch counts for nothing: ABMIL but for rounding. Test AUCs "
    "of all points are there to see how much the weights matter: to take the best of them is to choose on the test set",
    "CAR-MIL, chosen by fold: of the points with CAR each fold takes that of its own lowest validation loss; no test bag "
    "has a say. The table's last line may take the plain model, too",
)


def reproduce(request: Request) -> Finding:
    found = cohorts_in(request)
    mine = Found(tuple(one for one in there(found) if one.name in COHORTS), found.missing)
    tables, pictures, lines, rows, pairs = [], [], [], [], []
    for cohort in there(mine):
        swept = swept_on(cohort, request)
        choice = choose(swept.runs)
        title = f"{cohort.title}: mean ± standard deviation over the folds, per cent"
        tables.append(replace(sweep_table(swept, choice), title=title))
        path = request.out / f"hyperparameters_{cohort.name}.png"
        pictures.append(Picture(path, f"{cohort.title}. {write_picture(swept, choice.best, path)}"))
        taken, plain = _compared(cohort, swept)
        rows += [plain, taken]
        pairs.append((taken, plain))
        lines.append(_range(cohort, swept))
    compared = differences(pairs)
    finding = Finding(
        (*tables, difference_table(compared)),
        tuple(pictures),
        (*lines, *in_words(compared), *uninformed(rows), SENSITIVITY),
        (*HOW, *READ, *conditions(rows, mine, request, weights=GRID_SAID)),
    )
    return write_finding("hyperparameters", request, finding, as_json(rows, compared))


def swept_on(cohort: StudyCohort, request: Request) -> Swept:
    """The grid and, for both distances, alpha = lambda = 0: one population, every point a run of its own."""
    words: dict[str, Any] = study_settings(cohort, CAR_L1.model, request, "alpha-lambda-distance", seeds=1)
    values = FAST_GRID if request.fast else GRID
    over: dict[str, list[Any]] = {"alpha": list(values), "lambda_": list(values), "distance": list(DISTANCES)}
    idle: dict[str, list[Any]] = {**over, "alpha": [0.0], "lambda_": [0.0]}
    where = f"{cohort.name}, alpha and lambda"
    grid = sweep_of(words, over, where=where)
    plain = sweep_of(words, idle, where=where)
    return run_sweep(Sweep(grid.out, grid.over, (*plain.points, *grid.points)), log=quietly)


def _compared(cohort: StudyCohort, swept: Swept) -> tuple[MethodRun, MethodRun]:
    """CAR with the weights and distance that each fold's validation bags choose, and the plain model."""
    rows = [
        MethodRun.of(cohort, Method(point.name, CAR_L1.model), run)
        for point, run in zip(swept.sweep.points, swept.runs, strict=True)
    ]
    idle = [point.idle for point in swept.sweep.points]
    taken, _ = select_by_fold(
        [row for row, plain in zip(rows, idle, strict=True) if not plain], "CAR-MIL, chosen by fold,"
    )
    return taken, replace(rows[idle.index(True)], method=ABMIL)


def _range(cohort: StudyCohort, swept: Swept) -> str:
    """How far the points of the grid lie apart, beside how far the folds of one do."""
    aucs = [(100 * run.metrics.summary["auc"].mean, 100 * run.metrics.summary["auc"].std) for run in swept.runs]
    grid = [auc for auc, point in zip(aucs, swept.sweep.points, strict=True) if not point.idle]
    plain = next(auc for auc, point in zip(aucs, swept.sweep.points, strict=True) if point.idle)
    means, spreads = zip(*grid, strict=True)
    told = f"{cohort.title}: AUC {min(means):.1f} to {max(means):.1f} over {len(grid)} points with CAR, {plain[0]:.1f} without"
    if isnan(spreads[0]):
        return told
    return f"{told}; the folds of one point have a standard deviation of {np.mean(spreads):.1f}"
