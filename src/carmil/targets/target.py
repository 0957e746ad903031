"""Targets of prediction: one class per kind, with everything that differs between kinds.

A target names the outputs of a model (the columns of F, and of evidence), links them to a loss and to predictions, and
measures predictions against outcomes. Outcomes of b bags are class numbers (b), or (b, t) floats. k outputs,
p predictions: probabilities, a number or a risk.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from carmil.errors import CarmilError
from carmil.statistics.bootstrap import Interval
from carmil.statistics.calibration import brier, cross_entropies, reliability
from carmil.statistics.hazards import StepFunction
from carmil.statistics.intervals import FoldAnswers, figure_interval, resampled_interval
from carmil.statistics.operating import OperatingPoint, Rule, at_threshold, threshold
from carmil.statistics.performance import bag_auc, bag_performance
from carmil.targets.decision import Decision, rule_origin
from carmil.targets.links import Link, Softmax

Floats = NDArray[np.float64]
Measure = Callable[[Floats, Floats], float]  # predictions (b, p), outcomes (b) or (b, t)
WITH_INTERVAL = ("auc", "f1_macro", "balanced_accuracy", "accuracy", "sensitivity", "specificity")
OF_TWO_CLASSES = ("sensitivity", "specificity")
ROUNDED = 1e-3  # of the standard deviation of numbers: the largest error that rounding may cause
LEAST_OF_RANGE = 20  # values in each range by which folds of numbers are stratified


@dataclass(frozen=True, eq=False)
class Training:
    """Data of training bags that figures may use: outcomes and, for a time to an event, the baseline hazard."""

    outcomes: NDArray[Any]
    baseline: StepFunction | None = None


@dataclass(frozen=True)
class EvidenceWords:
    """The words for positive and negative evidence, which precede the name of an output, and the unit of evidence.

    rivals: whether one output excludes the others, so that only the differences between their evidence matter.
    """

    positive: str
    negative: str
    unit: str
    rivals: bool = False

    @property
    def of_answers(self) -> bool:
        """Return whether evidence is for or against an answer; otherwise it raises or lowers a number."""
        return self.positive == "for"

    @property
    def colours(self) -> str:
        """Return the meaning of the colours of a map of evidence."""
        signs = "blue supports, orange refutes" if self.of_answers else "blue raises it, orange lowers it"
        return f"{signs}, 0 neither"

    def title(self, output: str) -> str:
        """Return the name of the evidence for an output."""
        return f"evidence for {output}" if self.of_answers else f"contribution to {self.total(output)}"

    def total(self, output: str) -> str:
        """Return the name of the quantity that the evidence for an output adds up to."""
        return f"the {self.unit} of {output}" if self.of_answers else f"the {self.unit}"


FOR_AND_AGAINST = EvidenceWords("for", "against", "logit", rivals=True)


@dataclass(frozen=True)
class Quantity:
    """The number that predictions give for an output: its name, its unit, and a note about its meaning.

    share: a probability, shown in per cent; signed: 0 has a meaning, and positive numbers have a sign; digits: number
    of significant digits of the largest numbers, if they are not shares.
    """

    name: str
    unit: str = ""
    note: str = ""
    share: bool = False
    signed: bool = False
    digits: int = 3


@dataclass(frozen=True)
class Target:
    """The base class. columns: those of the label table that hold the outcome."""

    kind: str = ""
    columns: tuple[str, ...] = ()
    batch: ClassVar[int] = 1  # bags per step, unless the user says otherwise
    label_smoothing: ClassVar[float] = 0.0  # the same
    strata_word: ClassVar[str] = "class"  # what folds are stratified by, for messages
    probabilities: ClassVar[bool] = False  # whether predictions are probabilities
    timed: ClassVar[bool] = False  # whether a baseline hazard is fitted after training
    loss_name: ClassVar[str] = "cross-entropy"  # for learning curves
    chance: ClassVar[float] = 0.5  # the key figure of predictions that are independent of the outcomes
    two_sided: ClassVar[bool] = False  # whether predictions lie above or below a middle, see `followed`
    output_word: ClassVar[str] = "output"  # what one of the outputs is called
    leading_words: ClassVar[str] = "the answer"  # what the output whose evidence is shown first is called
    contiguous_sets: ClassVar[bool] = False  # whether a prediction set has no gaps
    answers_in_words: ClassVar[bool] = True  # whether an answer is more than the predicted number
    plots: ClassVar[tuple[str, ...]] = ()  # of the report, by their names in `carmil.report.run_plots`

    @property
    def outputs(self) -> tuple[str, ...]:
        """Return the names of the outputs F."""
        raise NotImplementedError

    @property
    def prediction_names(self) -> tuple[str, ...]:
        """Return the names of the predictions, for people."""
        return self.outputs

    @property
    def quantity(self) -> Quantity:
        """Return the description of the numbers that `quantities` returns."""
        return Quantity("probability", share=True)

    def quantities(self, predicted: Floats) -> Floats:
        """Return one number per output: (..., p) -> (..., k). Averaging predictions averages these numbers."""
        return predicted

    @property
    def answer_names(self) -> tuple[str, ...]:
        """Return the possible answers, in the order of the outcomes' numbers; none if they are not classes or grades."""
        return ()

    @property
    def title(self) -> str:
        """Return the predicted quantity in words."""
        return ", ".join(self.columns)

    @property
    def words(self) -> EvidenceWords:
        """Return the words for evidence."""
        return FOR_AND_AGAINST

    @property
    def label_columns(self) -> tuple[str, ...]:
        """Return the columns of a table of predictions that hold the outcome."""
        return ("label",)

    @property
    def key_figure(self) -> str:
        """Return the figure that is reported first."""
        return next(iter(self.measures))

    @property
    def measures(self) -> Mapping[str, Measure]:
        """Return the figures that are computed from predictions and outcomes alone, and have a bootstrap interval."""
        return {}

    @property
    def key_measure(self) -> Measure:
        """Return the function that computes the key figure from predictions and outcomes."""
        return self.measures[self.key_figure]

    @property
    def figure_words(self) -> Mapping[str, str]:
        """Return the names in words of figures that only this target has."""
        return {}

    @property
    def figures_note(self) -> str:
        """Return an explanation of the figures for readers of a report."""
        return ""

    @property
    def facts(self) -> Mapping[str, str]:
        """Return the facts about the target for a model card: its loss, and the meaning of a larger output."""
        return {}

    def summary(self, outcomes: NDArray[Any]) -> str:
        """Return a summary of outcomes that are not classes or grades, whose numbers are tabulated."""
        return ""

    def prediction_columns(self, prefix: str = "p") -> list[str]:
        """Return the columns of the predictions in a table; prefix cf: those of the counterfactual attention."""
        raise NotImplementedError

    def link(self) -> Link:
        """Return a new link for a model."""
        raise NotImplementedError

    def followed(self, link: Link, outputs: Tensor) -> Tensor:
        """Return the quantity that curves show as tiles are removed, F (..., k) -> (..., k): probabilities, or the
        difference between a number and its middle, which is 0.
        """
        return link.per_output(outputs)

    @property
    def followed_words(self) -> str:
        """Return the name of the quantity `followed`, for the axis of a plot."""
        return f"probability of the {self.output_word}"

    def label_values(self, outcomes: NDArray[Any]) -> dict[str, list[Any]]:
        """Return the values of `label_columns` for some outcomes."""
        raise NotImplementedError

    def outcomes_of(self, columns: Mapping[str, Any]) -> NDArray[Any]:
        """Return the outcomes in the `label_columns` of a table: the inverse of `label_values`."""
        raise NotImplementedError

    def describe(self, outcome: Any) -> str:
        """Return one outcome as text."""
        return ", ".join(str(values[0]) for values in self.label_values(np.asarray(outcome)[None]).values())

    def outcome_cells(self, outcomes: NDArray[Any]) -> dict[str, list[str]]:
        """Return outcomes as columns of text, by heading."""
        return {"label": [self.describe(outcome) for outcome in outcomes]}

    def discordance(self, predicted: Floats, outcomes: NDArray[Any]) -> Floats:
        """Return (b) the disagreement between each case and its prediction; the cases are tested by the same models."""
        raise NotImplementedError

    def strata(self, outcomes: NDArray[Any]) -> tuple[list[int], tuple[str, ...]]:
        """Return the number of each bag's stratum, which folds are stratified by, and the names of the strata."""
        raise NotImplementedError

    def decision(self, threshold: float | None = None, cut: float | None = None, origin: str = "") -> Decision:
        """Return the rule by which predictions become an answer in words."""
        raise NotImplementedError

    def operating_point(self, predicted: Floats, outcomes: NDArray[Any], rule: Rule) -> OperatingPoint | None:
        """Return the threshold of `decision`, chosen on validation cases; None if there is none. rule: for two classes."""
        return None

    def rule_words(self, rule: str, *, level: str, merged: bool) -> str:
        """Describe the decision rule of a whole run.

        rule: the setting `threshold`; merged: whether the slides of a patient are merged.
        """
        return self.decision().words

    def readings(self, predicted: Floats, outcomes: NDArray[Any]) -> dict[str, float]:
        """Return further measurements of test cases, for the cautions."""
        return {}

    def nonconformity(self, predicted: Floats) -> Floats:
        """Return the misfit of each of `answer_names`, (b, p) -> (b, k), from 0 to 1, for prediction sets."""
        raise NotImplementedError

    def rule_origin(
        self, rule: str, each: Sequence[Decision], *, folds: Sequence[int] = (), level: str, patients: str
    ) -> str:
        """Describe how the numbers of a decision rule were chosen, and in which test folds it holds, if not in all.

        each: the rules of the models that answer together. rule, level and patients as in the run's settings and metrics.
        """
        return ""

    def are_sound(self, table: Mapping[str, Any], predicted: Sequence[str]) -> bool:
        """Return whether a table of predictions has possible outcomes, and possible values in its columns `predicted`."""
        numbers = all(np.asarray(table[name]).dtype.kind in "fiu" for name in self.label_columns)
        return numbers and (not self.probabilities or are_probabilities(table, predicted))

    def figures(
        self,
        predicted: Floats,
        outcomes: NDArray[Any],
        decisions: Sequence[Decision],
        training: Training | None = None,
    ) -> dict[str, float]:
        """Return the figures of some cases. decisions: the rule of each case."""
        return {name: measure(predicted, outcomes) for name, measure in self.measures.items()}

    def intervals(self, given: FoldAnswers) -> dict[str, Interval]:
        """Return the mean over folds of each figure that has an interval. given: scores are predictions, labels outcomes."""
        return {name: resampled_interval(measure, given) for name, measure in self.measures.items()}


