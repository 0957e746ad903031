"""What a study answers, case by case, at the operating point of each fold. c cases (patients, or slides), k classes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from carmil.evidence.operating import answered as sure_enough
from carmil.studies import card
from carmil.studies.answers import columns, numbers
from carmil.studies.run_folder import StudyRun

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class OperatingPoint:
    """Where a fold's "yes" begins (two classes), and below which confidence it has no answer."""

    threshold: float | None
    cut: float | None


@dataclass(frozen=True, eq=False)
class Cases:
    """What is answered for c cases, all test folds together: p (c, k), truth, answer and whether it is sure (c)."""

    frame: "pd.DataFrame"
    p: NDArray[np.float64]
    truth: NDArray[np.int64]
    answer: NDArray[np.int64]
    sure: NDArray[np.bool_]

    @property
    def right(self) -> NDArray[np.bool_]:
        return self.answer == self.truth

    @property
    def confusion(self) -> NDArray[np.int64]:
        """(k, k) cases by truth, then answer."""
        return confusion(self.truth, self.answer, self.p.shape[1])


def operating_points(run: StudyRun) -> dict[int, OperatingPoint]:
    """Of each fold as predictions count them. Seeds answer together, so theirs is the median, as in `carmil evaluate`."""
    found: dict[int, list[dict]] = {}
    for fold, model in zip(card.tested_folds(run), run.models, strict=True):
        found.setdefault(fold, []).append(model)

    def median(models: Sequence[dict], name: str) -> float | None:
        values = [model[name] for model in models if model[name] is not None]
        return float(np.median(values)) if values else None

    return {
        fold: OperatingPoint(median(models, "threshold"), median(models, "abstain_below"))
        for fold, models in found.items()
    }


def decided(run: StudyRun, frame: "pd.DataFrame", prefix: str = "p") -> Cases:
    """The answers: of two classes by the threshold of each case's fold, of more the likeliest."""
    p = frame[columns(run.classes, prefix)].to_numpy(dtype=np.float64)
    fold = frame["fold"].to_numpy()
    answer, sure = p.argmax(1), np.ones(len(p), dtype=bool)
    for number, point in operating_points(run).items():
        rows = fold == number
        if point.threshold is not None:
            answer[rows] = p[rows, 1] >= point.threshold
        if point.cut is not None and rows.any():
            sure[rows] = sure_enough(p[rows] if point.threshold is None else p[rows, 1], point.cut, point.threshold)
    return Cases(frame, p, numbers(frame, run.classes), answer, sure)


def confusion(truth: NDArray, answer: NDArray, k: int) -> NDArray[np.int64]:
    """(k, k) cases by truth, then answer."""
    return np.bincount(truth * k + answer, minlength=k * k).reshape(k, k)
