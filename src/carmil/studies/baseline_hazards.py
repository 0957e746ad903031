"""The baseline hazard of each model of the time to an event."""

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from carmil.bags.bags import Bags
from carmil.runs.facts import Baseline
from carmil.statistics.hazards import breslow
from carmil.training.population import Population
from carmil.training.predict import predict


def baseline_hazards(
    population: Population, bags: Bags, outcomes: NDArray[Any], trained: Tensor
) -> tuple[Baseline, ...]:
    """Return Breslow's estimate for each model, on its own training bags. outcomes (b, 2): time, event; trained (r, b) bool.

    Each model predicts by itself, so that its hazard does not depend on the rest of the population.
    """
    baselines = []
    for row, own in enumerate(trained):
        chosen = own.nonzero().squeeze(-1)
        model = population.subset(torch.tensor([row], device=population.device))
        risk = predict(model, bags, chosen=chosen, maps=False).values[0, :, 0].double()
        time, event = outcomes[chosen.numpy()].T
        hazard = breslow(time, event > 0, risk.numpy())
        baselines.append(Baseline(tuple(hazard.times.tolist()), tuple(hazard.values.tolist())))
    return tuple(baselines)
