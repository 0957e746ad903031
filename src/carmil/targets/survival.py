"""A time to an event, or to the end of follow-up without one (censored)."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from carmil.statistics.hazards import kaplan_meier, survival_probabilities
from carmil.statistics.operating import OperatingPoint, Rule
from carmil.statistics.survival import concordance, dynamic_auc, integrated_brier, uno_concordance
from carmil.targets.decision import HIGHER, LOWER, Decision, RiskGroups
from carmil.targets.links import Cox, DiscreteTime, Link
from carmil.targets.target import EvidenceWords, Floats, Measure, Quantity, Target, Training, quantile_strata

TIMES = 20  # times at which survival is compared with the outcome
LOSSES = ("cox", "discrete")
UNITS = ("days", "weeks", "months", "years")  # with which a column of times may end
_CENSORED = re.compile(r"(?<!un)(?<!non)(?<!not)censor|^(alive|living|survived)$")
_NOT = {"no", "non", "not", "un"}
_BOTH = {"dead", "death", "died", "status"}  # a column "alive or dead" may have 1 for either


@dataclass(frozen=True)
class Survival(Target):
    """columns: the time, and whether the event occurred. The output is the log risk: larger means an earlier event.

    loss: cox (Cox's partial likelihood) or discrete (the likelihood of time in intervals).
    """

    kind: Literal["survival"] = "survival"
    columns: tuple[str, ...] = ("time", "event")
    loss: str = "cox"
    batch: ClassVar[int] = 32
    strata_word: ClassVar[str] = "group"
    two_sided: ClassVar[bool] = True
    timed: ClassVar[bool] = True
    loss_name: ClassVar[str] = "loss"
    plots: ClassVar[tuple[str, ...]] = ("kaplan_meier", "survival_calibration", "auc_over_time", "brier_over_time")

    @property
    def outputs(self) -> tuple[str, ...]:
        return ("risk",)

    @property
    def title(self) -> str:
        return f"{self.columns[0]} to {self.event_name}"

    @property
    def event_name(self) -> str:
        """Return the name of an event: that of its column, unless the column is named after censoring or survival."""
        name = self.columns[1]
        return "event" if "censor" in name.casefold() or names_no_event(name) else name

    @property
    def time_unit(self) -> str:
        """Return the unit of times, if the name of their column ends with one."""
        return next((unit for unit in UNITS if self.columns[0].casefold().endswith(unit)), "")

    @property
    def words(self) -> EvidenceWords:
        return EvidenceWords("raises the", "lowers the", "log hazard")

    @property
    def quantity(self) -> Quantity:
        return Quantity("risk", "log hazard", "0 is the mean of the training slides", signed=True)

    @property
    def label_columns(self) -> tuple[str, ...]:
        return ("time", "event")

    @property
    def measures(self) -> Mapping[str, Measure]:
        return {"c_index": lambda predicted, y: concordance(y[:, 0], y[:, 1] > 0, predicted[:, 0])}

    @property
    def figures_note(self) -> str:
        return (
            "C-index: of the pairs in one fold of which the earlier time is an event, the share in which the earlier case has "
            "the higher risk; 50 is chance. Uno's weights them by how likely they are to be seen uncensored. AUC over time: of "
            "cases with the event so far against those without, mean over the times. Brier score over time: the squared error "
            "of the predicted survival, lower is better; Kaplan and Meier's estimate for the training cases predicts the same "
            "for everyone."
        )

    @property
    def facts(self) -> Mapping[str, str]:
        cox = "Cox's partial likelihood, Efron's ties; each event is compared with the slides at risk of the same step"
        discrete = "likelihood of the interval of the event; intervals hold equally many events of the training slides"
        return {
            "loss": cox if self.loss == "cox" else discrete,
            "a larger output": "a higher risk, an earlier event: the log hazard, relative to the mean of the training slides",
        }

    def summary(self, outcomes: NDArray[Any]) -> str:
        events = int((outcomes[:, 1] > 0).sum())
        median = f"{np.median(outcomes[:, 0]):.4g} {self.time_unit}".strip()
        return f"{events} with {self.event_name}, {len(outcomes) - events} censored, median time {median}"

    def prediction_columns(self, prefix: str = "p") -> list[str]:
        return ["risk" if prefix == "p" else f"{prefix}_risk"]

    def link(self) -> Link:
        return Cox() if self.loss == "cox" else DiscreteTime()

    def followed(self, link: Link, outputs: Tensor) -> Tensor:
        """Return the risk, which is 0 at the mean of the training bags."""
        return link.predictions(outputs)

    @property
    def followed_words(self) -> str:
        return "log hazard beyond the mean"

    def label_values(self, outcomes: NDArray[Any]) -> dict[str, list[Any]]:
        return {"time": outcomes[:, 0].tolist(), "event": outcomes[:, 1].astype(int).tolist()}

    def outcomes_of(self, columns: Mapping[str, Any]) -> NDArray[Any]:
        return np.stack([np.asarray(columns[name], dtype=np.float64) for name in ("time", "event")], axis=1)

    def describe(self, outcome: Any) -> str:
        time, event = np.asarray(outcome).tolist()
        return f"{f'{time:.4g} {self.time_unit}'.strip()}, {self.event_name if event else 'censored'}"

    def outcome_cells(self, outcomes: NDArray[Any]) -> dict[str, list[str]]:
        times, events = outcomes.T.tolist()
        return {
            self.columns[0]: [f"{time:.6g}" for time in times],
            self.event_name: ["yes" if event else "censored" for event in events],
        }

    def discordance(self, predicted: Floats, outcomes: NDArray[Any]) -> Floats:
        """Return (b) the number of other cases with which each case is in the wrong order, by Harrell's definition."""
        time, event, risk = outcomes[:, 0], outcomes[:, 1] > 0, predicted[:, 0]
        earlier = event[:, None] & ((time[:, None] < time) | ((time[:, None] == time) & ~event))
        wrong = earlier & (risk[:, None] < risk)
        return (wrong.sum(0) + wrong.sum(1)).astype(np.float64)

    def strata(self, outcomes: NDArray[Any]) -> tuple[list[int], tuple[str, ...]]:
        """Return whether each bag has an event; if all have one, the range of its time."""
        happened = outcomes[:, 1] > 0
        if happened.all():
            return quantile_strata(outcomes[:, 0].astype(np.float64))
        return happened.astype(int).tolist(), ("censored", self.event_name)

    def decision(self, threshold: float | None = None, cut: float | None = None, origin: str = "") -> Decision:
        return RiskGroups((LOWER, HIGHER), threshold, None, origin)

    def operating_point(self, predicted: Floats, outcomes: NDArray[Any], rule: Rule) -> OperatingPoint | None:
        """Return the median risk, which divides the cases into two groups."""
        return OperatingPoint(float(np.median(predicted[:, 0])), rule, np.nan, np.nan)

    def rule_words(self, rule: str, *, level: str, merged: bool) -> str:
        return (
            f"{HIGHER} if the risk is at least the median risk of the validation {level}s of each model, else {LOWER}"
        )

    def rule_origin(
        self, rule: str, each: Sequence[Decision], *, folds: Sequence[int] = (), level: str, patients: str
    ) -> str:
        where = f"{'fold' if len(folds) == 1 else 'folds'} {', '.join(map(str, folds))}: " if folds else ""
        several = f"mean of {len(each)} models: " if len(each) > 1 else ""
        return f"{where}{several}the median risk of validation {level}s"

    def figures(
        self,
        predicted: Floats,
        outcomes: NDArray[Any],
        decisions: Sequence[Decision],
        training: Training | None = None,
    ) -> dict[str, float]:
        """Return Harrell's C and, given the outcomes of the training bags, the figures weighted by their censoring.

        These are Uno's C, the mean AUC over time, and the Brier score integrated over time, for comparison also that of
        Kaplan and Meier's estimate of the training bags, which does not depend on the slide.
        """
        figures = super().figures(predicted, outcomes, decisions)
        if training is None or training.baseline is None:
            return figures
        time, event = outcomes[:, 0], outcomes[:, 1] > 0
        train_time, train_event = training.outcomes[:, 0], training.outcomes[:, 1] > 0
        known = time < train_time[train_event].max(initial=0.0)  # censoring is unknown after the last training event
        horizons = horizons_within(time, event, known)
        if not len(horizons):
            return figures
        reference = (train_time, train_event, time, event)
        risk = predicted[:, 0]
        survival = survival_probabilities(training.baseline, risk, horizons)
        population = kaplan_meier(train_time, train_event).at(horizons)
        figures["uno_c"] = uno_concordance(*reference, risk, tau=float(horizons[-1]))
        figures["auc_over_time"] = float(np.nanmean(dynamic_auc(*reference, risk, horizons)))
        figures["ibs"] = integrated_brier(*reference, survival, horizons)
        figures["ibs_population"] = integrated_brier(*reference, np.tile(population, (len(time), 1)), horizons)
        return figures


def names_no_event(column: str) -> bool:
    """Return whether a 1 in a column of this name means that there was no event: "censored", "alive", but not "non_censored"."""
    words = re.findall("[a-z]+", column.casefold())
    if "censor" not in column.casefold() and not _BOTH.isdisjoint(words):
        return False
    return any(_CENSORED.search(word) and _NOT.isdisjoint(words[:i]) for i, word in enumerate(words))


def horizons_within(time: Floats, event: NDArray[np.bool_], known: NDArray[np.bool_]) -> Floats:
    """Return times to compare predictions at, from the 10th to the 90th percentile of the events; none if these tie."""
    events = time[event & known]
    if len(events) < 2:
        return np.zeros(0)
    low, high = np.quantile(events, (0.1, 0.9))
    high = min(high, float(np.nextafter(time[known].max(), 0)))
    return np.linspace(low, high, TIMES) if low < high else np.zeros(0)
