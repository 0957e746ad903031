"""How well maps agree with what is known of the instances, where a cohort knows it. n instances, b bags."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from carmil.bags.bags import Bags
from carmil.evidence import EXPLAINERS, average_precision, explain
from carmil.models.pooling import Offsets
from carmil.training.population import Population
from carmil.truth import UNKNOWN

MAPS = ("attention", "rollout", "path")
AT_ONCE = 2**17  # instances


def agreement(
    population: Population, models: Sequence[int], bags: Bags, chosen: Tensor
) -> dict[str, NDArray[np.float64]]:
    """AUPRC+ of the maps for class 1 of each chosen bag, the mean over the models, NaN where it has not both kinds of
    instances: there any map is right. Nothing where instances have no truth or there are more classes."""
    if bags.instance_labels is None or population.model.classes != 2 or len(chosen) == 0:
        return {}
    members = [population.member(row) for row in models]
    maps = [method for method in MAPS if EXPLAINERS[method].fits(members[0])]
    found: dict[str, list[Tensor]] = {f"auprc_{method}": [] for method in maps}
    for part in bags.parts(AT_ONCE, chosen):
        there = part.to(population.device)  # once, for all models and maps
        for method in maps:
            each = [auprc_by_bag(explain(model, there, method)[:, 1], part) for model in members]
            found[f"auprc_{method}"].append(torch.stack(each).mean(0))
    return {name: torch.cat(values).numpy() for name, values in found.items()}


def known_instances(truth: Tensor, starts: Tensor) -> tuple[Tensor, Offsets]:
    """Of which instances (n) the truth is known, and how these lie in bags, starts (b+1); a bag without any is left out."""
    known = truth != UNKNOWN
    before = torch.cat([starts.new_zeros(1), known.long().cumsum(0)])[starts]
    return known, Offsets(before.unique_consecutive())


def second_class(truth: Tensor) -> Tensor:
    """(n) what instances say about the second class: truth (n) as it is, of signed truth (n, k) its column."""
    return truth if truth.ndim == 1 else truth[:, 1]


def auprc(scores: Tensor, bags: Bags) -> float:
    """Mean average precision of scores (n) over the bags that have positive instances and others, as far as they are known."""
    return float(auprc_by_bag(scores, bags).nanmean())


def auprc_by_bag(scores: Tensor, bags: Bags) -> Tensor:
    """Average precision of scores (n) in each bag, (b); NaN where no positive instance is known, or no other."""
    assert bags.instance_labels is not None
    labels = second_class(bags.instance_labels)
    known, offsets = known_instances(labels, bags.offsets)
    values = torch.full((len(bags),), torch.nan, dtype=torch.float64)
    if not known.any():
        return values
    truth = (labels[known] > 0).unsqueeze(-1)
    found = average_precision(scores[known].unsqueeze(-1), truth, offsets).squeeze(-1)
    positives = torch.stack([part.sum() for part in truth.squeeze(-1).split(offsets.lengths)])
    mixed = (positives > 0) & (positives < offsets.sizes)
    there = torch.stack([part.any() for part in known.split(bags.sizes.tolist())])
    values[there] = found.where(mixed, torch.nan)
    return values
