"""Faithfulness of one model's maps on some slides, compared with the maps of its twins, which have shuffled weights.

Predictions are computed for all twins, maps for the first EXPLAINED of them, and deletion curves, the most expensive
part, for the maps of the first FOLLOWED.

Curves follow the target's own quantity, which must fall as relevant tiles are removed. For classes and labels it is a
probability. A risk, a value or a grade has no probability, but a side: above or below the average prediction. Curves of
these targets follow the distance from the middle towards the side of the model's own prediction, and maps of the output
are turned towards that side: for a slide at higher risk, the tiles that raise the risk are removed first and its risk
should fall; for a slide at lower risk, those that lower it are removed first and its risk should rise. If the raising
tiles were removed first for all slides, maps without a sign, such as attention, would be compared with half of a signed
map's task. Maps without a sign are not turned, since they mark the decisive tiles on either side.

e maps, b slides, S steps, n instances of these slides, k outputs, p predictions, r random orders, t twins with deletion
curves, v divisions into folds.
"""

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from carmil.bags.bags import Bags
from carmil.evidence.attention_maps import attention_weights
from carmil.evidence.concentration import concentration_of
from carmil.evidence.explainers import EXPLAINERS, explain
from carmil.evidence.faithfulness import (
    CONFIDENCE,
    Faithfulness,
    at_equal_steps,
    deletion_logits,
    evidence_of_class,
    faithfulness_from_curves,
    of_outputs,
    removal_counts,
    unit_counts,
)
from carmil.evidence.randomisation import shuffle_weights, similarity_over_chance
from carmil.evidence.regions import neighbouring_regions
from carmil.models.contract import BagModel
from carmil.models.pooling import Offsets
from carmil.runs.compute_once import Arrays
from carmil.runs.facts import SlideMean
from carmil.runs.faithfulness import Band
from carmil.statistics.bootstrap import mean_intervals
from carmil.studies.figures import mean_interval
from carmil.targets import Classes, Target
from carmil.targets.decision import Decision
from carmil.targets.links import Link
from carmil.targets.target import Measure

Floats = NDArray[np.float64]
RESAMPLES = 500
SMALLEST_P = 1e-12  # added to probabilities before their logarithm
SLIDES_ARE = {  # the axis of the slides, by array
    "most": 1,
    "least": 1,
    "at_random": 0,
    "rights": 0,
    "models": 1,
    "answers": 2,
    "random_answers": 2,
    "twins": 2,
}
PREDICTIONS = ("answers", "random_answers", "twins")
TWINS, EXPLAINED, FOLLOWED = 19, 5, 2  # number of twins, of those with maps, and of those with deletion curves
BY_REGION = "region_"  # before the names of figures where regions are removed
CONCENTRATION = ("normalised_entropy", "gini", "effective")
SCORES = ("attention", "counterfactual_attention")  # maps that a softmax turns into attention weights


