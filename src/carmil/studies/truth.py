"""How well maps agree with what is known of the instances, where a cohort knows it. n instances, b bags."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from carmil.bags.bags import Bags
from carmil.errors import CarmilError
from carmil.evidence import average_precision, explain
from carmil.models.pooling import Offsets
from carmil.training.population import Population
from carmil.truth import UNKNOWN

MAPS = ("attention", "path")


def agreement(population: Population, models: Sequence[int], bags: Bags, chosen: Tensor) -> dict[str, float]:
    """AUPRC+ of the maps for class 1, the mean over the models; nothing where instances have no truth or there are more classes.

    Over bags that have both kinds of instances: elsewhere any map is right.
    """
    if bags.instance_labels is None or population.model.classes != 2 or len(chosen) == 0:
        return {}
    part = bags[chosen]
    found: dict[str, list[float]] = {}
    for row in models:
        model = population.member(row)
        for method in MAPS:
            try:
                scores = explain(model, part, method)[:, 1]
            except CarmilError:
                continue  # this model has no such map
            found.setdefault(f"auprc_{method}", []).append(auprc(scores, part))
    return {name: float(np.mean(values)) for name, values in found.items()}


def known_instances(truth: Tensor, starts: Tensor) -> tuple[Tensor, Offsets]:
    """Of which instances (n) the truth is known, and how these lie in bags, starts (b+1); a bag without any is left out."""
    known = truth != UNKNOWN
    before = torch.cat([starts.new_zeros(1), known.long().cumsum(0)])[starts]
    return known, Offsets(before.unique_consecutive())


def auprc(scores: Tensor, bags: Bags) -> float:
    """Mean average precision of scores (n) over the bags that have positive instances and others, as far as they are known."""
    assert bags.instance_labels is not None
    known, offsets = known_instances(bags.instance_labels, bags.offsets)
    if not known.any():
        return float("nan")
    scores, truth = scores[known], (bags.instance_labels[known] > 0).unsqueeze(-1)
    found = average_precision(scores.unsqueeze(-1), truth, offsets).squeeze(-1)
    positives = torch.stack([part.sum() for part in truth.squeeze(-1).split(offsets.lengths)])
    mixed = (positives > 0) & (positives < offsets.sizes)
    return float(found[mixed].mean()) if mixed.any() else float("nan")
