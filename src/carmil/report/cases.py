"""The answers of a study, case by case, by the decision rule of the models that were tested on the case.

c cases (patients, or slides), k classes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from carmil.runs.decision import NO_ANSWER, Decision
from carmil.runs.run import Run
from carmil.studies.figures import mean_over_seeds
from carmil.studies.predictions import class_numbers, probability_columns

if TYPE_CHECKING:
    import pandas as pd

FOLDS = ", "  # between the folds that a slide was tested in, where there are several divisions


@dataclass(frozen=True, eq=False)
class Cases:
    """Answers for c cases, and the rule of each.

    p (c, k), truth (c), answer (c): the leading class, sure (c): whether that is the answer, or there is none.
    """

    frame: "pd.DataFrame"
    p: NDArray[np.float64]
    truth: NDArray[np.int64]
    answer: NDArray[np.int64]
    sure: NDArray[np.bool_]
    decisions: tuple[Decision, ...]

    @property
    def right(self) -> NDArray[np.bool_]:
        return self.answer == self.truth

    @property
    def wrong(self) -> NDArray[np.bool_]:
        """Where there is an answer, and it is not the truth."""
        return self.sure & ~self.right

    def answers(self, classes: Sequence[str]) -> list[str]:
        """The answers by name, NO_ANSWER where a rule abstains."""
        pairs = zip(self.answer.tolist(), self.sure.tolist(), strict=True)
        return [classes[leading] if sure else NO_ANSWER for leading, sure in pairs]

    @property
    def margin(self) -> NDArray[np.float64]:
        """(c) the distance of each case from another answer by its own rule: thresholds differ between folds."""
        pairs = zip(self.decisions, self.p, strict=True)
        return np.array([decision.margins(p[None])[0] for decision, p in pairs])

    @property
    def confusion(self) -> NDArray[np.int64]:
        """(k, k) cases by truth, then by leading class."""
        return confusion(self.truth, self.answer, self.p.shape[1])


def decision_of_folds(run: Run, folds: Sequence[int]) -> Decision:
    """The rule of the models that were tested on some folds, all seeds together."""
    return run.decision([row for row, fold in enumerate(run.tested_folds) if fold in folds])


def decide_cases(run: Run, frame: "pd.DataFrame", prefix: str = "p") -> Cases:
    """The answers to the rows of a table with the columns `fold` and PREFIX_CLASS, each by the rule of its fold or folds."""
    p = frame[probability_columns(run.classes, prefix)].to_numpy(dtype=np.float64)
    folds = frame["fold"].astype(str).to_numpy()
    rules = {fold: decision_of_folds(run, [int(part) for part in fold.split(FOLDS)]) for fold in dict.fromkeys(folds)}
    answer, sure = np.zeros(len(p), dtype=np.int64), np.ones(len(p), dtype=bool)
    for fold, rule in rules.items():
        rows = folds == fold
        answer[rows], sure[rows] = rule.leading(p[rows]), rule.confident(p[rows])
    return Cases(frame, p, class_numbers(frame, run.classes), answer, sure, tuple(rules[fold] for fold in folds))


def one_row_per_slide(run: Run) -> "pd.DataFrame":
    """The answers of all models that were tested on each slide, over folds and seeds."""
    frame = mean_over_seeds(run.predictions(), run.classes)
    if len(run.data.splits) == 1:
        return frame
    keys = ["slide", "patient", "label"]
    values = [name for name in frame.columns if name not in (*keys, "fold")]
    grouped = frame.sort_values("fold").groupby(keys, sort=False)
    pooled = grouped[values].mean()
    pooled.insert(0, "fold", grouped["fold"].agg(lambda folds: FOLDS.join(map(str, folds))))
    return pooled.reset_index()


def confusion(truth: NDArray, answer: NDArray, k: int) -> NDArray[np.int64]:
    """(k, k) cases by truth, then answer."""
    return np.bincount(truth * k + answer, minlength=k * k).reshape(k, k)
