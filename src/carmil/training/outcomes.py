"""Fit the links of a population to the training bags of each model. r models, b bags, k outputs."""

from collections.abc import Iterator

import torch
from torch import Tensor

from carmil.bags.bags import Bags
from carmil.training.early_stopping import at_least_two
from carmil.training.population import Population
from carmil.training.predict import predict


def fit_links(population: Population, bags: Bags, trained: Tensor) -> None:
    """Set the parameters that a link fits to outcomes, such as the unit of a value. trained (r, b) bool: the training
    bags of each model.
    """
    assert bags.labels is not None
    for rows, chosen in _groups(trained):
        population.set_link(rows, population.link.fitted(bags.labels.cpu()[chosen]))


def centre_links(population: Population, bags: Bags, trained: Tensor) -> None:
    """Set the centre of risks to the mean output for each model's own training bags. trained (r, b) bool."""
    if population.link.centred:
        for row, outputs in enumerate(training_outputs(population, bags, trained)):
            population.set_link(torch.tensor([row]), {"centre": outputs.double().mean(0)})


def training_outputs(population: Population, bags: Bags, trained: Tensor) -> list[Tensor]:
    """Return the outputs F of each model for its own training bags, on the CPU, (bags, k) each. trained (r, b) bool.

    A model's outputs do not depend on the rest of the population.
    """
    outputs: list[Tensor] = [torch.empty(0)] * len(population)
    for rows, chosen in _groups(trained):
        some, parts = at_least_two(torch.isin(torch.arange(len(population)), rows)), list[Tensor]()
        predict(
            population.subset(some.to(population.device), indices=some.tolist()),
            bags,
            chosen=chosen,
            maps=False,
            on_part=lambda prediction, parts=parts: parts.append(prediction.logits.cpu()),  # type: ignore[misc]
        )
        for row, own in zip(some.tolist(), torch.cat(parts, dim=1), strict=True):
            if row in rows:
                outputs[row] = own
    return outputs


def _groups(trained: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the rows of models with equal training bags, and the positions of these bags."""
    for bags in trained.unique(dim=0):
        yield (trained == bags).all(1).nonzero().squeeze(-1), bags.nonzero().squeeze(-1)
