"""The training loop.

r models, b bags. Every model has its own bags to train on and to validate on; nothing here can name a test bag.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from carmil.bags.bags import Bags, rows_of, runs_of
from carmil.errors import CarmilError
from carmil.models.contract import cross_entropy
from carmil.models.pooling import Offsets
from carmil.training.population import Population
from carmil.training.recipe import TRAIN, VALIDATION, Recipe
from carmil.training.stepping import Batch, Stepper
from carmil.training.stopping import State


@dataclass(frozen=True)
class History:
    """What happened: loss terms by epoch and model, (epochs, r), NaN after a model stopped; and each model's best epoch."""

    train: dict[str, Tensor]
    validation: Tensor
    best_epoch: Tensor
    epochs_run: Tensor


OnEpoch = Callable[[int, dict[str, float], int], None]


def fit(
    population: Population, bags: Bags, roles: Tensor, recipe: Recipe, *, on_epoch: OnEpoch | None = None
) -> History:
    """Trains every model on its TRAIN bags and leaves it with the weights of its best epoch on its VALIDATION bags.

    roles (r, b) or (b). After `warmup` epochs a strictly lower mean validation cross-entropy is a new best; `patience`
    epochs without one, and the model stops. `on_epoch(epoch, mean losses, models still running)` is told of progress.
    A model that never had a finite validation loss is an error: there are no weights of it to keep.
    """
    roles = _checked_roles(population, bags, roles).to(population.device)
    bags = bags.to(population.device)
    state = State(population, recipe)
    validation = _validation_parts(bags, (roles == VALIDATION).any(0), len(population))
    records: list[tuple[dict[str, Tensor], Tensor, Tensor]] = []
    step = Stepper(state, replayed=bags.features.is_cuda and len(set(bags.sizes.tolist())) == 1)
    for epoch in range(recipe.epochs):
        population.train()
        state.optimizer.slow_down(recipe.pace(epoch))
        losses: dict[str, Tensor] = {}
        for phase in population.model.phases:
            state.population.begin(phase, epoch)
            sums: dict[str, Tensor] = {}
            for batch in _batches(bags, roles[state.rows] == TRAIN, recipe, epoch):
                for name, value in step(batch).items():
                    sums[name] = sums[name] + value if name in sums else value.clone()
            steps = sums.pop("steps")  # 0 for a model that has stopped: its losses become NaN
            losses |= {name: value / steps for name, value in sums.items()}
        population.train(False)
        state.population.begin("validation", epoch)
        judged = _validation_loss(state.population, bags, roles[state.rows], validation)
        records.append((losses, judged, state.rows))
        running = state.after_epoch(epoch, judged)
        if on_epoch is not None:
            on_epoch(epoch, {name: float(value.nanmean()) for name, value in losses.items()}, running)
        if running == 0:
            break
    lost = (state.best_epoch < 0).nonzero().flatten().tolist()
    if lost:
        raise CarmilError(
            f"model {lost[0]} (of {len(lost)} such) never had a finite validation loss: lower its learning rate "
            f"({population.members[lost[0]].lr:g}) or look at its features"
        )
    population.weights, population.buffers = state.best, state.best_buffers
    return _history(records, state)


def _batches(bags: Bags, train: Tensor, recipe: Recipe, epoch: int) -> Iterator[Batch]:
    """One pass over the bags that somebody trains on. train (r, b) bool.

    Order and division into batches depend on (study seed, epoch) and the cohort alone; a bag that nobody here trains on
    is then left out. So a model meets its bags in the same steps whoever else is in the population.
    """
    order = torch.arange(len(bags))
    if recipe.shuffle:
        generator = torch.Generator().manual_seed(recipe.study_seed * 1_000_003 + epoch)
        order = torch.randperm(len(bags), generator=generator)
    used = train.any(0).cpu()
    for chosen in order.split(recipe.batch):
        chosen = chosen[used[chosen]]
        if len(chosen) > 0:
            mask = train[:, chosen.to(train.device)].float()
            yield _gathered(bags, chosen, mask / mask.sum(-1, keepdim=True).clamp_min(1))


def _gathered(bags: Bags, chosen: Tensor, share: Tensor) -> Batch:
    device = bags.features.device
    assert bags.labels is not None
    if bool((chosen.diff() == 1).all()):  # neighbours: no copy
        first, last = int(chosen[0]), int(chosen[-1]) + 1
        here = slice(int(bags.offsets[first]), int(bags.offsets[last]))
        offsets = bags.offsets[first : last + 1] - bags.offsets[first]
        rows = torch.arange(here.start, here.stop, device=device)
        features, labels = bags.features[here], bags.labels[first:last]
    else:
        offsets, rows = rows_of(bags.offsets, chosen)
        rows = rows.to(device)
        features, labels = bags.features[rows], bags.labels[chosen.to(device)]
    return Batch(features, labels, Offsets(offsets, device), rows, share)


def _validation_parts(bags: Bags, used: Tensor, models: int) -> list[Tensor]:
    """Positions of the validation bags, in runs small enough to be answered by all models at once."""
    chosen = used.cpu().nonzero().squeeze(-1)
    runs = runs_of(bags.sizes[chosen].tolist(), max(1, 2**20 // models))
    return [chosen[first:last] for first, last in runs]


@torch.no_grad()
def _validation_loss(population: Population, bags: Bags, roles: Tensor, parts: list[Tensor]) -> Tensor:
    """(r) mean cross-entropy of each model's answers for its own validation bags; the same measure for every method."""
    sums = torch.zeros(len(population), device=population.device)
    counts = torch.zeros_like(sums)
    for chosen in parts:
        mask = (roles[:, chosen.to(roles.device)] == VALIDATION).float()
        batch = _gathered(bags, chosen, mask)
        prediction = population(batch.features, batch.offsets)
        sums += (cross_entropy(prediction.logits, batch.labels) * mask).sum(-1)
        counts += mask.sum(-1)
    return sums / counts


def _checked_roles(population: Population, bags: Bags, roles: Tensor) -> Tensor:
    if bags.labels is None:
        raise CarmilError("bags without labels cannot be trained on")
    roles = roles.expand(len(population), -1) if roles.ndim == 1 else roles
    if roles.shape != (len(population), len(bags)):
        raise CarmilError(
            f"roles have shape {tuple(roles.shape)}: expected ({len(population)} models, {len(bags)} bags)"
        )
    for role, name in ((TRAIN, "training"), (VALIDATION, "validation")):
        without = ~(roles == role).any(1)
        if without.any():
            raise CarmilError(f"model {int(without.nonzero()[0])} has no {name} bag")
    if bags.classes > population.model.classes:
        raise CarmilError(f"labels go up to {bags.classes - 1}, the model has {population.model.classes} classes")
    return roles


def _history(records: list[tuple[dict[str, Tensor], Tensor, Tensor]], state: State) -> History:
    r = len(state.best)
    gone = torch.arange(len(records)).unsqueeze(-1) >= state.epochs_run.cpu()

    def table(values: list[Tensor]) -> Tensor:
        full = torch.full((len(records), r), float("nan"))
        for line, value, (_, _, rows) in zip(full, values, records, strict=True):
            line[rows.cpu()] = value.detach().float().cpu()
        return full.masked_fill(gone, float("nan"))

    return History(
        train={name: table([losses[name] for losses, _, _ in records]) for name in records[0][0]},
        validation=table([judged for _, judged, _ in records]),
        best_epoch=state.best_epoch.cpu(),
        epochs_run=state.epochs_run.cpu(),
    )
