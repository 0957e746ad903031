"""The decision rule of a run: the only place where probabilities become the answer that a user gets.

A slide of the run's own cohort is answered by the models that were tested on it, a new slide by all models: the mean of their
probabilities is compared with the mean of their thresholds, and of the confidences below which they give no answer. The mean
of p - threshold has the sign that all models agree on, if they agree; with the median of the thresholds it might not.

b bags, k classes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import mean

import numpy as np
from numpy.typing import ArrayLike, NDArray

from carmil.errors import CarmilError
from carmil.statistics.operating import ABOVE_ALL, Rule, answered, confidence

NO_ANSWER = "no answer"


@dataclass(frozen=True)
class Decision:
    """How some models together turn the probabilities of k classes into an answer.

    threshold: with two classes, the answer is the second if its probability is at least this; None: the most probable class.
    cut: confidence below which there is no answer (see `carmil.statistics.operating.confidence`); None: always an answer.
    origin: how the two numbers were chosen.
    """

    classes: tuple[str, ...]
    threshold: float | None = None
    cut: float | None = None
    origin: str = ""

    def __post_init__(self) -> None:
        if self.threshold is not None and len(self.classes) != 2:
            raise CarmilError(f"a threshold for {len(self.classes)} classes: it belongs to two; leave it out")
        if self.threshold is not None and not 0 <= self.threshold <= ABOVE_ALL:
            raise CarmilError(f"a threshold of {self.threshold}: expected a probability, from 0 to 1")
        if self.cut is not None and not 0 <= self.cut <= ABOVE_ALL:
            raise CarmilError(f"no answer below a confidence of {self.cut}: expected a number from 0 to 1")

    def leading(self, probabilities: ArrayLike) -> NDArray[np.int64]:
        """(b) the number of the leading class of each row of (b, k): the answer, or what it would be without `cut`."""
        p = np.asarray(probabilities, dtype=np.float64)
        return p.argmax(1) if self.threshold is None else (p[:, 1] >= self.threshold).astype(np.int64)

    def margins(self, probabilities: ArrayLike) -> NDArray[np.float64]:
        """(b) the distance of each row of (b, k) from another answer: from the threshold, or from the second most probable
        class."""
        p = np.asarray(probabilities, dtype=np.float64)
        return confidence(p if self.threshold is None else p[:, 1], self.threshold) if len(p) else np.zeros(0)

    def confident(self, probabilities: ArrayLike) -> NDArray[np.bool_]:
        """(b) whether an answer is given for each row of (b, k)."""
        p = np.asarray(probabilities, dtype=np.float64)
        if self.cut is None or not len(p):
            return np.ones(len(p), dtype=bool)
        return answered(p if self.threshold is None else p[:, 1], self.cut, self.threshold)

    def answers(self, probabilities: ArrayLike) -> list[str]:
        """The answer to each row of (b, k): the name of a class, or NO_ANSWER."""
        pairs = zip(self.leading(probabilities).tolist(), self.confident(probabilities).tolist(), strict=True)
        return [self.classes[leading] if confident else NO_ANSWER for leading, confident in pairs]

    def leading_class(self, probabilities: ArrayLike) -> str:
        """`leading` of one bag (k), by its name."""
        return self.classes[int(self.leading(np.asarray(probabilities)[None])[0])]

    def answer(self, probabilities: ArrayLike) -> str:
        """`answers` of one bag (k)."""
        return self.answers(np.asarray(probabilities)[None])[0]

    @property
    def rule(self) -> str:
        """The rule in words: "carcinoma if p(carcinoma) >= 0.37, else benign (balanced accuracy on validation slides)"."""
        return self.words + (f" ({self.origin})" if self.origin else "")

    @property
    def words(self) -> str:
        """The rule without its origin."""
        if self.threshold is None:
            found = "the most probable class"
        elif self.threshold > 1:  # chosen where even p = 1 is the other class
            found = f"always {self.classes[0]}"
        else:
            first, second = self.classes
            found = f"{second} if p({second}) >= {self.threshold:.4g}, else {first}"
        if self.cut is None:
            return found
        if len(self.classes) == 2:
            near = 0.5 if self.threshold is None else self.threshold
            return f"{found}; {NO_ANSWER} if p is within {self.cut:.4g} of {near:.4g}"
        return f"{found}; {NO_ANSWER} if the two most probable are less than {self.cut:.4g} apart"


def joint_decision(each: Sequence[Decision]) -> Decision:
    """The rule of models that answer by the mean of their probabilities: the mean of their thresholds and cuts."""
    thresholds = [one.threshold for one in each if one.threshold is not None]
    cuts = [one.cut for one in each if one.cut is not None]
    threshold, cut = (mean(values) if values else None for values in (thresholds, cuts))  # exact: equal ones stay equal
    return replace(each[0], threshold=threshold, cut=cut)


def rule_origin(rule: str, each: Sequence[Decision], *, folds: Sequence[int] = (), level: str, patients: str) -> str:
    """How the numbers of a decision rule were chosen, and in which test folds it holds, unless in all.

    each: the rules of the models that answer together. rule, level and patients as in the run's settings and metrics.
    """
    parsed, thresholds = Rule.parse(rule), [one.threshold for one in each]
    where = f"{'fold' if len(folds) == 1 else 'folds'} {', '.join(map(str, folds))}" if folds else ""
    if None in thresholds:
        return where if any(one.cut is not None for one in each) else ""
    if parsed.name == "fixed":
        return "threshold given"
    chosen = f"chosen for {parsed.words} on validation {level}s"
    if len(set(thresholds)) > 1:
        chosen = f"mean of the thresholds of {len(thresholds)} models, each {chosen}"
    else:
        chosen = f"threshold {chosen}"
    chosen += "; slides use the same" if level == "patient" and patients != "one-bag" else ""
    return f"{where}: {chosen}" if where else chosen
