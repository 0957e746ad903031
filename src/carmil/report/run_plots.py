"""The plots of a run's report: those of its predictions, and learning curves. c cases."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from carmil.report.cases import TestedCases
from carmil.report.class_plots import (
    class_calibration,
    class_precision_recall,
    class_roc,
    grade_calibration,
    label_calibration,
    label_precision_recall,
    label_roc,
)
from carmil.report.number_plots import errors, grade_distribution, predicted_against_true
from carmil.report.page import PLOTS
from carmil.report.plots import Plot, round_numbers
from carmil.report.survival_plots import auc_over_time, brier_scores, calibration_at_horizon, kaplan_meier_groups
from carmil.runs.run import Run

PLOT = {"width": 420, "height": 200, "left": 44, "right": 410, "bottom": 172, "top": 10}  # pixels of learning curves
MOST_FOLDS = 12  # up to this many folds have separate learning curves


@dataclass(frozen=True)
class Curve:
    """One quantity of several models: values[epoch][model], None where a model has stopped."""

    name: str
    values: Sequence[Sequence[float | None]]
    dashed: bool = False


def curve_svg(curves: Sequence[Curve], *, marks: Sequence[int] = (), y_label: str) -> str:
    """Draw all curves over the epochs, with a dot on the last curve at each model's chosen epoch (`marks`)."""
    epochs = max(len(curve.values) for curve in curves)
    known = [value for curve in curves for line in curve.values for value in line if value is not None]
    top = max(known, default=0.0) or 1.0

    def x(epoch: float) -> float:
        return round(PLOT["left"] + (PLOT["right"] - PLOT["left"]) * epoch / max(1, epochs - 1), 1)

    def y(value: float) -> float:
        return round(PLOT["bottom"] - (PLOT["bottom"] - PLOT["top"]) * value / top, 1)

    lines = []
    for i, curve in enumerate(curves):
        for model in range(len(curve.values[0])):
            points = [(e, line[model]) for e, line in enumerate(curve.values)]
            path = " ".join(f"{x(e)},{y(v)}" for e, v in points if v is not None)
            lines.append((f"c{i}{' dashed' if curve.dashed else ''}", path))
    chosen = [(epoch, curves[-1].values[epoch][model]) for model, epoch in enumerate(marks) if epoch >= 0]
    return PLOTS.epochs(
        PLOT | {"last": len(curves) - 1},
        y_label,
        [(f"{value:g}", y(value)) for value in round_numbers(0, top)],
        [(f"{epoch:g}", x(epoch)) for epoch in round_numbers(0, epochs - 1) if epoch.is_integer()],
        lines,
        [(x(epoch), y(best)) for epoch, best in chosen if best is not None],
    )


def plots(tested: TestedCases) -> list[Plot]:
    """Return the plots of the run's predictions that its target names, without those that need more cases."""
    drawn = (PLOTS_OF[name](tested) for name in tested.run.target.plots)
    return [plot for plot in drawn if plot is not None]


def learning_curves(run: Run) -> list[tuple[str, str]]:
    """Return (heading, svg): training and validation loss of the selected models, one figure per fold if there are few folds."""
    history = run.history()
    grid = len(history.best_epoch) // len(run.models)  # all its points were trained, one per fold and seed was selected
    trained = {i: i * grid + model.point for i, model in enumerate(run.models)}
    groups: dict[str, list[int]] = {}
    for i, fold in enumerate(run.tested_folds):
        groups.setdefault(f"fold {fold}", []).append(i)
    if len(groups) > MOST_FOLDS:
        groups = {"all folds": list(trained)}
    plots = []
    for heading, models in groups.items():
        rows = [trained[i] for i in models]
        curves = [
            Curve("training", [[epoch[row] for row in rows] for epoch in history.train["cls"]]),
            Curve("validation", [[epoch[row] for row in rows] for epoch in history.validation], dashed=True),
        ]
        marks = [run.models[i].best_epoch for i in models]
        plots.append((heading, curve_svg(curves, marks=marks, y_label=run.target.loss_name)))
    return plots


PLOTS_OF: dict[str, Callable[[TestedCases], Plot | None]] = {
    "roc": class_roc,
    "precision_recall": class_precision_recall,
    "calibration": class_calibration,
    "label_roc": label_roc,
    "label_precision_recall": label_precision_recall,
    "label_calibration": label_calibration,
    "grade_distribution": grade_distribution,
    "grade_calibration": grade_calibration,
    "predicted_against_true": predicted_against_true,
    "errors": errors,
    "kaplan_meier": kaplan_meier_groups,
    "survival_calibration": calibration_at_horizon,
    "auc_over_time": auc_over_time,
    "brier_over_time": brier_scores,
}
