"""A number, such as an age or the expression of a gene."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from carmil.targets.decision import Decision, NumberItself
from carmil.targets.links import Link, Scale
from carmil.targets.target import EvidenceWords, Floats, Measure, Quantity, Target, quantile_strata

LOSSES = ("squared", "huber")


@dataclass(frozen=True)
class Value(Target):
    """columns: the one that holds the number. The output is the number in standard deviations of the training bags.

    loss: squared, or huber, which is linear beyond one deviation.
    """

    kind: Literal["value"] = "value"
    loss: str = "squared"
    chance: ClassVar[float] = 0.0
    strata_word: ClassVar[str] = "range"
    two_sided: ClassVar[bool] = True
    loss_name: ClassVar[str] = "loss"
    answers_in_words: ClassVar[bool] = False
    plots: ClassVar[tuple[str, ...]] = ("predicted_against_true", "errors")

    @property
    def outputs(self) -> tuple[str, ...]:
        return self.columns

    @property
    def words(self) -> EvidenceWords:
        return EvidenceWords("raises the", "lowers the", f"{self.title} in standard deviations")

    @property
    def quantity(self) -> Quantity:
        return Quantity(self.columns[0], digits=4)

    @property
    def measures(self) -> Mapping[str, Measure]:
        return {"spearman": rank_correlation, "r2": explained_variance, "mae": mean_absolute_error}

    @property
    def figures_note(self) -> str:
        return (
            "Spearman correlation: 100 if predictions are in the right order, 0 is chance. R2: the share of the variance that "
            "is explained; always predicting the mean of the test fold gives 0, worse predictions less."
        )

    @property
    def facts(self) -> Mapping[str, str]:
        loss = "squared error" if self.loss == "squared" else "Huber's, linear beyond one standard deviation"
        return {
            "loss": f"{loss}, of the number in standard deviations of each model's training slides",
            "a larger output": f"a larger {self.columns[0]}",
        }

    def summary(self, outcomes: NDArray[Any]) -> str:
        low, middle, high = np.quantile(outcomes[:, 0], (0, 0.5, 1))
        return f"{self.columns[0]} from {low:.4g} to {high:.4g}, median {middle:.4g}"

    def prediction_columns(self, prefix: str = "p") -> list[str]:
        return ["predicted" if prefix == "p" else f"{prefix}_predicted"]

    def link(self) -> Link:
        return Scale(robust=self.loss == "huber")

    def followed(self, link: Link, outputs: Tensor) -> Tensor:
        """Return the difference between the value and the mean of the training bags, in its unit."""
        return link.predictions(outputs) - link.predictions(torch.zeros_like(outputs))

    @property
    def followed_words(self) -> str:
        return f"{self.title} beyond the mean"

    def label_values(self, outcomes: NDArray[Any]) -> dict[str, list[Any]]:
        return {"label": outcomes[:, 0].tolist()}

    def outcomes_of(self, columns: Mapping[str, Any]) -> NDArray[Any]:
        return np.asarray(columns["label"], dtype=np.float64)[:, None]

    def describe(self, outcome: Any) -> str:
        return f"{np.asarray(outcome).item():.4g}"

    def outcome_cells(self, outcomes: NDArray[Any]) -> dict[str, list[str]]:
        return {self.columns[0]: [f"{value:.6g}" for value in outcomes[:, 0].tolist()]}

    def discordance(self, predicted: Floats, outcomes: NDArray[Any]) -> Floats:
        """Return the absolute error of each case."""
        return np.abs(predicted[:, 0] - outcomes[:, 0])

    def strata(self, outcomes: NDArray[Any]) -> tuple[list[int], tuple[str, ...]]:
        return quantile_strata(outcomes[:, 0].astype(np.float64))

    def decision(self, threshold: float | None = None, cut: float | None = None, origin: str = "") -> Decision:
        return NumberItself((), None, None, origin, output=self.columns[0])


def explained_variance(predicted: Floats, outcomes: Floats) -> float:
    """Return R2 = 1 - sum of squared errors / sum of squares about the mean; NaN if all outcomes are equal."""
    spread = float(np.square(outcomes[:, 0] - outcomes[:, 0].mean()).sum())
    return 1 - float(np.square(predicted[:, 0] - outcomes[:, 0]).sum()) / spread if spread > 0 else float("nan")


def mean_absolute_error(predicted: Floats, outcomes: Floats) -> float:
    return float(np.abs(predicted[:, 0] - outcomes[:, 0]).mean())


def rank_correlation(predicted: Floats, outcomes: Floats) -> float:
    """Return Spearman's correlation; NaN if predictions or outcomes are all equal."""
    from scipy.stats import rankdata

    ranks = [rankdata(values) - (len(values) + 1) / 2 for values in (predicted[:, 0], outcomes[:, 0])]
    norm = float(np.sqrt(np.prod([np.square(rank).sum() for rank in ranks])))
    return float(ranks[0] @ ranks[1]) / norm if norm > 0 else float("nan")
