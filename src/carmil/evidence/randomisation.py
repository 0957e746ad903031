"""Randomisation test: compare a model's map with that of the same model with shuffled weights.

Two unrelated maps agree by chance, the more so the fewer instances a bag has: with six, the mean of |rho| is 0.37.
Similarity is therefore corrected for chance, as in Cohen's kappa:

    similarity = (|rho| - c_n) / (1 - c_n),    c_n = E |rho| of two random orders of n instances

0 is chance, 1 the same map or its mirror image; in bags of a hundred instances and more it equals |rho| up to 0.08.

n instances of all bags together, b bags, k classes, c columns.
"""

import copy
import math
from functools import cache
from itertools import permutations

import torch
from torch import Tensor

from carmil.evidence.rank_correlation import spearman
from carmil.models.contract import BagModel
from carmil.models.pooling import Offsets

COUNTED = 8  # up to this many instances all orders are enumerated; rho of more is nearly normal


def shuffle_weights(model: BagModel, *, seed: int = 0) -> BagModel:
    """Return a copy of the model with the entries of each parameter in random order."""
    generator = torch.Generator().manual_seed(seed)
    model = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            order = torch.randperm(parameter.numel(), generator=generator).to(parameter.device)
            parameter.copy_(parameter.flatten()[order].view_as(parameter))
    return model


def similarity_over_chance(x: Tensor, y: Tensor, offsets: Offsets) -> Tensor:
    """Return the similarity of two maps in each bag, up to their sign, corrected for chance. x, y (..., n, c) ->
    (..., b, c).

    NaN if one of them is constant, and for bags of one or two instances: any two orders of two are equal or
    mirrored.
    """
    by_chance = torch.tensor(
        [chance_correlation(size) for size in offsets.lengths], dtype=torch.float64, device=x.device
    )
    by_chance = by_chance.masked_fill(by_chance == 1, torch.nan).unsqueeze(-1)
    return (spearman(x, y, offsets).abs() - by_chance) / (1 - by_chance)


@cache
def chance_correlation(size: int) -> float:
    """Return E |rho| of two random orders of `size` instances."""
    if size <= 2:
        return 1.0
    if size > COUNTED:
        return math.sqrt(2 / (math.pi * (size - 1)))
    orders = torch.tensor(list(permutations(range(size))), dtype=torch.float64)
    moved = (orders - torch.arange(size)).square().sum(-1)
    return float((1 - 6 * moved / (size * (size * size - 1))).abs().mean())
