"""The decision rule of a run, the only code that turns a model's numbers (probabilities, a risk, a value) into answers.

A slide of the run's own cohort gets its answer from the models that were tested on it, a new slide from all models: the
mean of their probabilities is compared with the mean of their thresholds, and with the mean of the confidences below
which they abstain. If all models agree, the mean of p - threshold has the same sign as theirs; with the median
threshold the sign could differ.

b bags, k classes; of targets other than classes, p numbers per bag.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import mean

import numpy as np
from numpy.typing import ArrayLike, NDArray

from carmil.errors import CarmilError
from carmil.statistics.operating import ABOVE_ALL, Rule, answered, confidence
from carmil.words import probability_text

NO_ANSWER = "no answer"
LOWER, HIGHER = "lower risk", "higher risk"
TINY = 1e-12  # the least probability whose logarithm is taken


@dataclass(frozen=True)
class Decision:
    """The rule by which some models together turn the probabilities of k classes into an answer.

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
            raise CarmilError(f"a threshold for {len(self.classes)} classes: expected two classes; leave it out")
        if self.threshold is not None and not 0 <= self.threshold <= ABOVE_ALL:
            raise CarmilError(f"a threshold of {self.threshold}: expected a probability, from 0 to 1")
        if self.cut is not None and not 0 <= self.cut <= ABOVE_ALL:
            raise CarmilError(f"no answer below a confidence of {self.cut}: expected a number from 0 to 1")

    def leading(self, predicted: ArrayLike) -> NDArray[np.int64]:
        """Return (b) the number of the leading class of each row of (b, k): the answer, or what the answer would be
        without `cut`.
        """
        p = np.asarray(predicted, dtype=np.float64)
        return p.argmax(1) if self.threshold is None else (p[:, 1] >= self.threshold).astype(np.int64)

    def margins(self, predicted: ArrayLike) -> NDArray[np.float64]:
        """Return (b) the distance of each row of (b, k) from another answer: from the threshold, or from the second
        most probable class."""
        p = np.asarray(predicted, dtype=np.float64)
        return confidence(p if self.threshold is None else p[:, 1], self.threshold) if len(p) else np.zeros(0)

    def turning(self, predicted: ArrayLike, output: int) -> float | None:
        """Return the distance by which the outputs of one bag (p) must move for another answer, in the unit of
        evidence; None if no change of the outputs, or no known one, gives another answer.

        output: the one whose evidence is shown. Probabilities that are means over models are treated as those of one
        model.
        """
        p = np.asarray(predicted, dtype=np.float64)
        if self.threshold is None:
            second, first = np.sort(np.log(p.clip(TINY)))[-2:].tolist()
            return float(first - second)
        return abs(_logit(p[1]) - _logit(self.threshold)) if 0 < self.threshold < 1 else None

    def confident(self, predicted: ArrayLike) -> NDArray[np.bool_]:
        """Return (b) whether an answer is given for each row of (b, k)."""
        p = np.asarray(predicted, dtype=np.float64)
        if self.cut is None or not len(p):
            return np.ones(len(p), dtype=bool)
        return answered(p if self.threshold is None else p[:, 1], self.cut, self.threshold)

    def explained(self, predicted: ArrayLike) -> str:
        """Return the output whose evidence is shown for one bag (k): that of the leading class."""
        return self.classes[int(self.leading(np.asarray(predicted)[None])[0])]

    def answers(self, predicted: ArrayLike) -> list[str]:
        """Return the answer to each row of (b, k): the name of a class, or NO_ANSWER."""
        pairs = zip(self.leading(predicted).tolist(), self.confident(predicted).tolist(), strict=True)
        return [self.classes[leading] if confident else NO_ANSWER for leading, confident in pairs]

    def answer(self, predicted: ArrayLike) -> str:
        """Return the answer for one bag (k)."""
        return self.answers(np.asarray(predicted)[None])[0]

    def value_words(self, predicted: ArrayLike) -> str:
        """Return the number behind the answer for one bag (k), with its name."""
        leading = int(self.leading(np.asarray(predicted)[None])[0])
        return f"probability of {self.classes[leading]}: {probability_text(np.asarray(predicted)[leading])}"

    @property
    def rule(self) -> str:
        """Return the rule as text: "carcinoma if p(carcinoma) >= 0.37, else benign (balanced accuracy on validation slides)"."""
        return self.words + (f" ({self.origin})" if self.origin else "")

    @property
    def words(self) -> str:
        """Return the rule as text, without its origin."""
        if self.threshold is None:
            text = "the most probable class"
        elif self.threshold > 1:  # the threshold is above any probability
            text = f"always {self.classes[0]}"
        else:
            first, second = self.classes
            text = f"{second} if p({second}) >= {self.threshold:.4g}, else {first}"
        if self.cut is None:
            return text
        if len(self.classes) == 2:
            near = 0.5 if self.threshold is None else self.threshold
            return f"{text}; {NO_ANSWER} if p is within {self.cut:.4g} of {near:.4g}"
        return f"{text}; {NO_ANSWER} if the two most probable are less than {self.cut:.4g} apart"