class Accumulator:
    """Sums over the models of each slide. Of 2 e maps the first e are the models' own, the others those of their twins.

    most, least (2 e, b, S+1), at_random (b, S+1): the quantity followed, over correctly answered slides or all of them
    answers (v, 2 e, b, S+1, p), random_answers (v, r, b, S+1, p), twins (v, t, b, 1, p): predictions, over all slides,
    by division into folds, for figures that compare slides of a fold only
    """

    def __init__(
        self,
        slides: int,
        maps: int,
        *,
        steps: int,
        random_orders: int,
        twins: int,
        predictions: int,
        divisions: int = 1,
    ) -> None:
        self.most, self.least = np.zeros((2 * maps, slides, steps + 1)), np.zeros((2 * maps, slides, steps + 1))
        self.at_random = np.zeros((slides, steps + 1))
        self.rights, self.models = np.zeros(slides), np.zeros((divisions, slides))
        self.answers = np.zeros((divisions, 2 * maps, slides, steps + 1, predictions))
        self.random_answers = np.zeros((divisions, random_orders, slides, steps + 1, predictions))
        self.twins = np.zeros((divisions, twins, slides, 1, predictions))
        self._sums: dict[str, Floats] = {}
        self._counts: dict[str, Floats] = {}

    def add(self, name: str, where: NDArray[np.int64], values: Tensor, *, only: Tensor | None = None) -> None:
        """Add a figure (e or 2 e, some slides) of one model. NaN, and slides outside the mask `only`, do not count."""
        figures = values.double().numpy()
        counted = ~np.isnan(figures) & (True if only is None else only.numpy())
        self._add(name, where, np.where(counted, figures, 0.0), counted)

    def add_curves(
        self, where: NDArray[np.int64], right: Tensor, *, most: Tensor, least: Tensor, at_random: Tensor
    ) -> None:
        """Add the quantity followed, for one model at each step. right: the mask of slides that count."""
        counts = right.numpy()[:, None]
        self.most[:, where] += most.numpy() * counts
        self.least[:, where] += least.numpy() * counts
        self.at_random[where] += at_random.numpy() * counts
        self.rights[where] += counts[:, 0]

    def add_answers(
        self, where: NDArray[np.int64], by_maps: Tensor, *, at_random: Tensor, twins: Tensor, division: int = 0
    ) -> None:
        """Add the predictions of one model at each step, and those of its twins (t, b, p) for the complete slides."""
        self.models[division, where] += 1
        self.answers[division][:, where] += by_maps.numpy()
        self.random_answers[division][:, where] += at_random.numpy()
        self.twins[division][:, where] += twins.numpy()[:, :, None]

    def state(self) -> Arrays:
        """Return all sums by name; predictions, by far the most numbers, in single precision."""
        sums = {f"{name} sum": values for name, values in self._sums.items()}
        counts = {f"{name} count": values for name, values in self._counts.items()}
        kept = {name: getattr(self, name) for name in SLIDES_ARE}
        kept |= {name: kept[name].astype(np.float32) for name in PREDICTIONS}
        return {**kept, **sums, **counts}

    def add_state(self, where: NDArray[np.int64], state: Arrays) -> None:
        """Add the state of another accumulator, whose slides are at the positions `where` of this accumulator."""
        for name, axis in SLIDES_ARE.items():
            getattr(self, name)[(slice(None),) * axis + (where,)] += state[name]
        for name in [name.removesuffix(" sum") for name in state if name.endswith(" sum")]:
            self._add(name, where, state[f"{name} sum"], state[f"{name} count"])

    def figures(self, patients: Sequence[str]) -> list[dict[str, SlideMean]]:
        """Return the figures of each map by name: the mean over the slides of the mean over their models."""
        with np.errstate(invalid="ignore"):
            means = {name: self._sums[name] / self._counts[name] for name in self._sums}
        return [
            {name: mean_interval(values[i], patients) for name, values in means.items() if i < len(values)}
            for i in range(len(self.most))
        ]

    def _add(self, name: str, where: NDArray[np.int64], sums: NDArray, counts: NDArray) -> None:
        for kept, more in ((self._sums, sums), (self._counts, counts)):
            kept.setdefault(name, np.zeros((len(more), len(self.rights))))[:, where] += more

    def band(self, sums: Floats, patients: Sequence[str], *, backwards: bool = False) -> Band:
        """Return the mean of summed curves (b, S+1) and its interval. backwards: instances are added instead of removed."""
        answered = self.rights > 0
        curves = sums[answered] / self.rights[answered, None]
        curves = curves[:, ::-1] if backwards else curves
        if not len(curves):
            nothing = (float("nan"),) * sums.shape[1]
            return Band(nothing, nothing, nothing)
        means = mean_intervals(curves, np.asarray(patients)[answered], repeats=RESAMPLES)
        return Band(*(tuple(values.tolist()) for values in means))

    def cohort(
        self, measure: Measure, outcomes: NDArray[Any], folds: NDArray[np.int64]
    ) -> tuple[Floats, Floats, Floats]:
        """Return a figure of the cohort at each step by map (2 e, S+1), its mean over the random orders (S+1), and that
        of the twins (t).

        folds (v, b): the fold of each slide, since only slides of one fold are compared; the figure is the mean over
        the folds that have one.
        """

        def curves(sums: Floats) -> Floats:
            parts = []
            for division, own in enumerate(folds):
                p = (sums[division] / self.models[division][:, None, None]).transpose(0, 2, 1, 3)
                for fold in np.unique(own):
                    at = own == fold
                    parts.append([[measure(step[at], outcomes[at]) for step in one] for one in p])
            known = ~np.isnan(parts)
            with np.errstate(invalid="ignore"):
                return np.nansum(parts, axis=0) / known.sum(0)

        return curves(self.answers), curves(self.random_answers).mean(0), curves(self.twins)[:, 0]

    def log_likelihoods(self, classes: NDArray[np.int64]) -> Floats:
        """Return the mean log probability of the slides' classes (b): that of the models, then of each twin (1 + t)."""
        p = np.concatenate([self.answers[0, :1, :, 0], self.twins[0, :, :, 0]]) / self.models[0][:, None]
        return np.log(p[:, np.arange(len(classes)), classes] + SMALLEST_P).mean(-1)


