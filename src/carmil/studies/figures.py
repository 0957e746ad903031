"""Figures of a study: fold by fold, then mean ± standard deviation over the folds; intervals over patients. k classes."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from carmil.evidence.calibration import brier, reliability
from carmil.evidence.decision import Decision
from carmil.evidence.operating import at_threshold
from carmil.evidence.performance import bag_auc, bag_performance, balanced_accuracy
from carmil.evidence.statistics import bootstrap, delong_applies, delong_interval
from carmil.studies.answers import numbers, probabilities

if TYPE_CHECKING:
    import pandas as pd

SHOWN = {
    "auc": "AUC",
    "f1_macro": "F1",
    "balanced_accuracy": "balanced accuracy",
    "accuracy": "accuracy",
    "sensitivity": "sensitivity",
    "specificity": "specificity",
    "ece": "ECE",
    "auprc_attention": "AUPRC+ attention",
    "auprc_rollout": "AUPRC+ rollout",
    "auprc_path": "AUPRC+ path",
}


def measured(
    frame: "pd.DataFrame", classes: Sequence[str], decisions: Decision | Sequence[Decision]
) -> dict[str, float]:
    """Figures of some answers. decisions: the rule of all rows, or of each; where it may abstain, also the share answered.

    The class that leads counts as the answer of every row; `accuracy_answered` is over the rows that are answered.
    """
    p, y = probabilities(frame, classes), numbers(frame, classes)
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
    """(b) the class that leads in each row of p (b, k), by the rule of the row."""
    return np.array([rule.leading(row[None])[0] for rule, row in zip(decisions, p, strict=True)], dtype=np.int64)


def summarised(by_fold: "pd.DataFrame") -> dict[str, dict[str, float]]:
    """Mean and standard deviation over the folds of each figure, each fold's being the mean over its seeds."""
    figures = [name for name in by_fold.columns if name not in ("fold", "seed", "threshold")]
    folds = by_fold.groupby("fold")[figures].mean()
    spread = folds.std(ddof=1) if len(folds) > 1 else folds.iloc[0] * np.nan
    return {name: {"mean": float(folds[name].mean()), "std": float(spread[name])} for name in figures}


def intervals(
    frame: "pd.DataFrame", classes: Sequence[str], decisions: Sequence[Decision]
) -> dict[str, dict[str, float]]:
    """95 % intervals over patients of the answers from all test folds together (the mean over the seeds).

    decisions: the rule of each row. Where there is no answer, the class that leads counts.
    """
    p, y = probabilities(frame, classes), numbers(frame, classes)
    answers = np.eye(len(classes))[leading_classes(p, decisions)]
    groups = frame["patient"].to_numpy()
    found: dict[str, Any] = {
        "auc": bootstrap(bag_auc, p, y, groups=groups),
        "balanced_accuracy": bootstrap(balanced_accuracy, answers, y, groups=groups),
    }
    if len(classes) == 2 and len(set(groups)) == len(groups) and delong_applies(y):
        found["auc_delong"] = delong_interval(y, p[:, 1])
    return {
        name: {"value": interval.value, "low": interval.low, "high": interval.high} for name, interval in found.items()
    }


def mean_interval(values: ArrayLike, patients: ArrayLike | None = None) -> dict[str, float]:
    """Mean over the slides that have a value, a 95 % interval over patients (or slides) where there are two, and how many."""
    given = np.asarray(values, dtype=np.float64)
    there = ~np.isnan(given)
    groups = np.arange(len(given)) if patients is None else np.asarray(patients)
    if not there.any():
        return {"value": np.nan, "low": np.nan, "high": np.nan, "slides": 0}
    found = bootstrap(np.mean, given[there], groups=groups[there], repeats=1000)
    return {"value": found.value, "low": found.low, "high": found.high, "slides": int(there.sum())}


def calibration(frame: "pd.DataFrame", classes: Sequence[str]) -> dict[str, Any]:
    found = reliability(probabilities(frame, classes), numbers(frame, classes))
    return {
        "ece": found.ece,
        "mce": found.mce,
        "edges": found.edges.tolist(),
        "count": found.count.tolist(),
        "confidence": found.confidence.tolist(),
        "accuracy": found.accuracy.tolist(),
    }


def mean_over_seeds(frame: "pd.DataFrame", classes: Sequence[str]) -> "pd.DataFrame":
    """One line a slide or patient and fold: the mean of the answers that differ in their seed only."""
    values = [name for name in frame.columns if name.startswith(("p_", "cf_"))]
    keys = [name for name in ("fold", "slide", "patient", "label") if name in frame]
    return frame.groupby(keys, sort=False)[values].mean().reset_index()


def line(summary: Mapping[str, Mapping[str, float | None]], name: str) -> str:
    """94.9 ± 4.0, in per cent."""
    mean, std = percent(summary[name]["mean"]), percent(summary[name]["std"])
    return mean if std == "–" else f"{mean} ± {std}"


def percent(value: float | None) -> str:
    return "–" if value is None or np.isnan(value) else f"{100 * value:.1f}"