@dataclass(frozen=True)
class RiskGroups(Decision):
    """Two groups of risk, divided at `threshold`; predictions are risks (b, 1), and evidence is shown for the risk."""

    output: str = "risk"

    def __post_init__(self) -> None:
        """Accept any threshold: a risk is not a probability."""

    def leading(self, predicted: ArrayLike) -> NDArray[np.int64]:
        return (np.asarray(predicted, dtype=np.float64)[:, 0] >= (self.threshold or 0.0)).astype(np.int64)

    def margins(self, predicted: ArrayLike) -> NDArray[np.float64]:
        return np.abs(np.asarray(predicted, dtype=np.float64)[:, 0] - (self.threshold or 0.0))

    def turning(self, predicted: ArrayLike, output: int) -> float | None:
        return float(self.margins(np.asarray(predicted)[None])[0])

    def explained(self, predicted: ArrayLike) -> str:
        return self.output

    def value_words(self, predicted: ArrayLike) -> str:
        risk = float(np.asarray(predicted)[0])
        return f"{self.output}: {risk:+.3g} log hazard, relative to the mean of the training slides"

    @property
    def words(self) -> str:
        return f"{self.classes[1]} if {self.output} >= {self.threshold or 0.0:.4g}, else {self.classes[0]}"


@dataclass(frozen=True)
class NumberItself(Decision):
    """No rule: the answer is the predicted number."""

    output: str = "value"

    def leading(self, predicted: ArrayLike) -> NDArray[np.int64]:
        return np.zeros(len(np.asarray(predicted)), dtype=np.int64)

    def margins(self, predicted: ArrayLike) -> NDArray[np.float64]:
        return np.abs(np.asarray(predicted, dtype=np.float64)[:, 0])

    def turning(self, predicted: ArrayLike, output: int) -> float | None:
        return None

    def answers(self, predicted: ArrayLike) -> list[str]:
        return [f"{value:.4g}" for value in np.asarray(predicted, dtype=np.float64)[:, 0]]

    def explained(self, predicted: ArrayLike) -> str:
        return self.output

    def value_words(self, predicted: ArrayLike) -> str:
        return ""

    @property
    def words(self) -> str:
        return f"the predicted {self.output}"


@dataclass(frozen=True)
class MedianGrade(Decision):
    """The median grade: the lowest grade that, together with those below it, has a probability of at least one half.

    classes: the grades in order.
    """

    output: str = "grade"

    def leading(self, predicted: ArrayLike) -> NDArray[np.int64]:
        reached = np.asarray(predicted, dtype=np.float64).cumsum(1) >= 0.5 - 1e-9
        reached[:, -1] = True
        return reached.argmax(1)

    def turning(self, predicted: ArrayLike, output: int) -> float | None:
        """Return the distance from the nearest cut point: P(grade <= i) = 1/2 where the output is the cut point of i."""
        return min(abs(_logit(p)) for p in np.asarray(predicted, dtype=np.float64).cumsum()[:-1])

    def explained(self, predicted: ArrayLike) -> str:
        return self.output

    @property
    def words(self) -> str:
        return "the median grade: the lowest that, with those below it, has p >= 0.5"


@dataclass(frozen=True)
class EachLabel(Decision):
    """Every label (classes) with a probability of at least one half; the evidence shown is that of the most probable."""

    def leading(self, predicted: ArrayLike) -> NDArray[np.int64]:
        return np.asarray(predicted, dtype=np.float64).argmax(1)

    def margins(self, predicted: ArrayLike) -> NDArray[np.float64]:
        return np.abs(np.asarray(predicted, dtype=np.float64) - 0.5).min(1)

    def turning(self, predicted: ArrayLike, output: int) -> float | None:
        return abs(_logit(np.asarray(predicted, dtype=np.float64)[output]))

    def value_words(self, predicted: ArrayLike) -> str:
        return ", ".join(
            f"{name}: {probability_text(p)}" for name, p in zip(self.classes, np.asarray(predicted), strict=True)
        )

    def answers(self, predicted: ArrayLike) -> list[str]:
        given = np.asarray(predicted, dtype=np.float64) >= 0.5
        return [", ".join(np.array(self.classes)[row]) or "none" for row in given]

    @property
    def words(self) -> str:
        return "every label with a probability of at least 0.5"


def _logit(p: float) -> float:
    return float(np.log(max(p, TINY) / max(1 - p, TINY)))


def joint_decision(each: Sequence[Decision]) -> Decision:
    """Return the joint rule of models whose probabilities are averaged: the means of their thresholds and cuts."""
    thresholds = [one.threshold for one in each if one.threshold is not None]
    cuts = [one.cut for one in each if one.cut is not None]
    threshold, cut = (
        mean(values) if values else None for values in (thresholds, cuts)
    )  # equal values have exactly this mean
    return replace(each[0], threshold=threshold, cut=cut)


def rule_origin(rule: str, each: Sequence[Decision], *, folds: Sequence[int] = (), level: str, patients: str) -> str:
    """Describe how the numbers of a decision rule were chosen, and in which test folds it holds, if not in all.

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