@dataclass(frozen=True)
class ProbeSettings:
    """Settings of the probe, the same for every model."""

    methods: tuple[str, ...]
    steps: int
    random_orders: int
    confidence: float = CONFIDENCE
    region_tiles: int = 0  # tiles per region, for figures by region; 0: none


@dataclass(frozen=True, eq=False)
class Orders:
    """Orders of removal: by the model's maps (e, n), by the maps of the twins (t, e, n), and random (r, n)."""

    own: Tensor
    twins: Tensor
    chance: Tensor

    @property
    def maps(self) -> int:
        return len(self.own) * (1 + len(self.twins))

    @property
    def by_maps(self) -> Tensor:
        """Return the orders of all maps, and the same reversed: (2 (e + t e), n)."""
        maps = torch.cat([self.own, self.twins.flatten(0, 1)])
        return torch.cat([maps, -maps])

    def average_twins(self, values: Tensor) -> Tensor:
        """Average over the twins: values of all maps (e + t e, ...) -> the model's values, then the mean over the
        twins, (2 e, ...).
        """
        own, twins = values.split([len(self.own), self.maps - len(self.own)])
        return torch.cat([own, twins.unflatten(0, self.twins.shape[:2]).nanmean(0)])


@dataclass(frozen=True, eq=False)
class Explained:
    """The slides of a probe (b of them). target: that of the run; classes: those of the labels or, for other targets,
    the output that is explained on the slide.
    """

    part: Bags
    target: Target
    classes: Tensor