@dataclass(frozen=True)
class Classes(Target):
    """One of k classes: outputs are their logits, predictions their probabilities."""

    kind: Literal["classes"] = "classes"
    names: tuple[str, ...] = ()
    label_smoothing: ClassVar[float] = 0.1
    probabilities: ClassVar[bool] = True
    output_word: ClassVar[str] = "class"
    plots: ClassVar[tuple[str, ...]] = ("roc", "precision_recall", "calibration")

    @property
    def outputs(self) -> tuple[str, ...]:
        return self.names

    @property
    def quantity(self) -> Quantity:
        note = "probability of the answer; where there is no answer, of the class that leads"
        return Quantity("probability", note=note, share=True)

    @property
    def answer_names(self) -> tuple[str, ...]:
        return self.names

    @property
    def key_figure(self) -> str:
        return "auc"

    @property
    def key_measure(self) -> Measure:
        return bag_auc

    @property
    def followed_words(self) -> str:
        return "probability of the label"

    @property
    def figures_note(self) -> str:
        if len(self.names) > 2:
            return "AUC: each class against the rest, their mean. Macro F1 is the mean over the classes."
        return (
            f"AUC: of “{self.names[1]}”. Macro F1 is the mean over the classes. Macro F1, accuracies, sensitivity and "
            "specificity are at each fold's own threshold."
        )

    def prediction_columns(self, prefix: str = "p") -> list[str]:
        return [f"{prefix}_{name}" for name in self.names]

    def link(self) -> Link:
        return Softmax()

    def label_values(self, outcomes: NDArray[Any]) -> dict[str, list[Any]]:
        return {"label": [self.names[number] for number in outcomes.tolist()]}

    def outcomes_of(self, columns: Mapping[str, Any]) -> NDArray[Any]:
        of = {name: i for i, name in enumerate(self.names)}
        return np.array([of[str(label)] for label in columns["label"]], dtype=np.int64)

    def strata(self, outcomes: NDArray[Any]) -> tuple[list[int], tuple[str, ...]]:
        return outcomes.tolist(), self.names

    def decision(self, threshold: float | None = None, cut: float | None = None, origin: str = "") -> Decision:
        return Decision(self.names, threshold, cut, origin)

    def operating_point(self, predicted: Floats, outcomes: NDArray[Any], rule: Rule) -> OperatingPoint | None:
        return threshold(outcomes, predicted[:, 1], rule) if len(self.names) == 2 else None

    def rule_origin(
        self, rule: str, each: Sequence[Decision], *, folds: Sequence[int] = (), level: str, patients: str
    ) -> str:
        return rule_origin(rule, each, folds=folds, level=level, patients=patients)

    def rule_words(self, rule: str, *, level: str, merged: bool) -> str:
        if len(self.names) > 2:
            return "the most probable class"
        chosen = Rule.parse(rule)
        how = (
            f"chosen for {chosen.words} on the validation {level}s of each model"
            if chosen.name != "fixed"
            else "given, the same for every model"
        )
        several = " (the mean, where several models answer together by their mean probability)"
        words = f"“{self.names[1]}” if its probability is at least the threshold, {how}{several}"
        return words + ("; slides use the threshold of their patients" if merged else "")

    def readings(self, predicted: Floats, outcomes: NDArray[Any]) -> dict[str, float]:
        given, shares = cross_entropies(predicted, outcomes)
        return {"cross_entropy": given, "cross_entropy_of_class_frequencies": shares}

    def nonconformity(self, predicted: Floats) -> Floats:
        """Return 1 - p, with which sets at a given coverage of each class are smallest on average."""
        return 1 - np.asarray(predicted, dtype=np.float64)

    def are_sound(self, table: Mapping[str, Any], predicted: Sequence[str]) -> bool:
        return are_names(table["label"], self.names) and are_probabilities(table, predicted)

    def figures(
        self,
        predicted: Floats,
        outcomes: NDArray[Any],
        decisions: Sequence[Decision],
        training: Training | None = None,
    ) -> dict[str, float]:
        """Return the figures of some cases; if a rule may abstain, the share answered is included.

        The leading class counts as the answer of every case; `accuracy_answered` is over the answered cases.
        """
        p, y = predicted, outcomes
        answer = leading_classes(p, decisions)
        figures = bag_performance(p, y)
        figures["accuracy"] = float((answer == y).mean())
        if len(self.names) == 2:
            figures |= at_threshold(y, answer, 0.5)  # answers are 0 and 1
        figures["ece"] = reliability(p, y).ece
        figures["brier"] = brier(p, y)
        if any(rule.cut is not None for rule in decisions):
            sure = np.array([rule.confident(row[None])[0] for rule, row in zip(decisions, p, strict=True)])
            figures["answered"] = float(sure.mean())
            figures["accuracy_answered"] = float((answer == y)[sure].mean()) if sure.any() else float("nan")
        return figures

    def intervals(self, given: FoldAnswers) -> dict[str, Interval]:
        two = len(self.names) == 2
        return {name: figure_interval(name, given) for name in WITH_INTERVAL if two or name not in OF_TWO_CLASSES}


