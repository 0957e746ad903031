"""Figures of a study: by fold, then the mean over the folds, its interval, and the standard deviation. k classes."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from carmil.runs.decision import Decision
from carmil.runs.facts import Calibration, FoldFigures, Range, SlideMean, Spread
from carmil.runs.run import Run
from carmil.statistics.bootstrap import bootstrap
from carmil.statistics.calibration import brier, reliability
from carmil.statistics.intervals import FoldAnswers, figure_interval
from carmil.statistics.operating import at_threshold
from carmil.statistics.performance import bag_performance
from carmil.studies.predictions import class_numbers, probabilities
from carmil.tables import ResultTable

if TYPE_CHECKING:
    import pandas as pd

SHOWN = {
    "auc": "AUC",
    "f1_macro": "macro F1",
    "balanced_accuracy": "balanced accuracy",
    "accuracy": "accuracy",
    "sensitivity": "sensitivity",
    "specificity": "specificity",
    "ece": "ECE",
    "auprc_attention": "AUPRC+ attention",
    "auprc_rollout": "AUPRC+ rollout",
    "auprc_path": "AUPRC+ path",
}
FIGURES = SHOWN | {"answered": "answered", "accuracy_answered": "accuracy of the answered"}
WITH_INTERVAL = ("auc", "f1_macro", "balanced_accuracy", "accuracy", "sensitivity", "specificity")
OF_TWO_CLASSES = ("sensitivity", "specificity")
MEAN_OVER_FOLDS = "mean over folds"  # what the intervals of a run are of; runs of version 0.1.0 have others


def measure(
    frame: "pd.DataFrame", classes: Sequence[str], decisions: Decision | Sequence[Decision]
) -> dict[str, float]:
    """Figures of a table of answers. decisions: the rule of all rows, or of each; where it may abstain, also the share
    answered.

    The class that leads counts as the answer of every row; `accuracy_answered` is over the rows that are answered.
    """
    p, y = probabilities(frame, classes), class_numbers(frame, classes)
    rules = [decisions] * len(frame) if isinstance(decisions, Decision) else list(decisions)
    answer = leading_classes(p, rules)
    figures = bag_performance(p, y)
    figures["accuracy"] = float((answer == y).mean())
    if len(classes) == 2:
        figures |= at_threshold(y, answer, 0.5)  # answers are 0 and 1
    figures["ece"] = reliability(p, y).ece
    figures["brier"] = brier(p, y)
    if any(rule.cut is not None for rule in rules):
        sure = np.array([rule.confident(row[None])[0] for rule, row in zip(rules, p, strict=True)])
        figures["answered"] = float(sure.mean())
        figures["accuracy_answered"] = float((answer == y)[sure].mean()) if sure.any() else float("nan")
    return figures


def leading_classes(p: NDArray[np.float64], decisions: Sequence[Decision]) -> NDArray[np.int64]:
    """(b) the leading class of each row of p (b, k), by the rule of the row."""
    return np.array([rule.leading(row[None])[0] for rule, row in zip(decisions, p, strict=True)], dtype=np.int64)


def summarise_folds(by_fold: Sequence[FoldFigures]) -> dict[str, Spread]:
    """Mean and standard deviation of each figure over the folds; the figure of a fold is the mean over its seeds."""
    import pandas as pd

    folds = pd.DataFrame([one.figures for one in by_fold]).groupby([one.fold for one in by_fold]).mean()
    spread = folds.std(ddof=1) if len(folds) > 1 else folds.iloc[0] * np.nan
    return {str(name): Spread(float(folds[name].mean()), float(spread[name])) for name in folds.columns}


def fold_answers(frame: "pd.DataFrame", classes: Sequence[str], decisions: Sequence[Decision]) -> FoldAnswers:
    """Answers in the form that intervals need: one row per patient (or slide), and fold and seed where these columns exist.

    decisions: the rule of each row. Where there is no answer, the class that leads counts.
    """
    p, y = probabilities(frame, classes), class_numbers(frame, classes)
    rows = {f"{name}s": frame[name].to_numpy() for name in ("fold", "seed", "patient") if name in frame}
    cases = frame["slide" if "slide" in frame else "patient"].to_numpy()
    return FoldAnswers.of(y, p, leading_classes(p, decisions), cases=cases, **rows)


def intervals(given: FoldAnswers) -> dict[str, Range]:
    """95 % intervals of the figures that have one. The value is the mean over folds, that of a fold the mean over its seeds."""
    two = given.scores.shape[1] == 2
    found = {name: figure_interval(name, given) for name in WITH_INTERVAL if two or name not in OF_TWO_CLASSES}
    return {name: Range(interval.value, interval.low, interval.high) for name, interval in found.items()}


def mean_interval(values: ArrayLike, patients: ArrayLike | None = None) -> SlideMean:
    """Mean over the slides that have a value, and its 95 % interval over patients (or slides)."""
    given = np.asarray(values, dtype=np.float64)
    known = ~np.isnan(given)
    groups = np.arange(len(given)) if patients is None else np.asarray(patients)
    if not known.any():
        return SlideMean(np.nan, np.nan, np.nan)
    found = bootstrap(np.mean, given[known], groups=groups[known], repeats=1000)
    return SlideMean(found.value, found.low, found.high, int(known.sum()))


def calibration(frame: "pd.DataFrame", classes: Sequence[str]) -> Calibration:
    found = reliability(probabilities(frame, classes), class_numbers(frame, classes))
    bins = (tuple(values.tolist()) for values in (found.edges, found.count, found.confidence, found.accuracy))
    return Calibration(found.ece, found.mce, *bins)


def mean_over_seeds(frame: "pd.DataFrame", classes: Sequence[str]) -> "pd.DataFrame":
    """One row per slide or patient and fold: the mean of the answers that differ in their seed only."""
    values = [name for name in frame.columns if name.startswith(("p_", "cf_"))]
    keys = [name for name in ("fold", "slide", "patient", "label") if name in frame]
    return frame.groupby(keys, sort=False)[values].mean().reset_index()


def run_table(run: Run) -> ResultTable:
    """One row per figure: the mean over the folds, the 95 % interval of that mean, the standard deviation over the folds."""
    summary = run.metrics.summary
    sure = run.metrics.intervals if run.metrics.intervals_of == MEAN_OVER_FOLDS else {}
    lines = tuple(
        (words, percent(summary[name].mean), interval_words(sure.get(name)), percent(summary[name].std))
        for name, words in FIGURES.items()
        if name in summary
    )
    heads = ("figure, per cent", "mean over folds", "95 % interval of that mean", "sd over folds")
    return ResultTable("Test folds", heads, lines)


def line(summary: Mapping[str, Spread], name: str) -> str:
    """94.9 ± 4.0, in per cent."""
    mean, std = percent(summary[name].mean), percent(summary[name].std)
    return mean if std == "–" else f"{mean} ± {std}"


def percent(value: float | None) -> str:
    return "–" if value is None or np.isnan(value) else f"{100 * value:.1f}"


def interval_words(interval: Range | None) -> str:
    """75.2 to 98.1, in per cent."""
    if interval is None or "–" in (low := percent(interval.low), high := percent(interval.high)):
        return "–"
    return f"{low} to {high}"
