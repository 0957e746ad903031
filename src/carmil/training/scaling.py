"""Feature scaling of each model, from its own training bags. r models, b bags, d features."""

import torch
from torch import Tensor

from carmil.bags.bags import Bags
from carmil.models.scaled_model import deviation_of
from carmil.training.population import Population
from carmil.training.recipe import TRAIN

ROWS = 2**14  # instances in float64 at a time


def fit_scales(
    population: Population, bags: Bags, roles: Tensor, scale: str, *, device: torch.device | str = "cpu"
) -> None:
    """Set the mean and deviation of every ScaledModel of the population. roles (r, b); device: where sums are computed.

    The cohort is read once, whatever the number of folds: sums of each bag are kept, and added up per model.
    """
    trained = roles == TRAIN
    used = trained.any(0).nonzero().squeeze(-1)
    first, second = (torch.zeros(len(bags), bags.width, dtype=torch.float64) for _ in range(2))
    done = 0
    for part in bags.parts(ROWS, used):
        instances = part.features.to(device).double().split(part.sizes.tolist())
        rows = used[done : done + len(part)]
        first[rows] = torch.stack([x.sum(0) for x in instances]).cpu()
        second[rows] = torch.stack([x.square().sum(0) for x in instances]).cpu()
        done += len(part)
    state = population.state()
    for row in trained.unique(dim=0):
        alike = (trained == row).all(1)
        count = bags.sizes[row].sum()
        mean = first[row].sum(0) / count
        variance = (second[row].sum(0) / count - mean.square()).clamp_min(0)
        state["mean"][alike] = mean.to(state["mean"])
        state["deviation"][alike] = deviation_of(variance, scale).to(state["deviation"])
    population.load_state(state)
