"""The plots of a run's report: ROC, precision and recall, learning curves. c cases."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from carmil.report.cases import Cases
from carmil.report.curves import Curve, curve_svg
from carmil.report.plots import Line, colour, share_svg
from carmil.runs.run import Run
from carmil.studies.figures import percent

MOST_FOLDS = 12  # that have their learning curves apart


@dataclass(frozen=True)
class Legend:
    """One line of a plot: its colour, its name, and the area below it."""

    colour: str
    name: str
    area: str


def roc(run: Run, cases: Cases) -> tuple[str, list[Legend]]:
    """The curve of class 1, or of each class against the rest; the dot is where the answers are."""
    from sklearn.metrics import roc_auc_score, roc_curve

    lines, legends = [], []
    for i, (c, positive) in enumerate(_against_the_rest(cases)):
        wrong, found, _ = roc_curve(positive, cases.p[:, c])
        said = cases.answer == c
        dot = (float(said[~positive].mean()), float(said[positive].mean()))
        lines.append(Line(list(zip(wrong.tolist(), found.tolist(), strict=True)), dot))
        legends.append(Legend(colour(i), run.classes[c], percent(roc_auc_score(positive, cases.p[:, c]))))
    labels = {"x_label": "1 − specificity", "y_label": "sensitivity"}
    return share_svg(lines, guide=[(0, 0), (1, 1)], **labels), legends


def precision_recall(run: Run, cases: Cases) -> tuple[str, list[Legend]]:
    """As `roc`; chance (for two classes) is the share of class 1."""
    from sklearn.metrics import average_precision_score, precision_recall_curve

    lines, legends, chance = [], [], []
    for i, (c, positive) in enumerate(_against_the_rest(cases)):
        precision, recall, _ = precision_recall_curve(positive, cases.p[:, c])
        said = cases.answer == c
        dot = (float(said[positive].mean()), float(positive[said].mean())) if said.any() else None
        lines.append(Line(_steps(recall[::-1].tolist(), precision[::-1].tolist()), dot))
        area = average_precision_score(positive, cases.p[:, c])
        legends.append(Legend(colour(i), run.classes[c], percent(area)))
        chance.append(float(positive.mean()))
    guide = [(0, chance[0]), (1, chance[0])] if len(chance) == 1 else []
    return share_svg(lines, guide=guide, x_label="recall (sensitivity)", y_label="precision"), legends


def learning_curves(run: Run) -> list[tuple[str, str]]:
    """(heading, svg): training and validation loss of the models that were kept, one figure per fold if these are few."""
    history = run.history()
    grid = len(history.best_epoch) // len(run.models)  # all its points were trained, one a fold and seed is kept
    trained = {i: i * grid + model.point for i, model in enumerate(run.models)}
    groups: dict[str, list[int]] = {}
    for i, fold in enumerate(run.tested_folds):
        groups.setdefault(f"fold {fold}", []).append(i)
    if len(groups) > MOST_FOLDS:
        groups = {"all folds": list(trained)}
    found = []
    for heading, models in groups.items():
        rows = [trained[i] for i in models]
        curves = [
            Curve("training", [[epoch[row] for row in rows] for epoch in history.train["cls"]]),
            Curve("validation", [[epoch[row] for row in rows] for epoch in history.validation], dashed=True),
        ]
        marks = [run.models[i].best_epoch for i in models]
        found.append((heading, curve_svg(curves, marks=marks, y_label="cross-entropy")))
    return found


def _against_the_rest(cases: Cases) -> list[tuple[int, NDArray[np.bool_]]]:
    """(class, its cases), of two classes the second only; a class with no case, or with all, has no curve."""
    k = cases.p.shape[1]
    each = [(c, cases.truth == c) for c in (range(k) if k > 2 else (1,))]
    return [(c, positive) for c, positive in each if 0 < positive.sum() < len(positive)]


def _steps(recall: Sequence[float], precision: Sequence[float]) -> list[tuple[float, float]]:
    """Steps from recall to recall at the precision reached there: the area below is the average precision."""
    points = [(recall[0], precision[0])]
    for i in range(1, len(recall)):
        points += [(recall[i - 1], precision[i]), (recall[i], precision[i])]
    return points
