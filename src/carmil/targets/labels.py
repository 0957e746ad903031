"""Several labels at once, each 0 or 1, some of which may be missing."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from carmil.targets.decision import Decision, EachLabel
from carmil.targets.links import Link, Sigmoids
from carmil.targets.target import EvidenceWords, Floats, Measure, Quantity, Target

LEAST_OF_COMBINATION = 20  # bags in each combination of labels by which folds are stratified


@dataclass(frozen=True)
class Labels(Target):
    """columns: one label each, NaN where missing. Outputs are the log-odds of the labels, predictions their probabilities."""

    kind: Literal["labels"] = "labels"
    strata_word: ClassVar[str] = "combination"
    label_smoothing: ClassVar[float] = 0.1
    probabilities: ClassVar[bool] = True
    output_word: ClassVar[str] = "label"
    leading_words: ClassVar[str] = "the most probable"
    plots: ClassVar[tuple[str, ...]] = ("label_roc", "label_precision_recall", "label_calibration")

    @property
    def outputs(self) -> tuple[str, ...]:
        return self.columns

    @property
    def words(self) -> EvidenceWords:
        return EvidenceWords("for", "against", "logit")

    @property
    def quantity(self) -> Quantity:
        return Quantity("probability", note="probability of the most probable label", share=True)

    @property
    def label_columns(self) -> tuple[str, ...]:
        return tuple(f"label_{name}" for name in self.columns)

    @property
    def measures(self) -> Mapping[str, Measure]:
        each = {
            f"{figure}_{name}": partial(measure, i)
            for figure, measure in (("auc", _auc), ("ap", _average_precision))
            for i, name in enumerate(self.columns)
        }
        return {"auc": partial(_mean, _auc), "ap": partial(_mean, _average_precision), **each}

    @property
    def figure_words(self) -> Mapping[str, str]:
        words = {"auc": "AUC", "ap": "average precision"}
        return {f"{figure}_{name}": f"{text} {name}" for figure, text in words.items() for name in self.columns}

    @property
    def figures_note(self) -> str:
        return (
            "AUC and average precision: of each label over the cases for which it is known, and their mean over the labels; a "
            "label that is the same for all cases of a fold is left out there."
        )

    @property
    def facts(self) -> Mapping[str, str]:
        return {
            "loss": "mean cross-entropy of the known labels of a slide",
            "a larger output": "log-odds of a label: a higher probability",
        }

    def summary(self, outcomes: NDArray[Any]) -> str:
        known, positive = (~np.isnan(outcomes)).sum(0), np.nansum(outcomes, axis=0)
        counts = zip(self.columns, positive.tolist(), known.tolist(), strict=True)
        return ", ".join(f"{name} in {int(some)} of {of}" for name, some, of in counts)

    def prediction_columns(self, prefix: str = "p") -> list[str]:
        return [f"{prefix}_{name}" for name in self.columns]

    def link(self) -> Link:
        return Sigmoids()

    @property
    def followed_words(self) -> str:
        return "probability of the leading label"

    def label_values(self, outcomes: NDArray[Any]) -> dict[str, list[Any]]:
        return dict(zip(self.label_columns, outcomes.T.tolist(), strict=True))

    def outcomes_of(self, columns: Mapping[str, Any]) -> NDArray[Any]:
        return np.stack([np.asarray(columns[name], dtype=np.float64) for name in self.label_columns], axis=1)

    def describe(self, outcome: Any) -> str:
        values = zip(self.columns, np.asarray(outcome).tolist(), strict=True)
        return ", ".join(f"{name} {'?' if np.isnan(value) else int(value)}" for name, value in values)

    def outcome_cells(self, outcomes: NDArray[Any]) -> dict[str, list[str]]:
        columns = zip(self.columns, outcomes.T.tolist(), strict=True)
        return {name: ["?" if np.isnan(value) else str(int(value)) for value in values] for name, values in columns}

    def strata(self, outcomes: NDArray[Any]) -> tuple[list[int], tuple[str, ...]]:
        """Return the combination of labels of each bag, missing ones as 0.

        It uses as many of the first columns as possible without a rare combination.
        """
        known, count = np.nan_to_num(outcomes), len(self.columns)
        while count > 1 and np.unique(known[:, :count], axis=0, return_counts=True)[1].min() < LEAST_OF_COMBINATION:
            count -= 1
        rows, numbers = np.unique(known[:, :count], axis=0, return_inverse=True)
        names = tuple(", ".join(f"{n} {int(v)}" for n, v in zip(self.columns, row, strict=False)) for row in rows)
        return numbers.ravel().tolist(), names

    def decision(self, threshold: float | None = None, cut: float | None = None, origin: str = "") -> Decision:
        return EachLabel(self.columns, None, None, origin)


def _hits(label: int, predicted: Floats, outcomes: Floats) -> tuple[Floats, Floats]:
    """Return the numbers of bags with and without the label above each threshold, from no bag to all.

    Bags where the label is missing do not count. scikit-learn's metrics give the same values, but are too slow to be
    computed for a thousand resamples.
    """
    known = ~np.isnan(outcomes[:, label])
    p, y = predicted[known, label], outcomes[known, label]
    order = np.argsort(-p, kind="stable")
    last = np.flatnonzero(np.diff(p[order], append=-np.inf))  # of the bags with the same prediction
    positive, negative = (np.concatenate([[0.0], np.cumsum(bags[order])[last]]) for bags in (y, 1 - y))
    return positive, negative


def _auc(label: int, predicted: Floats, outcomes: Floats) -> float:
    positive, negative = _hits(label, predicted, outcomes)
    pairs = positive[-1] * negative[-1]
    return float(np.trapezoid(positive, negative) / pairs) if pairs else float("nan")


def _average_precision(label: int, predicted: Floats, outcomes: Floats) -> float:
    positive, negative = _hits(label, predicted, outcomes)
    if not positive[-1] * negative[-1]:
        return float("nan")
    precision = positive[1:] / (positive[1:] + negative[1:])
    return float(np.diff(positive) @ precision / positive[-1])


def _mean(measure: Any, predicted: Floats, outcomes: Floats) -> float:
    """Return the mean over the labels for which the measure is defined."""
    each = np.array([measure(label, predicted, outcomes) for label in range(outcomes.shape[1])])
    return float(each[~np.isnan(each)].mean()) if not np.isnan(each).all() else float("nan")
