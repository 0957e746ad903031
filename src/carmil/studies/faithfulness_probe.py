"""Probes of one model on some slides by its maps, and by the maps of its twins: copies with shuffled weights.

All twins answer. Only the first of them are explained, and instances are removed in the order of the maps of fewer still, since
that costs most.

e maps, b slides, S steps, n instances of these slides, k classes, r random orders, t twins whose maps are followed.
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

TWINS, EXPLAINED, FOLLOWED = 19, 5, 2  # twins that answer; of these, explained; of these, followed as instances go
FRACTION = 0.1  # at which necessity and sufficiency are asked
CONCENTRATION = ("normalised_entropy", "gini", "effective")
SCORES = ("attention", "counterfactual_attention")  # maps that become weights by a softmax


@dataclass(frozen=True)
class ProbeSettings:
    """How every model is probed."""

    methods: tuple[str, ...]
    steps: int
    random_orders: int


@dataclass(frozen=True, eq=False)
class Orders:
    """Orders of removal: by the own maps (e, n), by the maps of the twins (t, e, n), and random (r, n)."""

    own: Tensor
    twins: Tensor
    chance: Tensor

    @property
    def maps(self) -> int:
        return len(self.own) * (1 + len(self.twins))

    @property
    def laid_out(self) -> Tensor:
        """As `judged` expects them: all maps, the same reversed, random orders."""
        maps = torch.cat([self.own, self.twins.flatten(0, 1)])
        return torch.cat([maps, -maps, self.chance])

    def twins_as_one(self, values: Tensor) -> Tensor:
        """Values of all maps (e + t e, ...) -> values of the own maps, then the mean over the twins: (2 e, ...)."""
        own, twins = values.split([len(self.own), self.maps - len(self.own)])
        return torch.cat([own, twins.unflatten(0, self.twins.shape[:2]).nanmean(0)])


def probe(
    model: BagModel,
    part: Bags,
    labels: Tensor,
    question: ProbeSettings,
    gathered: Accumulator,
    where: NDArray[np.int64],
    decision: Decision,
    seeds: Iterable[int],
) -> Tensor:
    """Probe a model on some slides and add the results to `gathered`; return its maps of the labels' classes, (n, e).

    decision: the model's own rule. seeds: those of its twins.
    """
    offsets, methods = Offsets(part.offsets), question.methods
    answers = torch.from_numpy(decision.leading(_answers(model, part).numpy()))
    evidence = torch.stack([explain(model, part, method) for method in methods])
    maps = evidence_of_class(evidence, answers, offsets)
    copies, alike, followed = [], [], []
    for i, seed in enumerate(seeds):
        twin = shuffle_weights(model, seed=seed)
        copies.append(_answers(twin, part))
        if i < EXPLAINED:
            theirs = torch.stack([explain(twin, part, method) for method in methods]).nan_to_num()
            lost = evidence_of_class(theirs, answers, offsets)
            alike.append(similarity_over_chance(maps.T, lost.T, offsets).T)
            followed += [lost] * (i < FOLLOWED)
    chance = torch.rand(
        question.random_orders, maps.shape[1], generator=torch.Generator().manual_seed(int(part.offsets[-1]))
    )
    orders = Orders(maps, torch.stack(followed), chance.to(maps))
    logits = deletion_logits(model, part, orders.laid_out, steps=question.steps)
    found = faithfulness_from_logits(logits, labels, maps=orders.maps, right=answers == labels)
    p = logits.double().softmax(-1)
    gathered.add_curves(
        where,
        found.right,
        most=orders.twins_as_one(found.most_first),
        least=orders.twins_as_one(found.least_first),
        at_random=found.at_random.mean(0),
    )
    gathered.add_answers(
        where, orders.twins_as_one(p[: orders.maps]), at_random=p[2 * orders.maps :], twins=torch.stack(copies)
    )
    for name, values in _curve_figures(found).items():
        gathered.add(name, where, orders.twins_as_one(values), only=found.right)
    area, area_of_twins = orders.twins_as_one(found.deletion_area).chunk(2)
    gathered.add("aopc_gain", where, area_of_twins - area, only=found.right)
    gathered.add("randomisation", where, torch.stack(alike).nanmean(0))
    weights = [_weights(model, method, column, offsets) for method, column in zip(methods, maps, strict=True)]
    concentrated = concentration_of(torch.stack(weights, dim=-1), offsets)
    for name in CONCENTRATION:
        gathered.add(name, where, getattr(concentrated, name).T)
    return evidence_of_class(evidence, labels, offsets).T


def _answers(model: BagModel, part: Bags) -> Tensor:
    """p (b, k) of the whole bags."""
    first = next(model.parameters())
    with torch.no_grad():
        logits = model(part.features.to(first.device).to(first), Offsets(part.offsets, first.device)).logits
    return logits.double().softmax(-1).cpu()


def _curve_figures(found: Faithfulness) -> dict[str, Tensor]:
    """(e, b) each."""
    return {
        "deletion_area": found.deletion_area,
        "insertion_area": found.insertion_area,
        "aopc_over_random": found.aopc_over_random,
        "monotonicity": found.monotonicity,
        "necessity": found.necessity(FRACTION),
        "sufficiency": found.sufficiency(FRACTION),
    }


def _weights(model: BagModel, method: str, scores: Tensor, offsets: Offsets) -> Tensor:
    """A map (n) as weights: the softmax of attention scores, the absolute value of evidence."""
    weights = attention_weights(model, scores.unsqueeze(-1), offsets).squeeze(-1) if method in SCORES else scores
    return weights.abs()
