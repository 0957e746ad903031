"""The protocol: folds x seeds x grid as one population; what is chosen is chosen on validation bags.

f folds (rows of roles), s seeds, g points of the grid, r = f s g models, b bags, m = f s models that are kept.
Nothing here can name a test bag: roles know TRAIN, VALIDATION and UNUSED only.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from carmil.bags.bags import Bags
from carmil.errors import CarmilError
from carmil.models.contract import BagModel
from carmil.training.checkpoint import Checkpoint
from carmil.training.curves import History
from carmil.training.loop import OnEpoch, fit
from carmil.training.population import Member, Population
from carmil.training.recipe import TRAIN, VALIDATION, Recipe


@dataclass(frozen=True)
class GridPoint:
    """Hyper-parameters that differ between the models of one population; `settings` is how the user said it."""

    lr: float
    coefficients: Mapping[str, float] = field(default_factory=dict)
    settings: Mapping[str, float | str] = field(default_factory=dict)


@dataclass(frozen=True)
class Kept:
    """One of the models that are kept: which fold and seed, which point of the grid, and what it was chosen by."""

    fold: int
    inner: int
    seed: int
    point: int
    best_epoch: int
    validation_loss: float


@dataclass(frozen=True)
class Trained:
    """`population` has one model a fold and seed, in the order of `kept`; `history` is of all r models."""

    population: Population
    kept: tuple[Kept, ...]
    history: History


def train_protocol(
    build: Callable[[], BagModel],
    bags: Bags,
    roles: Tensor,
    *,
    recipe: Recipe,
    seeds: Sequence[int] = (0,),
    grid: Sequence[GridPoint] = (GridPoint(lr=2e-4),),
    inner: int = 1,
    prepare: Callable[[Population, Tensor], None] = lambda population, roles: None,
    device: torch.device | str = "cpu",
    checkpoint: Checkpoint | None = None,
    on_epoch: OnEpoch | None = None,
) -> Trained:
    """Trains all models at once and keeps, for each fold and seed, the grid point with the lowest validation loss.

    roles (f, b), or (s, f, b) where each seed has folds of its own. In nested folds (`inner` > 1; rows come outer fold by
    outer fold) a point is judged by its mean over the inner folds, and all inner models of the chosen point are kept.
    `prepare` may look at the population and its roles before the training (a warm start, statistics of training bags).
    """
    roles = roles.expand(len(seeds), -1, -1) if roles.ndim == 2 else roles
    folds = roles.shape[1]
    if len(roles) != len(seeds) or folds % inner:
        raise CarmilError(f"roles of shape {tuple(roles.shape)} for {len(seeds)} seeds and {inner} inner folds")
    members = [
        Member(seed=seed, lr=point.lr, coefficients=point.coefficients)
        for seed in seeds
        for _ in range(folds)
        for point in grid
    ]
    everyone = roles.flatten(0, 1).repeat_interleave(len(grid), 0)
    population = Population(build, members, device=device)
    prepare(population, everyone)
    history = fit(population, bags, everyone, recipe, on_epoch=on_epoch, checkpoint=checkpoint)
    losses = _lowest(history).reshape(len(seeds), folds // inner, inner, len(grid))
    chosen = losses.mean(2).argmin(-1)  # (s, outer)
    kept, rows = [], []
    for i, seed in enumerate(seeds):
        for fold in range(folds):
            point = int(chosen[i, fold // inner])
            row = (i * folds + fold) * len(grid) + point
            rows.append(row)
            epoch, loss = int(history.best_epoch[row]), float(losses[i, fold // inner, fold % inner, point])
            kept.append(Kept(fold // inner, fold % inner, seed, point, epoch, loss))
    return Trained(population.subset(torch.tensor(rows, device=population.device)), tuple(kept), history)


def set_scales(population: Population, bags: Bags, roles: Tensor) -> None:
    """Gives each Standardised model the mean and deviation of the features of its own training bags. roles (r, b)."""
    state = population.state()
    for row in roles.unique(dim=0):
        alike = (roles == row).all(1)
        total = torch.zeros(2, bags.width, dtype=torch.float64)
        count = 0
        for part in bags.parts(2**16, (row == TRAIN).nonzero().squeeze(-1)):
            x = part.features.double()
            total += torch.stack([x.sum(0), x.square().sum(0)])
            count += len(x)
        mean = total[0] / count
        deviation = (total[1] / count - mean.square()).clamp_min(0).sqrt()
        state["mean"][alike] = mean.to(state["mean"])
        state["deviation"][alike] = torch.where(deviation > 0, deviation, 1.0).to(state["deviation"])
    population.load_state(state)


def validation_bags(roles: Tensor) -> Tensor:
    """Positions of the validation bags of one model. roles (b)."""
    return (roles == VALIDATION).nonzero().squeeze(-1)


def _lowest(history: History) -> Tensor:
    """(r) validation loss of each model at the epoch whose weights it has."""
    return history.validation.gather(0, history.best_epoch.unsqueeze(0)).squeeze(0)
