"""The training loop.

r models, b bags. Every model has its own bags to train on and to validate on; nothing here can name a test bag.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from carmil.bags.bags import Bags, rows_of, runs_of
from carmil.errors import CarmilError
from carmil.models.contract import cross_entropy, one_hot
from carmil.models.pooling import Offsets
from carmil.training.checkpoint import Checkpoint
from carmil.training.curves import Curves, History
from carmil.training.population import Population
from carmil.training.processor import settle
from carmil.training.recipe import TRAIN, VALIDATION, Recipe
from carmil.training.stepping import Batch, Stepper
from carmil.training.stopping import State

OnEpoch = Callable[[int, dict[str, float], int], None]


def fit(
    population: Population,
    bags: Bags,
    roles: Tensor,
    recipe: Recipe,
    *,
    on_epoch: OnEpoch | None = None,
    checkpoint: Checkpoint | None = None,
) -> History:
    """Trains every model on its TRAIN bags and leaves it with the weights of its best epoch on its VALIDATION bags.

    roles (r, b) or (b). After `warmup` epochs a strictly lower mean validation cross-entropy is a new best; `patience`
    epochs without one, and the model stops. `on_epoch(epoch, mean losses, models still running)` is told of progress.
    With a `checkpoint`, a training that was killed goes on from it, and on a CPU ends with the same bits.
    A model that never had a finite validation loss is an error: there are no weights of it to keep.
    """
    roles = _checked_roles(population, bags, roles).to(population.device)
    if population.device.type == "cpu":
        settle()
    bags = bags.to(population.device)
    state = State(population, recipe)
    validation = _validation_parts(bags, (roles == VALIDATION).any(0), population.at_once)
    weights = _bag_weights(bags, roles == TRAIN, recipe)
    population.smooth_labels(recipe.label_smoothing)
    curves = Curves(recipe.epochs, len(population))
    begun = 0 if checkpoint is None else checkpoint.load(state, curves)
    step = Stepper(state, replayed=bags.features.is_cuda and len(set(bags.sizes.tolist())) == 1)
    for epoch in range(begun, recipe.epochs):
        if not state.active.any():
            break
        population.train()
        state.optimizer.slow_down(recipe.pace(epoch))
        losses: dict[str, Tensor] = {}
        for phase in population.model.phases:
            state.population.begin(phase, epoch)
            sums: dict[str, Tensor] = {}
            for batch in _batches(bags, weights[state.rows], recipe, epoch):
                for name, value in step(batch).items():
                    sums[name] = sums[name] + value if name in sums else value.clone()
            steps = sums.pop("steps")  # 0 for a model that has stopped: its losses become NaN
            losses |= {name: value / steps for name, value in sums.items()}
        population.train(False)
        state.population.begin("validation", epoch)
        judged = _validation_loss(state.population, bags, roles[state.rows], validation)
        curves.add(epoch, losses, judged, state.rows)
        running = state.after_epoch(epoch, judged)
        if on_epoch is not None:
            on_epoch(epoch, {name: float(value.nanmean()) for name, value in losses.items()}, running)
        if checkpoint is not None:
            checkpoint.save_if_due(epoch, state, curves)
    lost = (state.best_epoch < 0).nonzero().flatten().tolist()
    if lost:
        raise CarmilError(
            f"model {lost[0]} (of {len(lost)} such) never had a finite validation loss: lower its learning rate "
            f"({population.members[lost[0]].lr:g}) or look at its features"
        )
    population.weights, population.buffers = state.best, state.best_buffers
    return curves.history(state)


def _bag_weights(bags: Bags, train: Tensor, recipe: Recipe) -> Tensor:
    """(r, b) how much a bag counts to a model that trains on it, 0 to the others; balanced: each class alike, in all one a bag."""
    weights = train.float()
    if recipe.class_weights == "balanced":
        assert bags.labels is not None
        one = one_hot(bags.labels, bags.classes)  # (b, k)
        counts = weights @ one
        weights = weights * (
            (weights.sum(-1, keepdim=True) / (counts > 0).sum(-1, keepdim=True) / counts.clamp_min(1)) @ one.mT
        )
    return weights


def _batches(bags: Bags, weights: Tensor, recipe: Recipe, epoch: int) -> Iterator[Batch]:
    """One pass over the bags that somebody trains on. weights (r, b), 0 where a model does not.

    Order and division into batches depend on (study seed, epoch) and the cohort alone; a bag that nobody here trains on
    is then left out. So a model meets its bags in the same steps whoever else is in the population.
    """
    order = torch.arange(len(bags))
    if recipe.shuffle:
        generator = torch.Generator().manual_seed(recipe.study_seed * 1_000_003 + epoch)
        order = torch.randperm(len(bags), generator=generator)
    used = (weights > 0).any(0).cpu()
    for chosen in order.split(recipe.batch):
        chosen = chosen[used[chosen]]
        if len(chosen) > 0:
            counts = weights[:, chosen.to(weights.device)]
            yield _gathered(bags, chosen, counts / (counts > 0).sum(-1, keepdim=True).clamp_min(1))


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


def _validation_parts(bags: Bags, used: Tensor, at_once: int) -> list[Tensor]:
    """Positions of the validation bags, in runs small enough to be answered by all models at once."""
    chosen = used.cpu().nonzero().squeeze(-1)
    runs = runs_of(bags.sizes[chosen].tolist(), at_once)
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
