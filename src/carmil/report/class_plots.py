"""Plots of the probabilities of classes and labels: ROC, precision and recall, calibration. c cases."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from carmil.report.cases import Cases, TestedCases
from carmil.report.plots import Axes, Dot, Line, Plot, colour, line_svg, reliability_svg, share_svg
from carmil.statistics.intervals import wilson
from carmil.studies.figures import percent
from carmil.words import probability_text

GROUPS = 4  # of cases with similar probabilities, for calibration


@dataclass(frozen=True, eq=False)
class Detection:
    """A class, or a label, against the rest: the cases that have it, their probability (c), and the cases with this
    answer.
    """

    name: str
    positive: NDArray[np.bool_]
    p: NDArray[np.float64]
    answered: NDArray[np.bool_]

    @property
    def varied(self) -> bool:
        """Return whether some cases have the class or label and some do not; otherwise there is no curve."""
        return 0 < self.positive.sum() < len(self.positive)


def classes_against_the_rest(cases: Cases) -> list[Detection]:
    """Return every class with cases of both kinds; with two classes the second only."""
    k = cases.p.shape[1]
    each = [
        Detection(cases.target.outputs[c], cases.truth == c, cases.p[:, c], cases.answer == c)
        for c in (range(k) if k > 2 else (1,))
    ]
    return [one for one in each if one.varied]


def known_labels(cases: Cases) -> list[Detection]:
    """Return every label with cases of both kinds, each on the cases whose label is known."""
    each = []
    for i, name in enumerate(cases.target.outputs):
        known = ~np.isnan(cases.truth[:, i])
        p = cases.p[known, i]
        each.append(Detection(name, cases.truth[known, i] > 0, p, p >= 0.5))
    return [one for one in each if one.varied]


def grades_above(cases: Cases) -> list[Detection]:
    """Return, for every grade except the highest, the cases whose true grade is above it."""
    at_most = cases.p.cumsum(1)
    names = cases.target.answer_names
    each = [
        Detection(f"above {name}", cases.truth > i, 1 - at_most[:, i], cases.answer > i)
        for i, name in enumerate(names[:-1])
    ]
    return [one for one in each if one.varied]


def class_roc(tested: TestedCases) -> Plot | None:
    return _roc(classes_against_the_rest(tested.cases))


def label_roc(tested: TestedCases) -> Plot | None:
    return _roc(known_labels(tested.once))


def class_precision_recall(tested: TestedCases) -> Plot | None:
    return _precision_recall(classes_against_the_rest(tested.cases))


def label_precision_recall(tested: TestedCases) -> Plot | None:
    return _precision_recall(known_labels(tested.once))


def class_calibration(tested: TestedCases) -> Plot | None:
    """Return the accuracy of the most probable class by its probability."""
    calibration = tested.run.metrics.calibration
    assert calibration is not None
    words = (
        f"dot: a bin with its 95 % interval; grey: how many {tested.run.metrics.level}s are in it; on the dashed line a "
        "probability means what it says"
    )
    caption = f"Calibration: ECE {percent(calibration.ece)} %, worst bin {percent(calibration.mce)} %"
    return Plot(caption, reliability_svg(calibration), (("", words),), "calibration")


def label_calibration(tested: TestedCases) -> Plot | None:
    """Return the share of cases that have a label, by its probability."""
    level = tested.run.metrics.level
    return _calibration(known_labels(tested.once), f"share of {level}s with the label", level)


def grade_calibration(tested: TestedCases) -> Plot | None:
    """Return the share of cases above a grade, by the predicted probability of a higher grade."""
    level = tested.run.metrics.level
    return _calibration(grades_above(tested.once), f"share of {level}s with a higher grade", level)


def _roc(detections: Sequence[Detection]) -> Plot | None:
    """Return the ROC curves. The dot marks the rates of the answers."""
    from sklearn.metrics import roc_auc_score, roc_curve

    lines, legends = [], []
    for i, one in enumerate(detections):
        wrong, found, _ = roc_curve(one.positive, one.p)
        dot = (float(one.answered[~one.positive].mean()), float(one.answered[one.positive].mean()))
        lines.append(Line(list(zip(wrong.tolist(), found.tolist(), strict=True)), dot))
        legends.append((colour(i), f"{one.name}: AUC {percent(roc_auc_score(one.positive, one.p))}"))
    labels = {"x_label": "1 − specificity", "y_label": "sensitivity"}
    return Plot("ROC curve", share_svg(lines, guide=[(0, 0), (1, 1)], **labels), tuple(legends)) if lines else None


def _precision_recall(detections: Sequence[Detection]) -> Plot | None:
    """Return precision-recall curves as `_roc` does; the guide of a single curve is the share of positive cases."""
    from sklearn.metrics import average_precision_score, precision_recall_curve

    lines, legends, chance = [], [], []
    for i, one in enumerate(detections):
        precision, recall, _ = precision_recall_curve(one.positive, one.p)
        answered = one.answered
        dot = (float(answered[one.positive].mean()), float(one.positive[answered].mean())) if answered.any() else None
        lines.append(Line(_steps(recall[::-1].tolist(), precision[::-1].tolist()), dot))
        legends.append(
            (colour(i), f"{one.name}: average precision {percent(average_precision_score(one.positive, one.p))}")
        )
        chance.append(float(one.positive.mean()))
    guide = [(0, chance[0]), (1, chance[0])] if len(chance) == 1 else []
    svg = share_svg(lines, guide=guide, x_label="recall (sensitivity)", y_label="precision")
    return Plot("Precision and recall", svg, tuple(legends)) if lines else None


def _calibration(detections: Sequence[Detection], y_label: str, level: str) -> Plot | None:
    """Return observed shares with Wilson's intervals by predicted probability, in groups of about equal size."""
    lines, legends = [], []
    for i, one in enumerate(detections):
        dots = []
        for group in groups_by_size(one.p, GROUPS):
            mean, share, count = float(one.p[group].mean()), float(one.positive[group].mean()), int(group.sum())
            title = f"{one.name}, {count} {level}s: {probability_text(mean)} predicted, {100 * share:.1f} % observed"
            dots.append(Dot(mean, share, *wilson(share, count), title))
        lines.append(Line([(dot.x, dot.y) for dot in dots], dots=dots))
        legends.append((colour(i), one.name))
    if not lines:
        return None
    words = (
        f"dot: a quarter of the {level}s, by predicted probability, with its 95 % interval; on the dashed line a probability "
        "means what it says"
    )
    svg = line_svg(Axes("predicted probability", y_label), lines, guides=[[(0, 0), (1, 1)]])
    return Plot("Calibration", svg, (*legends, ("", words)), "calibration")


def groups_by_size(values: NDArray[np.float64], groups: int) -> Iterable[NDArray[np.bool_]]:
    """Return the members of groups of about equal size, lowest values first; equal values share a group."""
    edges = np.quantile(values, np.linspace(0, 1, groups + 1)[1:-1])
    numbers = np.searchsorted(edges, values)
    return [numbers == number for number in np.unique(numbers)]


def _steps(recall: Sequence[float], precision: Sequence[float]) -> list[tuple[float, float]]:
    """Return steps between recalls, each at the precision reached at its end: the area below is the average precision."""
    points = [(recall[0], precision[0])]
    for i in range(1, len(recall)):
        points += [(recall[i - 1], precision[i]), (recall[i], precision[i])]
    return points
