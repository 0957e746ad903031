"""What `carmil faithfulness` finds of a map and of a run, and the verdict of the randomisation test."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from carmil.runs.run import Run
from carmil.studies.accumulator import Curve

FAILS_FROM = 0.5  # a map that is so like that of the shuffled model shows the features or the architecture
ALIKE = "the map is much the same without anything that was learned"
NO_GAIN = "it explains the answers no better than the map of the model with shuffled weights does"
UNLEARNED = "the model answers no better than with shuffled weights: it has learned nothing that a map could show"

Figure = dict[str, float]  # value, low, high, slides


@dataclass(frozen=True, eq=False)
class Followed:
    """What instances that go in a map's order tell: figures by name, curves over the share of instances taken away."""

    figures: dict[str, Figure]
    deletion: Curve
    insertion: Curve
    auc: NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class JudgedMap(Followed):
    """One explainer of a run. twin: the same explainer's map of the model with its weights shuffled, on the model itself.

    learned: whether the run answers better than with shuffled weights; None if nobody knows.
    """

    run: str
    method: str
    twin: Followed
    learned: bool | None

    @property
    def failures(self) -> tuple[str, ...]:
        """Why the map fails the randomisation test; nothing if it does not."""
        conditions = {
            UNLEARNED: self.learned is False,
            ALIKE: self.figures["randomisation"]["value"] >= FAILS_FROM,
            NO_GAIN: self.figures["aopc_gain"]["low"] <= 0,
        }
        return tuple(words for words, failed in conditions.items() if failed)

    @property
    def fails(self) -> bool | None:
        """None where nothing fails, but not everything could be asked: a constant map, a single patient or class."""
        asked = (self.figures["randomisation"]["value"], self.figures["aopc_gain"]["low"])
        if not self.failures and (self.learned is None or np.isnan(asked).any()):
            return None
        return bool(self.failures)


@dataclass(frozen=True, eq=False)
class JudgedRun:
    """All maps of a run, what random orders do to its answers, and the AUC of its twins: of copies with shuffled weights."""

    run: Run
    name: str
    slides: int
    right: int
    maps: tuple[JudgedMap, ...]
    at_random: Curve
    auc_at_random: NDArray[np.float64]
    auc_of_twins: NDArray[np.float64]
