"""The protocol: folds x seeds x grid trained as one population; hyper-parameters are selected on validation bags.

f folds (rows of roles), s seeds, g grid points, r = f s g models, b bags, m = f s selected models.
This module has no access to test bags: roles are TRAIN, VALIDATION and UNUSED only.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

import torch
from torch import Tensor

from carmil.bags.bags import Bags
from carmil.errors import CarmilError
from carmil.models.contract import BagModel
from carmil.training.checkpoint import Checkpoint
from carmil.training.history import History
from carmil.training.loop import OnEpoch
from carmil.training.partition import Engine, fit_in_parts
from carmil.training.population import Member, Population
from carmil.training.recipe import TRAIN, VALIDATION, Recipe


@dataclass(frozen=True)
class GridPoint:
    """Hyper-parameters that differ between the models of one population; `settings` are their names and values as
    the user gave them.
    """

    lr: float
    coefficients: Mapping[str, float] = field(default_factory=dict)
    settings: Mapping[str, float | str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        Member(lr=self.lr)  # raises an error for an invalid learning rate


@dataclass(frozen=True)
class SelectedModel:
    """A selected model: its fold and seed, its grid point, and its validation loss."""

    fold: int
    inner: int
    seed: int
    point: int
    best_epoch: int
    validation_loss: float


@dataclass(frozen=True)
class Selection:
    """`population` has one model per fold and seed, in the order of `models`; `history` covers all candidates."""

    population: Population
    models: tuple[SelectedModel, ...]
    history: History


@dataclass(frozen=True)
class Candidates:
    """All r trained models: seed by seed, fold by fold (inner folds of an outer one together), point by point.

    Selected models are moved to `device`.
    """

    population: Population
    history: History
    seeds: tuple[int, ...]
    inner: int
    points: int
    device: torch.device | str

    def select(self, points: Sequence[int] | None = None) -> Selection:
        """Select, for each fold and seed, the grid point with the lowest validation loss, among these points or all.

        The validation loss of a point is its mean over the inner folds, and all inner models of the selected point
        are kept. Points are numbered within the given points, as if no others had been trained.
        """
        points = range(self.points) if points is None else points
        every = torch.arange(len(self.population)).reshape(len(self.seeds), -1, self.inner, self.points)
        rows = every[..., list(points)]  # (s, outer, inner, points)
        losses = _lowest(self.history)[rows]
        chosen = losses.mean(2).argmin(-1)  # (s, outer)
        models, selected = [], []
        for i, fold, inner in product(*map(range, rows.shape[:3])):
            point = int(chosen[i, fold])
            row = int(rows[i, fold, inner, point])
            selected.append(row)
            epoch, loss = int(self.history.best_epoch[row]), float(losses[i, fold, inner, point])
            models.append(SelectedModel(fold, inner, self.seeds[i], point, epoch, loss))
        population = self.population.subset(torch.tensor(selected, device=self.population.device))
        return Selection(population.to(self.device), tuple(models), self.history.of(rows.flatten()))


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
    precision: str = "float32",
    at_most: int | None = None,
    engine: Engine | None = None,
    checkpoint: Checkpoint | None = None,
    on_epoch: OnEpoch | None = None,
) -> Candidates:
    """Train all models at once, or in parts of at most `at_most`, on `device` or by an engine; use
    `Candidates.select` afterwards.

    roles (f, b), or (s, f, b) if each seed has folds of its own. In nested folds (`inner` > 1) rows are ordered
    by outer fold. `prepare` is called with the population and its roles before training (warm start, feature
    scaling).
    """
    roles = roles.expand(len(seeds), -1, -1) if roles.ndim == 2 else roles
    folds = roles.shape[1]
    if len(roles) != len(seeds) or folds % inner:
        raise CarmilError(
            f"roles of shape {tuple(roles.shape)} for {len(seeds)} seeds and {inner} inner "
            "folds: expected (seeds, outer x inner folds, bags)"
        )
    members = [
        Member(seed=seed, lr=point.lr, coefficients=point.coefficients)
        for seed in seeds
        for _ in range(folds)
        for point in grid
    ]
    all_roles = roles.flatten(0, 1).repeat_interleave(len(grid), 0)
    population = Population(build, members, precision=precision)
    prepare(population, all_roles)
    population, history = fit_in_parts(
        population,
        bags,
        all_roles,
        recipe,
        device=device,
        at_most=at_most,
        engine=engine,
        trained_on=(all_roles == TRAIN).any(0),
        on_epoch=on_epoch,
        checkpoint=checkpoint,
    )
    return Candidates(population, history, tuple(seeds), inner, len(grid), device)


def validation_bags(roles: Tensor) -> Tensor:
    """Return the positions of the validation bags of one model. roles (b)."""
    return (roles == VALIDATION).nonzero().squeeze(-1)


def _lowest(history: History) -> Tensor:
    """Return (r) the validation loss of each model at the epoch of its weights."""
    return history.validation.gather(0, history.best_epoch.unsqueeze(0)).squeeze(0)
