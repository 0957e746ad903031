"""Training and measuring of many variants of a model on digit bags, for digit_search.py and learned_reference.py."""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from carmil.bags.bags import Bags
from carmil.datasets.digit_cohorts import load_digits
from carmil.datasets.digits import DigitStudy
from carmil.evidence import bag_auc
from carmil.models.contract import BagModel
from carmil.training.population import Population
from carmil.training.predict import predict
from carmil.training.protocol import GridPoint, train_protocol
from carmil.training.recipe import TRAIN, VALIDATION, Recipe

ABMIL = {"output_layers": 1, "dropout": 0.0}  # Table 1's ABMIL, but for the number of its units
LEARNING_RATE = 1e-3
Row = dict[str, float | str]


@dataclass(frozen=True)
class Experiment:
    """Trained models of every grid point and seed, and the bags they are measured on, by part."""

    population: Population
    losses: Tensor  # (seeds, points) lowest validation loss
    parts: dict[str, Bags]
    probabilities: dict[str, Tensor]

    def rows(self, point: int) -> list[int]:
        """Rows of the population that have this grid point, one per seed."""
        seeds, points = self.losses.shape
        return [seed * points + point for seed in range(seeds)]

    def auc(self, part: str, rows: Sequence[int]) -> float:
        """AUC of the mean probabilities of these models."""
        labels = self.parts[part].labels
        assert labels is not None
        return bag_auc(self.probabilities[part][list(rows)].mean(0), labels.cpu())


def train(
    build: Callable[[], BagModel],
    study: DigitStudy,
    coefficients: Sequence[dict[str, float]],
    *,
    seeds: int,
    epochs: int,
    device: str,
) -> Experiment:
    """Train one model per seed and set of coefficients, all at once."""
    bags = Bags.concatenate([study.train.bags, study.validation.bags])
    roles = torch.tensor([[TRAIN] * len(study.train.bags) + [VALIDATION] * len(study.validation.bags)])
    candidates = train_protocol(
        build,
        bags,
        roles,
        recipe=Recipe(epochs=epochs),
        seeds=range(seeds),
        grid=[GridPoint(LEARNING_RATE, each) for each in coefficients],
        device=device,
    )
    population = candidates.population.to(device)
    losses = candidates.history.validation.nan_to_num(torch.inf).amin(0).reshape(seeds, len(coefficients))
    parts = {"validation": study.validation.bags.to(device), "test": study.test.bags.to(device)}
    probabilities = {name: predict(population, part).probabilities.cpu() for name, part in parts.items()}
    return Experiment(population, losses, parts, probabilities)


def load_studies(tasks: str, mnist: str | None, features: Path | None) -> dict[str, DigitStudy]:
    """Digit bags of these tasks, separated by commas; their parts share images, as in the paper."""
    data = load_digits(mnist=mnist, features=features, pool="shared")
    return {task: data.study(task) for task in tasks.split(",")}


def write_rows(path: Path | None, rows: Iterable[Row]) -> None:
    if path is not None:
        path.write_text(json.dumps(list(rows)))
