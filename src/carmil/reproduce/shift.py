"""The multi-class shift of the paper's section 5: under the counterfactual attention, which class's logit grows most?

On Four Bags, where the truth is known, with the reasons; and on a cohort of slides with several classes.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from carmil.datasets.study_cohort import StudyCohort
from carmil.progress import console
from carmil.report.matrices import Matrix, draw_matrices
from carmil.reproduce.branch_outputs import models_of_run, predict_branches
from carmil.reproduce.digits import Point, digit_cohorts, training_lines
from carmil.reproduce.method_runs import MethodRun, train_methods, train_model
from carmil.reproduce.paper import figure, figure_text
from carmil.reproduce.recipes import Finding, Picture, Request, write_finding
from carmil.reproduce.shift_reading import READINGS, Reasons, Shift, pooled, reasons_of, shift_of
from carmil.reproduce.shift_words import (
    class_name,
    mean_known,
    nearest_reading,
    percents,
    reasons_lines,
    tables_of_reasons,
    verdict,
)
from carmil.reproduce.slide_cohorts import several_classes
from carmil.reproduce.slide_table import CAR_L1, uninformed_lines
from carmil.runs.run import Run
from carmil.tables import ResultTable

TASK, SLIDE_MODEL = "four_bags", CAR_L1.model
COUNTED = "of the rightly answered bags of a class (a row) those whose logit of a class (a column) grows most: per cent"
DOMINATES = 0.9  # of a class's rightly answered slides, where they go to one other class
ENOUGH = 5  # rightly answered slides of a class, on the mean over runs, of which words can be made


def reproduce(request: Request, *, points: Sequence[Point] = (Point(),)) -> Finding:
    """points: the first is shown with all its reasons; the others are a line each."""
    cohorts = digit_cohorts(request, [TASK])
    found = train_methods(cohorts, [point.method for point in points], request)
    shifts = [_shift(one.run, request) for one in found]
    reasons = reasons_of(*models_of_run(found[0].run, request.device))
    names = found[0].run.classes
    title = f"Four Bags ({points[0].name})"
    matrices = [_matrix(title, names, shifts[0])]
    tables = [
        _table(f"{title}: {COUNTED}", names, shifts[0]),
        *tables_of_reasons(names, shifts[0], reasons),
        *([_over_points(points, found, shifts)] if len(points) > 1 else []),
    ]
    cohort, said = several_classes(request)
    of_slides: list[str] = []
    facts: dict[str, object] = {"four_bags": _facts(names, shifts[0], reasons), "points": [vars(one) for one in points]}
    if cohort is not None:
        run = train_model(cohort, SLIDE_MODEL, request)
        with console.status(f"comparing both attentions of {SLIDE_MODEL} on {cohort.title}"):
            classes, on_slides = run.classes, _shift(run, request)
        matrices.append(_matrix(f"{cohort.title}, {SLIDE_MODEL}", classes, on_slides))
        tables.append(_table(f"{cohort.title}: {COUNTED}", classes, on_slides))
        of_slides = [_slide_line(cohort, classes, on_slides), *uninformed_lines([MethodRun.of(cohort, CAR_L1, run)])]
        said = [*cohort.notes, *said]
        facts["slides"] = {"cohort": cohort.name, **_facts(classes, on_slides)}
    picture = draw_matrices(
        matrices, request.out / "shift.png", low=0, high=100, bar="per cent of a class's rightly answered bags"
    )
    changes = _drawn_changes(names, shifts[0], title, request)
    lines = [
        verdict(names, shifts[0]),
        *reasons_lines(names, shifts[0], reasons),
        nearest_reading(shifts[0]),
        *of_slides,
    ]
    conditions = [
        f"CAR-MIL, {points[0].name}; mean ± standard deviation over {len(found[0].run.models)} initialisations, each over its own "
        "rightly answered test bags",
        *training_lines(cohorts, [one.run for one in found]),
        *said,
    ]
    caption = "Which class's logit grows most under the counterfactual attention; one row per true class."
    why = "By how much each logit changes in these bags: what speaks for a class falls and rises together."
    finding = Finding(
        tuple(tables), (Picture(picture, caption), Picture(changes, why)), tuple(lines), tuple(conditions)
    )
    return write_finding("shift", request, finding, facts)


def _shift(run: Run, request: Request) -> Shift:
    """The test bags of all folds of a seed together."""
    bags, models = models_of_run(run, request.device)
    tested = list(models)
    shift = shift_of((predict_branches(one.model, bags, one.places), one.labels) for one in tested)
    return pooled(shift, [one.seed for one in tested])


def _matrix(title: str, names: Sequence[str], shift: Shift) -> Matrix:
    shares = shift.shares()
    return Matrix(
        title,
        rows=tuple(class_name(names, y) for y in range(len(names))),
        columns=tuple(str(c) for c in range(len(names))),
        values=mean_known(100 * shares),
        cells=tuple(tuple(percents(shares[:, y, c]) for c in range(len(names))) for y in range(len(names))),
        across="class whose logit grows most",
        down="true class",
    )


def _drawn_changes(names: Sequence[str], shift: Shift, title: str, request: Request) -> Path:
    """The mean change of the logits, on a scale of its own."""
    changes = _matrix(title, names, shift)
    values = mean_known(shift.change)
    cells = tuple(tuple("–" if np.isnan(value) else f"{value:+.2f}" for value in row) for row in values)
    largest = float(np.nanmax(np.abs(values), initial=0.0)) or 1.0
    return draw_matrices(
        [replace(changes, values=values, cells=cells, across="class")],
        request.out / "shift_change.png",
        low=-largest,
        high=largest,
        bar="mean change of the logit, F(u_cf) - F(u)",
        signed=True,
    )


def _table(title: str, names: Sequence[str], shift: Shift) -> ResultTable:
    shares, right = shift.shares(), shift.right
    lines = tuple(
        (class_name(names, y), *(percents(shares[:, y, c]) for c in range(len(names))), f"{mean:.{int(mean < 10)}f}")
        for y, mean in enumerate(right.mean(0))
    )
    heads = ("true class", *(class_name(names, c) for c in range(len(names))), "bags")
    return ResultTable(title, heads, lines)


def _over_points(points: Sequence[Point], found: Sequence[MethodRun], shifts: Sequence[Shift]) -> ResultTable:
    lines = tuple(
        (
            point.distance,
            f"{point.alpha:g}",
            f"{point.lambda_:g}",
            figure_text(figure(one.values("auc"))),
            *(percents(shift.shares()[:, y, c]) for y, c in ((1, 3), (3, 1))),
        )
        for point, one, shift in zip(points, found, shifts, strict=True)
    )
    heads = ("distance", "alpha", "lambda", "AUC", "class 1 to 3", "class 3 to 1")
    return ResultTable("Four Bags at other weights and distances: per cent", heads, lines, names=3)


def _slide_line(cohort: StudyCohort, names: Sequence[str], shift: Shift) -> str:
    """How diffuse the shift is over the classes that are not the slide's: the paper finds no dominant competitor on BRACS."""
    shares = mean_known(shift.shares())
    others = np.where(np.eye(len(names), dtype=bool), -1.0, shares)
    right = shift.right.mean(0)
    tops = [(y, int(others[y].argmax())) for y in range(len(names)) if right[y] >= ENOUGH]
    if not tops:
        few = f"at most {right.max():.1f} slides of a class were" if right.any() else "no slide was"
        return f"{cohort.title}: {few} answered rightly, so that there is nothing to say of where they go"
    told = []
    for y, c in tops:
        most = f"{class_name(names, c)} {100 * shares[y, c]:.0f} %" if shares[y, c] else "no other class"
        told.append(f"{class_name(names, y)} to {most} (itself {100 * shares[y, y]:.0f} %)")
    led = [class_name(names, y) for y, c in tops if shares[y, c] >= DOMINATES]
    word = f"no class goes to one competitor in {100 * DOMINATES:.0f} % of its slides"
    if led:
        word = f"one competitor dominates in {', '.join(led)}"
    untold = [class_name(names, y) for y in range(len(names)) if right[y] < ENOUGH]
    if untold:
        word += f"; of {', '.join(untold)} fewer than {ENOUGH} slides were answered rightly"
    data = "a stand-in, not the paper's slides" if cohort.stand_in else f"{cohort.encoder} features"
    return (
        f"{cohort.title} ({data}): of the other classes most often {'; '.join(told)}; {word}. The paper says of BRACS in words "
        "that its shift is diffuse over all 7 classes, and gives no figures"
    )


def _facts(names: Sequence[str], shift: Shift, reasons: Reasons | None = None) -> dict[str, object]:
    facts: dict[str, object] = {
        "classes": list(names),
        "counts": {name: counts.tolist() for name, counts in shift.counts.items()},
        "readings": READINGS,
        "mean_logit_change": shift.change.tolist(),
    }
    if reasons is not None:
        facts |= {f"{name}_by_digit": values.tolist() for name, values in vars(reasons).items()}
    return facts
