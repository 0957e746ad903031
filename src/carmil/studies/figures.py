"""Figures of a study: by fold, and their mean over the folds with interval and standard deviation."""

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from carmil.runs.facts import Calibration, FoldFigures, Range, SlideMean, Spread
from carmil.runs.run import DISTANCE, Run
from carmil.statistics.bootstrap import draws, percentiles
from carmil.statistics.calibration import reliability
from carmil.statistics.intervals import FoldAnswers
from carmil.studies.predictions import arrange, outcomes, predicted
from carmil.tables import ResultTable
from carmil.targets import Classes, Target
from carmil.targets.decision import Decision
from carmil.targets.target import Training, leading_classes

SHOWN = {
    "auc": "AUC",
    "c_index": "C-index",
    "uno_c": "C-index (Uno)",
    "auc_over_time": "AUC over time",
    "ibs": "Brier score over time",
    "ibs_population": "Brier score over time of Kaplan-Meier",
    "spearman": "Spearman correlation",
    "r2": "R2",
    "mae": "mean absolute error, in the target's unit",
    "kappa": "quadratic kappa",
    "grade_mae": "mean absolute error, in grades",
    "ap": "average precision",
    "f1_macro": "macro F1",
    "balanced_accuracy": "balanced accuracy",
    "accuracy": "accuracy",
    "sensitivity": "sensitivity",
    "specificity": "specificity",
    "ece": "ECE",
    "auprc_attention": "AUPRC+ attention",
    "auprc_rollout": "AUPRC+ rollout",
    "auprc_path": "AUPRC+ path",
    "auprc_both_attention": "AUPRC± attention",
    "auprc_both_rollout": "AUPRC± rollout",
    "auprc_both_path": "AUPRC± path",
}
ABSTENTION = {"answered": "answered", "accuracy_answered": "accuracy of the answered"}
IN_UNITS = ("mae", "grade_mae")  # figures that are not shown in per cent
MEAN_OVER_FOLDS = "mean over folds"  # what the intervals of a run describe; in runs of version 0.1.0 this differs


def measure(
    frame: pd.DataFrame, target: Target, decisions: Decision | Sequence[Decision], training: Training | None = None
) -> dict[str, float]:
    """Return the figures of a table of predictions. decisions: one rule for all rows, or one per row."""
    rules = [decisions] * len(frame) if isinstance(decisions, Decision) else list(decisions)
    return target.figures(predicted(frame, target), outcomes(frame, target), rules, training)


def summarise_folds(by_fold: Sequence[FoldFigures]) -> dict[str, Spread]:
    """Return the mean and standard deviation of each figure over the folds; the figure of a fold is the mean over its seeds."""
    folds = pd.DataFrame([one.figures for one in by_fold]).groupby([one.fold for one in by_fold]).mean()
    spread = folds.std(ddof=1) if len(folds) > 1 else folds.iloc[0] * np.nan
    return {str(name): Spread(float(folds[name].mean()), float(spread[name])) for name in folds.columns}


def fold_answers(frame: pd.DataFrame, target: Target, decisions: Sequence[Decision]) -> FoldAnswers:
    """Arrange predictions for the computation of intervals: one row per patient (or slide), and fold and seed if these
    columns exist.

    decisions: the rule of each row. Where there is no answer, the leading class counts.
    """
    p = predicted(frame, target)
    return arrange(frame, target, p, leading_classes(p, decisions))


def intervals(target: Target, given: FoldAnswers) -> dict[str, Range]:
    """Return the 95 % intervals of the figures that have one. The value is the mean over folds of the mean over seeds."""
    estimates = target.intervals(given)
    return {name: Range.of(interval) for name, interval in estimates.items()}


def mean_interval(values: ArrayLike, patients: ArrayLike | None = None) -> SlideMean:
    """Return the mean over the slides that have a value, and its 95 % interval over patients (or slides)."""
    given = np.asarray(values, dtype=np.float64)
    known = ~np.isnan(given)
    groups = np.arange(len(given)) if patients is None else np.asarray(patients)
    if not known.any():
        return SlideMean(np.nan, np.nan, np.nan)
    drawn = draws(int(known.sum()), groups[known], repeats=1000, seed=0)
    means = [counts @ given[known] / counts.sum(1) for counts in drawn]
    interval = percentiles(float(given[known].mean()), np.concatenate([np.empty(0), *means]))
    return SlideMean(interval.value, interval.low, interval.high, int(known.sum()))


def mean_text(figure: SlideMean | None, digits: int = 2) -> str:
    """Format a figure and its interval: 0.61 (0.52 to 0.70)."""
    if figure is None or np.isnan(figure.value):
        return "–"
    value, low, high = (
        f"{round(number, digits) + 0.0:.{digits}f}" for number in (figure.value, figure.low, figure.high)
    )  # avoids -0.00
    return value if np.isnan(figure.low) else f"{value} ({low} to {high})"


def calibration(frame: pd.DataFrame, target: Target) -> Calibration | None:
    """Return the calibration of the probabilities of classes; None for other targets."""
    if not isinstance(target, Classes):
        return None
    found = reliability(predicted(frame, target), outcomes(frame, target))
    bins = (tuple(values.tolist()) for values in (found.edges, found.count, found.confidence, found.accuracy))
    return Calibration(found.ece, found.mce, *bins)


def mean_over_seeds(frame: pd.DataFrame, target: Target) -> pd.DataFrame:
    """Return one row per slide or patient and fold, with the means of its predictions and distances over the seeds."""
    columns = (*target.prediction_columns(), *target.prediction_columns("cf"), DISTANCE)
    keys = [name for name in ("fold", "slide", "patient", *target.label_columns) if name in frame]
    values = [name for name in columns if name in frame]
    return frame.groupby(keys, sort=False, dropna=False)[values].mean().reset_index()


def figure_names(target: Target) -> dict[str, str]:
    """Return the figures that tables show, in order, with their names in words."""
    return {**SHOWN, **target.figure_words}


def run_table(run: Run) -> ResultTable:
    """Tabulate one row per figure: the mean over the folds, its 95 % interval, and the standard deviation over the folds."""
    summary = run.metrics.summary
    sure = run.metrics.intervals if run.metrics.intervals_of == MEAN_OVER_FOLDS else {}
    lines = tuple(
        (
            words,
            figure_text(name, summary[name].mean),
            interval_words(sure.get(name), name),
            figure_text(name, summary[name].std),
        )
        for name, words in (figure_names(run.target) | ABSTENTION).items()
        if name in summary
    )
    heads = ("figure, per cent", "mean over folds", "95 % interval of that mean", "sd over folds")
    return ResultTable("Test folds", heads, lines)


def line(summary: Mapping[str, Spread], name: str) -> str:
    """Format a mean and standard deviation: 94.9 ± 4.0."""
    mean, std = figure_text(name, summary[name].mean), figure_text(name, summary[name].std)
    return mean if std == "–" else f"{mean} ± {std}"


def figure_text(name: str, value: float | None) -> str:
    """Format a figure: in per cent, unless it has a unit of its own."""
    if name in IN_UNITS and value is not None and not np.isnan(value):
        return f"{value:.3g}"
    return percent(value)


def percent(value: float | None) -> str:
    return "–" if value is None or np.isnan(value) else f"{100 * value:.1f}"


def interval_words(interval: Range | None, name: str = "") -> str:
    """Format an interval: 75.2 to 98.1. name: that of the figure, which determines the unit."""
    if interval is None or "–" in (low := figure_text(name, interval.low), high := figure_text(name, interval.high)):
        return "–"
    return f"{low} to {high}"
