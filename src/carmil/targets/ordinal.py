"""Ordered grades, such as a tumour's."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from carmil.targets.decision import Decision, MedianGrade
from carmil.targets.links import CumulativeLogits, Link
from carmil.targets.target import EvidenceWords, Floats, Measure, Quantity, Target, are_names, are_probabilities
from carmil.words import number_in


@dataclass(frozen=True)
class Ordinal(Target):
    """names: the grades in order. There is one output, "towards a higher grade", and learned cut points between grades."""

    kind: Literal["ordinal"] = "ordinal"
    names: tuple[str, ...] = ()
    chance: ClassVar[float] = 0.0
    strata_word: ClassVar[str] = "grade"
    two_sided: ClassVar[bool] = True
    probabilities: ClassVar[bool] = True
    contiguous_sets: ClassVar[bool] = True
    plots: ClassVar[tuple[str, ...]] = ("grade_distribution", "grade_calibration")

    @property
    def outputs(self) -> tuple[str, ...]:
        return self.columns

    @property
    def answer_names(self) -> tuple[str, ...]:
        return self.names

    @property
    def words(self) -> EvidenceWords:
        return EvidenceWords("raises the", "lowers the", "logit of a higher grade")

    @property
    def prediction_names(self) -> tuple[str, ...]:
        return self.names

    @property
    def quantity(self) -> Quantity:
        note = "the mean of the grades, each weighted by its probability"
        return Quantity(f"mean {self.columns[0]}", note=note if self._numbered else f"{note}, numbered from 1")

    def quantities(self, predicted: Floats) -> Floats:
        numbers = [float(name) for name in self.names] if self._numbered else range(1, len(self.names) + 1)
        return (np.asarray(predicted) @ np.array(numbers, dtype=np.float64))[..., None]

    @property
    def _numbered(self) -> bool:
        return all(number_in(name) is not None for name in self.names)

    @property
    def measures(self) -> Mapping[str, Measure]:
        return {"kappa": self._kappa, "grade_mae": self._distance, "accuracy": self._accuracy}

    @property
    def figures_note(self) -> str:
        return (
            "Quadratic kappa: agreement beyond chance, which counts an error by the square of its distance in grades; 100 is "
            "perfect, 0 is chance. Accuracy: the share of exact answers."
        )

    @property
    def facts(self) -> Mapping[str, str]:
        return {
            "loss": "cross-entropy of the grade, by cumulative logits: one output and learned cut points between the grades",
            "a larger output": "a higher grade",
        }

    def prediction_columns(self, prefix: str = "p") -> list[str]:
        return [f"{prefix}_{name}" for name in self.names]

    def link(self) -> Link:
        return CumulativeLogits(len(self.names))

    def followed(self, link: Link, outputs: Tensor) -> Tensor:
        """Return F minus the mean of the cut points between the grades."""
        assert isinstance(link, CumulativeLogits)
        return outputs - link.cuts.detach().mean(-1)

    @property
    def followed_words(self) -> str:
        return "logit beyond the middle grades"

    def label_values(self, outcomes: NDArray[Any]) -> dict[str, list[Any]]:
        return {"label": [self.names[number] for number in outcomes.astype(int).tolist()]}

    def outcomes_of(self, columns: Mapping[str, Any]) -> NDArray[Any]:
        of = {name: i for i, name in enumerate(self.names)}
        return np.array([of[str(label)] for label in columns["label"]], dtype=np.int64)

    def outcome_cells(self, outcomes: NDArray[Any]) -> dict[str, list[str]]:
        return {self.columns[0]: [self.names[number] for number in outcomes.astype(int).tolist()]}

    def strata(self, outcomes: NDArray[Any]) -> tuple[list[int], tuple[str, ...]]:
        return outcomes.astype(int).tolist(), self.names

    def are_sound(self, table: Mapping[str, Any], predicted: Sequence[str]) -> bool:
        return are_names(table["label"], self.names) and are_probabilities(table, predicted)

    def decision(self, threshold: float | None = None, cut: float | None = None, origin: str = "") -> Decision:
        return MedianGrade(self.names, None, None, origin, output=self.columns[0])

    def nonconformity(self, predicted: Floats) -> Floats:
        """Return the larger of the probabilities of lower and of higher grades: it is smallest for the median grade."""
        p = np.asarray(predicted, dtype=np.float64)
        not_above = p.cumsum(1)
        return np.maximum(not_above - p, 1 - not_above).clip(0, 1)

    def _grades(self, predicted: Floats) -> NDArray[np.int64]:
        return self.decision().leading(predicted)

    def _kappa(self, predicted: Floats, outcomes: NDArray[Any]) -> float:
        """Return Cohen's kappa with quadratic weights: 1 - squared distance / that of grades drawn at random; NaN if undefined."""
        given, truth = (
            np.bincount(grades, minlength=len(self.names)) for grades in (self._grades(predicted), outcomes)
        )
        between = np.square(np.subtract.outer(np.arange(len(self.names)), np.arange(len(self.names))))
        chance = float(given @ between @ truth) / len(outcomes) ** 2
        return 1 - float(np.square(self._grades(predicted) - outcomes).mean()) / chance if chance > 0 else float("nan")

    def _distance(self, predicted: Floats, outcomes: NDArray[Any]) -> float:
        return float(np.abs(self._grades(predicted) - outcomes).mean())

    def _accuracy(self, predicted: Floats, outcomes: NDArray[Any]) -> float:
        return float((self._grades(predicted) == outcomes).mean())
