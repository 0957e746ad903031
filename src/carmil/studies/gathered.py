"""What models answer as instances go, gathered slide by slide until figures, curves and the cohort's AUC are made of it.

e maps, b slides, S steps, k classes, r random orders, m models.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from carmil.evidence.faithfulness import Faithfulness
from carmil.evidence.performance import bag_auc
from carmil.studies.figures import mean_interval

Floats = NDArray[np.float64]
RESAMPLES = 500


@dataclass(frozen=True, eq=False)
class Curve:
    """Mean over the slides at each of S+1 steps, and the 95 % band over resampled patients."""

    mean: Floats
    low: Floats
    high: Floats


class Gathered:
    """Sums over the models of each slide. most, least (e, b, S+1) and at_random (b, S+1): of rightly answered ones."""

    def __init__(self, slides: int, methods: Sequence[str], steps: int, random_orders: int, classes: int) -> None:
        maps = len(methods)
        self.most, self.least = np.zeros((maps, slides, steps + 1)), np.zeros((maps, slides, steps + 1))
        self.at_random = np.zeros((slides, steps + 1))
        self.rights, self.models = np.zeros(slides), np.zeros(slides)
        self.answers = np.zeros((maps, slides, steps + 1, classes))
        self.random_answers = np.zeros((random_orders, slides, steps + 1, classes))
        self._sums: dict[str, Floats] = {}
        self._counts: dict[str, Floats] = {}

    def add(self, name: str, where: NDArray[np.int64], values: Tensor, *, only: Tensor | None = None) -> None:
        """A figure (e, some slides) of one model; NaN, and slides that are not among `only`, do not count."""
        found = values.double().numpy()
        there = ~np.isnan(found) & (True if only is None else only.numpy())
        for kept, more in ((self._sums, np.where(there, found, 0.0)), (self._counts, there)):
            kept.setdefault(name, np.zeros(self.most.shape[:2]))[:, where] += more

    def add_curves(self, where: NDArray[np.int64], found: Faithfulness, answers: Tensor) -> None:
        """p of one model: `found` of the labels' classes, `answers` (e + e + r + e, some slides, S+1, k) of all."""
        right, maps = found.right.numpy()[:, None], len(self.most)
        self.most[:, where] += found.most_first.numpy() * right
        self.least[:, where] += found.least_first.numpy() * right
        self.at_random[where] += found.at_random.mean(0).numpy() * right
        self.rights[where] += right[:, 0]
        self.models[where] += 1
        self.answers[:, where] += answers[:maps].numpy()
        self.random_answers[:, where] += answers[2 * maps : -maps].numpy()

    def figures(self, patients: Sequence[str]) -> list[dict[str, dict[str, float]]]:
        """Of each map, by name: the mean over the slides of the mean over their models."""
        with np.errstate(invalid="ignore"):
            means = {name: self._sums[name] / self._counts[name] for name in self._sums}
        return [
            {name: mean_interval(values[i], patients) for name, values in means.items()} for i in range(len(self.most))
        ]

    def curve(self, sums: Floats, patients: Sequence[str], *, backwards: bool = False) -> Curve:
        """Of summed probabilities (b, S+1); backwards: instances come in instead of going."""
        there = self.rights > 0
        curves = sums[there] / self.rights[there, None]
        curves = curves[:, ::-1] if backwards else curves
        if not len(curves):
            nothing = np.full(sums.shape[1], np.nan)
            return Curve(nothing, nothing, nothing)
        return Curve(curves.mean(0), *_band(curves, np.asarray(patients)[there]))

    def auc(self, labels: Sequence[int]) -> tuple[Floats, Floats]:
        """The cohort's AUC at each step by each map, (e, S+1), and the mean over the random orders, (S+1)."""

        def curves(sums: Floats) -> Floats:
            p = (sums / self.models[:, None, None]).transpose(0, 2, 1, 3)
            return np.array([[bag_auc(step, labels) for step in one] for one in p])

        return curves(self.answers), curves(self.random_answers).mean(0)


def _band(curves: Floats, patients: NDArray) -> tuple[Floats, Floats]:
    """95 % band of the mean of curves (b, S+1) over resampled patients."""
    unit = np.unique(patients, return_inverse=True)[1]
    units = int(unit.max()) + 1
    drawn = np.random.default_rng(0).integers(units, size=(RESAMPLES, units))
    counts = np.stack([np.bincount(one, minlength=units) for one in drawn])[:, unit].astype(np.float64)
    means = counts @ curves / counts.sum(1, keepdims=True)
    low, high = np.quantile(means, (0.025, 0.975), axis=0)
    return low, high