def are_names(labels: Any, names: Sequence[str]) -> bool:
    """Return whether all labels are among the names."""
    return all(isinstance(label, str) and label in names for label in labels)


def are_probabilities(table: Mapping[str, Any], columns: Sequence[str]) -> bool:
    """Return whether these columns hold numbers from 0 to 1."""
    values = np.stack([np.asarray(table[name], dtype=np.float64) for name in columns])
    return bool(((values >= -1e-6) & (values <= 1 + 1e-6)).all())


def leading_classes(p: Floats, decisions: Sequence[Decision]) -> NDArray[np.int64]:
    """Return (b) the leading class of each row of p (b, k), by the decision rule of that row."""
    return np.array([rule.leading(row[None])[0] for rule, row in zip(decisions, p, strict=True)], dtype=np.int64)


def quantile_strata(values: Floats) -> tuple[list[int], tuple[str, ...]]:
    """Return the quarter of each value, by which folds are stratified; few or repeated values have fewer parts."""
    most = max(2, min(4, len(values) // LEAST_OF_RANGE))
    second = np.unique(values)[:2].max()  # an edge at the smallest value would leave nothing below it
    edges = np.unique(np.maximum(np.quantile(values, np.arange(1, most) / most), second))
    numbers = np.unique(np.searchsorted(edges, values, side="right"), return_inverse=True)[1]
    parts = int(numbers.max()) + 1
    members = [values[numbers == part] for part in range(parts)]
    return numbers.tolist(), tuple(f"{member.min():.4g} to {member.max():.4g}" for member in members)


def lost_in_rounding(numbers: Floats) -> bool:
    """Return whether the differences between numbers are lost in single precision, in which models are trained."""
    rounded = numbers.astype(np.float32).astype(np.float64)
    return bool(np.ptp(numbers) > 0 and np.abs(rounded - numbers).max() > ROUNDED * np.std(numbers))


def check_loss(loss: str | None, known: Sequence[str], kind: str) -> str:
    """Return the name of a loss, by default the first of the known ones; "" if there is no choice."""
    if loss is not None and loss not in known:
        raise CarmilError(
            f"--loss {loss}: a target of the kind {kind!r} has "
            + (f"the losses {' and '.join(known)}; name one of them" if known else "one loss; leave the option out")
        )
    return loss or (known[0] if known else "")
