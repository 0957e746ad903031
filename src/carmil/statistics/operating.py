"""From probabilities to answers: the threshold, chosen on validation bags, and the confidence below which no answer
is given.

b bags, k classes. With two classes p is the probability of class 1, and the answer is 1 if p >= threshold.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from carmil.errors import CarmilError, unknown
from carmil.statistics.bootstrap import finite_numbers, two_class_cases
from carmil.statistics.calibration import class_probabilities
from carmil.words import number_in

Floats = NDArray[np.float64]
ABOVE_ALL = float(np.nextafter(1.0, 2.0))  # the threshold above p = 1

RULES = {
    "balanced": "maximises balanced accuracy",
    "f1": "maximises macro F1",
    "fixed": "0.5, or the number given",
    "sensitivity": "sensitivity=0.95: the highest threshold with at least that sensitivity",
    "specificity": "specificity=0.9: the lowest threshold with at least that specificity",
}


@dataclass(frozen=True)
class Rule:
    """The rule by which a threshold is chosen.

    value: the rate that `sensitivity` and `specificity` must reach; for other rules the threshold, if none is chosen.
    """

    name: str
    value: float = 0.5

    def __post_init__(self) -> None:
        if self.name not in RULES:
            raise CarmilError(f"{unknown('threshold rule', self.name, RULES)}, or a number such as 0.5")
        if not 0 <= self.value <= 1:
            raise CarmilError(f"threshold rule {str(self)!r}: expected a number from 0 to 1")

    @classmethod
    def parse(cls, text: str) -> "Rule":
        """Parse balanced, f1, fixed, 0.5, sensitivity=0.95 or specificity=0.9."""
        name, equals, number = (part.strip() for part in text.partition("="))
        if not equals and (value := number_in(name)) is not None:
            return cls("fixed", value)
        if name not in ("sensitivity", "specificity"):
            rule = cls(name)
            if equals:
                raise CarmilError(f"threshold rule {text!r}: {name} takes no number; expected {name!r} alone")
            return rule
        if (value := number_in(number)) is None:
            raise CarmilError(f"threshold rule {text!r}: expected a number to reach, such as {name}=0.95")
        return cls(name, value)

    @property
    def words(self) -> str:
        """Describe how a threshold was chosen."""
        match self.name:
            case "fixed":
                return "given"
            case "sensitivity" | "specificity":
                return f"{self.name} of at least {self.value:g}"
            case "f1":
                return "macro F1"
            case _:
                return "balanced accuracy"

    def __str__(self) -> str:
        match self.name:
            case "fixed":
                return f"{self.value}"
            case "sensitivity" | "specificity":
                return f"{self.name}={self.value}"
            case _:
                return self.name


@dataclass(frozen=True)
class OperatingPoint:
    """A threshold, the rule that chose it, the rates it reached on validation bags, and a caution, if any."""

    threshold: float
    rule: Rule
    sensitivity: float
    specificity: float
    note: str = ""


@dataclass(frozen=True)
class _Answers:
    """The numbers of correct and wrong cases at each of several thresholds, all of shape (thresholds)."""

    tp: NDArray[np.int64]
    fn: NDArray[np.int64]
    tn: NDArray[np.int64]
    fp: NDArray[np.int64]

    @classmethod
    def at(cls, thresholds: Floats, labels: NDArray[np.bool_], p: Floats) -> "_Answers":
        positives, negatives = np.sort(p[labels]), np.sort(p[~labels])
        fn, tn = positives.searchsorted(thresholds), negatives.searchsorted(thresholds)
        return cls(tp=len(positives) - fn, fn=fn, tn=tn, fp=len(negatives) - tn)

    @property
    def sensitivity(self) -> Floats:
        return _ratio(self.tp, self.tp + self.fn)

    @property
    def specificity(self) -> Floats:
        return _ratio(self.tn, self.tn + self.fp)

    @property
    def balanced_accuracy(self) -> Floats:
        return (self.sensitivity + self.specificity) / 2

    @property
    def f1_macro(self) -> Floats:
        """Return macro F1; NaN without both classes, as for balanced accuracy."""
        wrong = self.fp + self.fn
        f1 = (_ratio(2 * self.tp, 2 * self.tp + wrong) + _ratio(2 * self.tn, 2 * self.tn + wrong)) / 2
        return np.where(np.isnan(self.balanced_accuracy), np.nan, f1)


def threshold(labels: ArrayLike, p: ArrayLike, rule: str | Rule) -> OperatingPoint:
    """Return the rule's threshold on validation bags: 0.5, or halfway between two neighbours among 0, p and 1.

    Among equally good thresholds the one nearest 0.5 is chosen. If some p is exactly 0 or 1, 0 (all answers are 1)
    and a value just above 1 (no answer is 1) are candidates too, for rates that no other threshold reaches.
    """
    rule = Rule.parse(rule) if isinstance(rule, str) else rule
    truth, values = _cases(labels, p)
    chosen, note = rule.value, ""
    if truth.all() or not truth.any():
        note = _one_class(rule, int(truth[0]))
    elif rule.name != "fixed":
        chosen = _best(rule, truth, values)
        if chosen <= values.min() or chosen > values.max():
            note = f"{rule}: every validation bag is answered {int(chosen <= values.min())} at this threshold"
    reached = _Answers.at(np.array([chosen]), truth, values)
    return OperatingPoint(
        threshold=float(chosen),
        rule=rule,
        sensitivity=float(reached.sensitivity[0]),
        specificity=float(reached.specificity[0]),
        note=note,
    )


def at_threshold(labels: ArrayLike, p: ArrayLike, threshold: float) -> dict[str, float]:
    """Return the figures of the answers at a threshold; NaN for a share of no cases, or a mean over a class without bags."""
    truth, values = _cases(labels, p)
    counts = _Answers.at(np.array([_finite(threshold)]), truth, values)
    measured = {
        "sensitivity": counts.sensitivity,
        "specificity": counts.specificity,
        "ppv": _ratio(counts.tp, counts.tp + counts.fp),
        "npv": _ratio(counts.tn, counts.tn + counts.fn),
        "f1_macro": counts.f1_macro,
        "balanced_accuracy": counts.balanced_accuracy,
        "accuracy": (counts.tp + counts.tn) / len(truth),
    }
    return {name: float(value[0]) for name, value in measured.items()}


def confidence(probabilities: ArrayLike, threshold: float | None = None) -> Floats:
    """Return (b) the margin of each answer over the alternative.

    This is |p - threshold| for p (b) or (b, 2), and the lead of the most probable class for (b, k).
    """
    values = np.asarray(probabilities)
    if values.ndim == 2 and values.shape[1] != 2:
        if threshold is not None:
            raise CarmilError(f"a threshold for {values.shape[1]} classes: expected two classes; leave it out")
        second, likeliest = np.sort(class_probabilities(values), axis=1)[:, -2:].T
        return likeliest - second
    p = class_probabilities(values)[:, 1] if values.ndim == 2 else _probabilities(values)
    return np.abs(p - (0.5 if threshold is None else _finite(threshold)))


def abstention(probabilities: ArrayLike, share: float, threshold: float | None = None) -> float:
    """Return the confidence below which a share of these validation answers lies, or a smaller share where
    confidences are equal.
    """
    if not 0 <= share < 1:
        raise CarmilError(f"a share of {share:g} answers withheld: expected at least 0 and less than 1")
    ranked = np.sort(confidence(probabilities, threshold))
    withheld = min(math.floor(share * len(ranked) + 1e-9), len(ranked) - 1)  # 1e-9 for rounding: 0.29 x 100 must be 29
    return float(_between(ranked[withheld - 1], ranked[withheld])) if withheld else 0.0


def answered(probabilities: ArrayLike, cut: float, threshold: float | None = None) -> NDArray[np.bool_]:
    """Return (b) whether an answer is confident enough to be given. `cut` comes from `abstention`, with the same threshold."""
    return confidence(probabilities, threshold) >= _finite(cut, "cut")


def _best(rule: Rule, labels: NDArray[np.bool_], p: Floats) -> float:
    neighbours = np.unique([0.0, *p, 1.0])
    # at least one threshold for every possible partition of the bags
    candidates = np.unique([0.0, 0.5, *_between(neighbours[:-1], neighbours[1:]), ABOVE_ALL])
    answers = _Answers.at(candidates, labels, p)
    match rule.name:
        case "sensitivity":
            return candidates[answers.sensitivity >= rule.value].max()
        case "specificity":
            return candidates[answers.specificity >= rule.value].min()
        case _:
            worth = answers.balanced_accuracy if rule.name == "balanced" else answers.f1_macro
            best = candidates[worth >= worth.max() - 1e-12]
            return best[
                np.abs(best - 0.5).argmin()
            ]  # of two thresholds at the same distance the lower one, which misses fewer positives


def _between(low: Floats, high: Floats) -> Floats:
    """Return the midpoint, which is above `low` even if float64 has no number in between."""
    middle = low + (high - low) / 2
    return np.where(middle > low, middle, high)


def _one_class(rule: Rule, only: int) -> str:
    if rule.name in ("sensitivity", "specificity"):
        raise CarmilError(f"{rule} cannot be set: all validation bags are of class {only}; use balanced or fixed")
    kept = f"the threshold is {rule.value:g} as given" if rule.name == "fixed" else f"{rule} falls back to 0.5"
    return f"all validation bags are of class {only}: {kept}, and one of sensitivity and specificity is not known"


def _cases(labels: ArrayLike, p: ArrayLike) -> tuple[NDArray[np.bool_], Floats]:
    truth, values = two_class_cases(labels, p=p)
    return truth, _probabilities(values)


def _probabilities(p: ArrayLike) -> Floats:
    """Return p (b) of class 1, checked to be in [0, 1]."""
    values = finite_numbers(p, "p")
    if not len(values):
        raise CarmilError("p is empty: expected the probability of class 1 of at least one bag")
    outside = ~((values >= 0) & (values <= 1))
    if outside.any():
        raise CarmilError(f"p is {values[outside][0]:g} at bag {outside.argmax()}: expected a probability from 0 to 1")
    return values


def _ratio(part: NDArray, whole: NDArray) -> Floats:
    """Divide; NaN if `whole` is 0."""
    return np.divide(part, whole, out=np.full(np.shape(part), np.nan), where=whole > 0)


def _finite(value: float, name: str = "threshold") -> float:
    if not math.isfinite(value):
        raise CarmilError(f"{name} is {value}: expected a finite number")
    return value
