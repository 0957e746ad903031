"""Sums of the models' answers as instances are removed, from which figures, curves and the cohort's AUC are computed.

e maps, b slides, S steps, k classes, r random orders, t twins: copies of a model with shuffled weights.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from carmil.runs.facts import SlideMean
from carmil.runs.faithfulness import Band
from carmil.statistics.bootstrap import mean_intervals
from carmil.statistics.performance import bag_auc
from carmil.studies.figures import mean_interval

Floats = NDArray[np.float64]
RESAMPLES = 500
SLIDES_ARE = {  # the axis of the slides, by array
    "most": 1,
    "least": 1,
    "at_random": 0,
    "rights": 0,
    "models": 0,
    "answers": 1,
    "random_answers": 1,
    "twins": 1,
}


class Accumulator:
    """Sums over the models of each slide. Of 2 e maps the first e are the models' own, the others those of their twins.

    most, least (2 e, b, S+1), at_random (b, S+1): p of the label, over rightly answered slides
    answers (2 e, b, S+1, k), random_answers (r, b, S+1, k), twins (t, b, 1, k): p of every class, over all slides
    """

    def __init__(self, slides: int, maps: int, *, steps: int, random_orders: int, twins: int, classes: int) -> None:
        self.most, self.least = np.zeros((2 * maps, slides, steps + 1)), np.zeros((2 * maps, slides, steps + 1))
        self.at_random = np.zeros((slides, steps + 1))
        self.rights, self.models = np.zeros(slides), np.zeros(slides)
        self.answers = np.zeros((2 * maps, slides, steps + 1, classes))
        self.random_answers = np.zeros((random_orders, slides, steps + 1, classes))
        self.twins = np.zeros((twins, slides, 1, classes))
        self._sums: dict[str, Floats] = {}
        self._counts: dict[str, Floats] = {}

    def add(self, name: str, where: NDArray[np.int64], values: Tensor, *, only: Tensor | None = None) -> None:
        """Add a figure (e or 2 e, some slides) of one model. NaN, and slides that are not in the mask `only`, do not count."""
        found = values.double().numpy()
        there = ~np.isnan(found) & (True if only is None else only.numpy())
        self._add(name, where, np.where(there, found, 0.0), there)

    def add_curves(
        self, where: NDArray[np.int64], right: Tensor, *, most: Tensor, least: Tensor, at_random: Tensor
    ) -> None:
        """Add p of the label of one model at each step. right: the mask of slides that it answers rightly."""
        counts = right.numpy()[:, None]
        self.most[:, where] += most.numpy() * counts
        self.least[:, where] += least.numpy() * counts
        self.at_random[where] += at_random.numpy() * counts
        self.rights[where] += counts[:, 0]

    def add_answers(self, where: NDArray[np.int64], by_maps: Tensor, *, at_random: Tensor, twins: Tensor) -> None:
        """Add p of all classes of one model at each step, and of its twins (t, b, k) for the whole slides."""
        self.models[where] += 1
        self.answers[:, where] += by_maps.numpy()
        self.random_answers[:, where] += at_random.numpy()
        self.twins[:, where] += twins.numpy()[:, :, None]

    def state(self) -> dict[str, Floats]:
        """Return all sums by name."""
        sums = {f"{name} sum": values for name, values in self._sums.items()}
        counts = {f"{name} count": values for name, values in self._counts.items()}
        return {**{name: getattr(self, name) for name in SLIDES_ARE}, **sums, **counts}

    def add_state(self, where: NDArray[np.int64], state: Mapping[str, ArrayLike]) -> None:
        """Add the state of another accumulator, whose slides are at `where` among these."""
        for name, axis in SLIDES_ARE.items():
            getattr(self, name)[(slice(None),) * axis + (where,)] += np.asarray(state[name])
        for name in [name.removesuffix(" sum") for name in state if name.endswith(" sum")]:
            self._add(name, where, np.asarray(state[f"{name} sum"]), np.asarray(state[f"{name} count"]))

    def figures(self, patients: Sequence[str]) -> list[dict[str, SlideMean]]:
        """Return the figures of each map by name: the mean over the slides of the mean over their models."""
        with np.errstate(invalid="ignore"):
            means = {name: self._sums[name] / self._counts[name] for name in self._sums}
        return [
            {name: mean_interval(values[i], patients) for name, values in means.items() if i < len(values)}
            for i in range(len(self.most))
        ]

    def _add(self, name: str, where: NDArray[np.int64], sums: Floats, counts: NDArray) -> None:
        for kept, more in ((self._sums, sums), (self._counts, counts)):
            kept.setdefault(name, np.zeros((len(more), len(self.models))))[:, where] += more

    def band(self, sums: Floats, patients: Sequence[str], *, backwards: bool = False) -> Band:
        """Return the mean of summed probabilities (b, S+1) and its interval. backwards: instances are added instead of removed."""
        there = self.rights > 0
        curves = sums[there] / self.rights[there, None]
        curves = curves[:, ::-1] if backwards else curves
        if not len(curves):
            nothing = (float("nan"),) * sums.shape[1]
            return Band(nothing, nothing, nothing)
        found = mean_intervals(curves, np.asarray(patients)[there], repeats=RESAMPLES)
        return Band(*(tuple(values.tolist()) for values in found))

    def auc(self, labels: Sequence[int]) -> tuple[Floats, Floats, Floats]:
        """Return the cohort's AUC at each step by map (2 e, S+1), its mean over the random orders (S+1), and that of the
        twins (t)."""

        def curves(sums: Floats) -> Floats:
            p = (sums / self.models[:, None, None]).transpose(0, 2, 1, 3)
            return np.array([[bag_auc(step, labels) for step in one] for one in p])

        return curves(self.answers), curves(self.random_answers).mean(0), curves(self.twins)[:, 0]
