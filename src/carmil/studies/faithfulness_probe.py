"""Faithfulness of one model's maps on some slides, compared with the maps of its twins: twin_answers with shuffled weights.

All twins predict. Maps are computed for the first EXPLAINED of them, and deletion curves, which cost most, for the maps of the
first FOLLOWED.

e maps, b slides, S steps, n instances of these slides, k classes, r random orders, t twins with deletion curves.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from carmil.bags.bags import Bags
from carmil.evidence.attention_maps import attention_weights
from carmil.evidence.concentration import concentration_of
from carmil.evidence.explainers import explain
from carmil.evidence.faithfulness import Faithfulness, deletion_logits, evidence_of_class, faithfulness_from_logits
from carmil.evidence.randomisation import shuffle_weights, similarity_over_chance
from carmil.models.contract import BagModel
from carmil.models.pooling import Offsets
from carmil.runs.decision import Decision
from carmil.studies.accumulator import Accumulator

TWINS, EXPLAINED, FOLLOWED = 19, 5, 2  # twins that predict; of these, with maps; of these, with deletion curves
FRACTION = 0.1  # of the instances, for necessity and sufficiency
CONCENTRATION = ("normalised_entropy", "gini", "effective")
SCORES = ("attention", "counterfactual_attention")  # maps that a softmax turns into attention weights


@dataclass(frozen=True)
class ProbeSettings:
    """Settings of the probe, the same for every model."""

    methods: tuple[str, ...]
    steps: int
    random_orders: int


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
    def stacked(self) -> Tensor:
        """All orders as `faithfulness_from_logits` expects them: all maps, the same reversed, random orders."""
        maps = torch.cat([self.own, self.twins.flatten(0, 1)])
        return torch.cat([maps, -maps, self.chance])

    def average_twins(self, values: Tensor) -> Tensor:
        """Average the twins: values of all maps (e + t e, ...) -> the model's values, then the mean over the twins, (2 e, ...)."""
        own, twins = values.split([len(self.own), self.maps - len(self.own)])
        return torch.cat([own, twins.unflatten(0, self.twins.shape[:2]).nanmean(0)])


def probe(
    model: BagModel,
    part: Bags,
    labels: Tensor,
    settings: ProbeSettings,
    accumulator: Accumulator,
    where: NDArray[np.int64],
    decision: Decision,
    seeds: Iterable[int],
) -> Tensor:
    """Probe a model on some slides and add the results to `accumulator`; return its maps for the labels' classes, (n, e).

    decision: the model's decision rule. seeds: one per twin.
    """
    offsets, methods = Offsets(part.offsets), settings.methods
    answers = torch.from_numpy(decision.leading(_answers(model, part).numpy()))
    evidence = torch.stack([explain(model, part, method) for method in methods])
    maps = evidence_of_class(evidence, answers, offsets)
    twin_answers, similarities, followed = [], [], []
    for i, seed in enumerate(seeds):
        twin = shuffle_weights(model, seed=seed)
        twin_answers.append(_answers(twin, part))
        if i < EXPLAINED:
            twin_evidence = torch.stack([explain(twin, part, method) for method in methods]).nan_to_num()
            twin_maps = evidence_of_class(twin_evidence, answers, offsets)
            similarities.append(similarity_over_chance(maps.T, twin_maps.T, offsets).T)
            followed += [twin_maps] * (i < FOLLOWED)
    chance = torch.rand(
        settings.random_orders, maps.shape[1], generator=torch.Generator().manual_seed(int(part.offsets[-1]))
    )
    orders = Orders(maps, torch.stack(followed), chance.to(maps))
    logits = deletion_logits(model, part, orders.stacked, steps=settings.steps)
    faithfulness = faithfulness_from_logits(logits, labels, maps=orders.maps, right=answers == labels)
    p = logits.double().softmax(-1)
    accumulator.add_curves(
        where,
        faithfulness.right,
        most=orders.average_twins(faithfulness.most_first),
        least=orders.average_twins(faithfulness.least_first),
        at_random=faithfulness.at_random.mean(0),
    )
    accumulator.add_answers(
        where, orders.average_twins(p[: orders.maps]), at_random=p[2 * orders.maps :], twins=torch.stack(twin_answers)
    )
    for name, values in _curve_figures(faithfulness).items():
        accumulator.add(name, where, orders.average_twins(values), only=faithfulness.right)
    area, area_of_twins = orders.average_twins(faithfulness.deletion_area).chunk(2)
    accumulator.add("aopc_gain", where, area_of_twins - area, only=faithfulness.right)
    accumulator.add("randomisation", where, torch.stack(similarities).nanmean(0))
    weights = [_weights(model, method, column, offsets) for method, column in zip(methods, maps, strict=True)]
    concentration = concentration_of(torch.stack(weights, dim=-1), offsets)
    for name in CONCENTRATION:
        accumulator.add(name, where, getattr(concentration, name).T)
    return evidence_of_class(evidence, labels, offsets).T


def _answers(model: BagModel, part: Bags) -> Tensor:
    """Probabilities (b, k) of the whole bags."""
    first = next(model.parameters())
    with torch.no_grad():
        logits = model(part.features.to(first.device).to(first), Offsets(part.offsets, first.device)).logits
    return logits.double().softmax(-1).cpu()


def _curve_figures(faithfulness: Faithfulness) -> dict[str, Tensor]:
    """Figures of the deletion and insertion curves, (e, b) each."""
    return {
        "deletion_area": faithfulness.deletion_area,
        "insertion_area": faithfulness.insertion_area,
        "aopc_over_random": faithfulness.aopc_over_random,
        "monotonicity": faithfulness.monotonicity,
        "necessity": faithfulness.necessity(FRACTION),
        "sufficiency": faithfulness.sufficiency(FRACTION),
    }


def _weights(model: BagModel, method: str, scores: Tensor, offsets: Offsets) -> Tensor:
    """Weights of a map (n): the softmax of attention scores, the absolute value of evidence."""
    weights = attention_weights(model, scores.unsqueeze(-1), offsets).squeeze(-1) if method in SCORES else scores
    return weights.abs()
