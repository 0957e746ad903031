"""Plots of predicted numbers and grades beside the true ones."""

import numpy as np

from carmil.report.cases import TestedCases
from carmil.report.plots import Axes, Plot, cases_svg, stacks_svg

ROOM = 0.04  # between the outermost cases and the ends of an axis, as a share of the axis
MOST_CASES = 2000  # dots in a plot
LIMITS = 1.96  # standard deviations, between which 95 % of normal errors are


def predicted_against_true(tested: TestedCases) -> Plot | None:
    true, predicted, names = _numbers(tested)
    (column,) = tested.run.target.columns
    ends = _range(np.concatenate([true, predicted]))
    axes = Axes(f"true {column}", f"predicted {column}", ends, ends)
    cases = [
        (x, y, f"{name}: true {x:.4g}, predicted {y:.4g}")
        for x, y, name in zip(true.tolist(), predicted.tolist(), names, strict=True)
    ]
    words = f"dot: a {tested.run.metrics.level}{_thinned(len(cases))}; on the dashed line the prediction is the truth"
    svg = cases_svg(axes, _some(cases), guides=[[(ends[0], ends[0]), (ends[1], ends[1])]])
    return Plot(f"Predicted and true {column}", svg, (("", words),))


def errors(tested: TestedCases) -> Plot | None:
    """Return the errors by predicted number, with their mean and the limits between which 95 % of normal errors are."""
    true, predicted, names = _numbers(tested)
    (column,) = tested.run.target.columns
    error = predicted - true
    mean, width = float(error.mean()), LIMITS * float(error.std(ddof=1)) if len(error) > 1 else 0.0
    ends, lines = _range(predicted), (mean - width, mean, mean + width)
    axes = Axes(f"predicted {column}", "predicted − true", ends, _range(np.array([*error, *lines, 0.0])))
    cases = [
        (x, y, f"{name}: {y:+.4g} off, predicted {x:.4g}")
        for x, y, name in zip(predicted.tolist(), error.tolist(), names, strict=True)
    ]
    low, middle, high = (f"{value:+.3g}".replace("-", "−") for value in lines)
    words = (
        f"dot: a {tested.run.metrics.level}{_thinned(len(cases))}; dashed: the mean error, {middle}, and the mean ± 1.96 standard "
        f"deviations, {low} and {high}, between which 95 % of errors lie if they are normal"
    )
    svg = cases_svg(axes, _some(cases), guides=[[(ends[0], at), (ends[1], at)] for at in lines])
    return Plot(f"Errors of the predicted {column}", svg, (("", words),))


def grade_distribution(tested: TestedCases) -> Plot | None:
    """Return the mean probability of every grade, by true grade."""
    cases, names = tested.once, tested.run.target.answer_names
    members = [cases.truth == i for i in range(len(names))]
    rows = [
        (f"{name} ({one.sum()})", cases.p[one].mean(0).tolist())
        for name, one in zip(names, members, strict=True)
        if one.any()
    ]
    words = (
        f"row: a true grade and how many {tested.run.metrics.level}s have it; part: the mean probability of a grade, darker if "
        "it is higher"
    )
    return Plot(
        "Predicted grades by true grade",
        stacks_svg(rows, names, label="predicted grades by true grade"),
        (("", words),),
    )


def _numbers(tested: TestedCases) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Return the true and predicted numbers (c), and the names of the cases."""
    cases = tested.once
    return cases.truth[:, 0], cases.p[:, 0], cases.names


def _range(values: np.ndarray) -> tuple[float, float]:
    low, high = float(values.min()), float(values.max())
    room = ROOM * (high - low) or 1.0
    return low - room, high + room


def _some(cases: list[tuple[float, float, str]]) -> list[tuple[float, float, str]]:
    return cases[:: _stride(len(cases))]


def _stride(count: int) -> int:
    return -(-count // MOST_CASES)


def _thinned(count: int) -> str:
    return f" (one of {_stride(count)} is drawn)" if count > MOST_CASES else ""