def probe(
    model: BagModel,
    slides: Explained,
    settings: ProbeSettings,
    accumulator: Accumulator,
    where: NDArray[np.int64],
    division: int,
    decision: Decision,
    seeds: Iterable[int],
) -> Tensor:
    """Probe a model on some slides and add the results to `accumulator`; return its maps for their classes, (n, e).

    division: that of the model's test fold. decision: the model's decision rule. seeds: one per twin.
    """
    part, target, classes = slides.part, slides.target, slides.classes
    offsets, methods, link = Offsets(part.offsets), settings.methods, _link(model)
    outputs = _outputs(model, part)
    answers, right, side = classes, torch.ones(len(part), dtype=torch.bool), None
    if isinstance(target, Classes):
        answers = torch.from_numpy(decision.leading(link.predictions(outputs).numpy()))
        right = answers == classes
    if target.two_sided:
        side = torch.where(of_outputs(target.followed(link, outputs)[None, :, None], answers).flatten() < 0, -1.0, 1.0)
    evidence = torch.stack([explain(model, part, method) for method in methods])
    maps = _maps(evidence, answers, side, methods, offsets)
    twin_predictions, similarities, followed = [], [], []
    for i, seed in enumerate(seeds):
        twin = shuffle_weights(model, seed=seed)
        twin_predictions.append(_link(twin).predictions(_outputs(twin, part)))
        if i < EXPLAINED:
            twin_evidence = torch.stack([explain(twin, part, method) for method in methods]).nan_to_num()
            twin_maps = _maps(twin_evidence, answers, side, methods, offsets)
            similarities.append(similarity_over_chance(maps.T, twin_maps.T, offsets).T)
            followed += [twin_maps] * (i < FOLLOWED)
    chance = torch.rand(
        settings.random_orders, maps.shape[1], generator=torch.Generator().manual_seed(int(part.offsets[-1]))
    )
    orders = Orders(maps, torch.stack(followed), chance.to(maps))

    def measure(regions: Tensor | None) -> tuple[Faithfulness, Tensor, Tensor]:
        """Return the curves, and the predictions at equal steps in the order of the maps and in random orders."""
        logits = deletion_logits(model, part, orders.by_maps, steps=settings.steps, ends=True, regions=regions)
        at_random = deletion_logits(model, part, orders.chance, steps=settings.steps, regions=regions)
        removed = removal_counts(unit_counts(part, regions), settings.steps, ends=True)
        by_maps, by_chance = (of_outputs(target.followed(link, values), classes) for values in (logits, at_random))
        if side is not None:
            by_maps, by_chance = by_maps * side.unsqueeze(-1), by_chance * side.unsqueeze(-1)
        chance_p = link.predictions(at_random.double())
        faithfulness = faithfulness_from_curves(
            by_maps,
            at_random=by_chance,
            unchanged=_unchanged(decision, target, chance_p, by_chance),
            right=right,
            removed=removed,
        )
        most_first = at_equal_steps(logits[: orders.maps], removed, settings.steps)
        return faithfulness, link.predictions(most_first.double()), chance_p

    faithfulness, p, chance_p = measure(None)
    accumulator.add_curves(
        where,
        faithfulness.right,
        most=orders.average_twins(faithfulness.most_first),
        least=orders.average_twins(faithfulness.least_first),
        at_random=faithfulness.at_random.mean(0),
    )
    accumulator.add_answers(
        where,
        orders.average_twins(p),
        at_random=chance_p,
        twins=torch.stack(twin_predictions),
        division=division,
    )
    by_unit = {"": faithfulness}
    if settings.region_tiles:
        by_unit[BY_REGION] = measure(neighbouring_regions(part, settings.region_tiles))[0]
    for unit, curves in by_unit.items():
        for name, values in curves.figures(confidence=settings.confidence, relative=target.two_sided).items():
            accumulator.add(unit + name, where, orders.average_twins(values), only=curves.right)
        accumulator.add(unit + "robustness", where, curves.robustness().expand(len(methods), -1))
    area, area_of_twins = orders.average_twins(faithfulness.deletion_area).chunk(2)
    accumulator.add("aopc_gain", where, area_of_twins - area, only=faithfulness.right)
    accumulator.add("randomisation", where, torch.stack(similarities).nanmean(0))
    weights = [_weights(model, method, column, offsets) for method, column in zip(methods, maps, strict=True)]
    concentration = concentration_of(torch.stack(weights, dim=-1), offsets)
    for name in CONCENTRATION:
        accumulator.add(name, where, getattr(concentration, name).T)
    return evidence_of_class(evidence, classes, offsets).T


def _unchanged(decision: Decision, target: Target, predicted: Tensor, followed: Tensor) -> Tensor:
    """Return (r, b, S+1) whether the answer at each step is the same as for the whole bag: the class, whether the label
    that is followed is present, or the side of the middle. predicted (r, b, S+1, p); followed (r, b, S+1).
    """
    if isinstance(target, Classes):
        answers = torch.from_numpy(decision.leading(predicted.flatten(0, -2).numpy())).view(followed.shape)
    else:
        answers = followed >= (0.0 if target.two_sided else 0.5)
    return answers == answers[..., :1]


def _link(model: BagModel) -> Link:
    """Return a copy of the model's link on the CPU, without gradients."""
    return copy.deepcopy(model.link).cpu().requires_grad_(False)


def _outputs(model: BagModel, part: Bags) -> Tensor:
    """Return the outputs F (b, k) of the complete bags, in double precision."""
    first = next(model.parameters())
    with torch.no_grad():
        logits = model(part.features.to(first.device).to(first), Offsets(part.offsets, first.device)).logits
    return logits.double().cpu()


def _maps(evidence: Tensor, outputs: Tensor, side: Tensor | None, methods: Sequence[str], offsets: Offsets) -> Tensor:
    """Return the maps (e, n) of each bag's output, for its side (b): maps of an output are turned, other maps are not."""
    maps = evidence_of_class(evidence, outputs, offsets)
    if side is None:
        return maps
    turned = torch.tensor([EXPLAINERS[method].class_conditional for method in methods]).unsqueeze(-1)
    return torch.where(turned, maps * side[offsets.bag_of].to(maps), maps)


def _weights(model: BagModel, method: str, scores: Tensor, offsets: Offsets) -> Tensor:
    """Return the weights of a map (n): the softmax of attention scores, or the absolute value of evidence."""
    weights = attention_weights(model, scores.unsqueeze(-1), offsets).squeeze(-1) if method in SCORES else scores
    return weights.abs()
