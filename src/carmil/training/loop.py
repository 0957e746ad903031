"""The training loop.

r models, b bags. Every model has its own bags to train on and to validate on; nothing here can name a test bag.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from carmil.bags.bags import Bags, runs_of
from carmil.errors import CarmilError
from carmil.models.contract import cross_entropy, one_hot
from carmil.training.checkpoint import Checkpoint
from carmil.training.curves import Curves, History
from carmil.training.feeding import Feeder, feeder_for
from carmil.training.population import Population
from carmil.training.processor import settle
from carmil.training.recipe import TRAIN, VALIDATION, Recipe
from carmil.training.stepping import Batch, Stepper
from carmil.training.stopping import State, at_least_two

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
    roles = _checked_roles(population, bags, roles).cpu()
    if population.device.type == "cpu":
        settle()
    state = State(population, recipe)
    judged_by = _validation_parts(bags, roles == VALIDATION, population.at_once)
    weights = _bag_weights(bags, roles == TRAIN, recipe).to(population.device)
    largest = bags.sizes.topk(min(recipe.batch, len(bags))).indices
    feeder = feeder_for(population, bags, [largest, *(part.bags for part in judged_by)])
    population.smooth_labels(recipe.label_smoothing)
    curves = Curves(recipe.epochs, len(population))
    begun = 0 if checkpoint is None else checkpoint.load(state, curves)
    step = Stepper(state)
    for epoch in range(begun, recipe.epochs):
        if not state.running.any():
            break
        population.train()
        state.optimizer.slow_down(recipe.pace(epoch))
        losses: dict[str, Tensor] = {}
        for phase in population.model.phases:
            state.population.begin(phase, epoch)
            sums = torch.zeros((), device=population.device)
            for batch in _batches(feeder, weights[state.rows], recipe, epoch):
                sums = sums + step(batch)
            *means, _ = sums / sums[-1]  # no step was taken by a model that has stopped: its losses become NaN
            losses |= dict(zip(step.terms, means, strict=False))
        population.train(False)
        state.population.begin("validation", epoch)
        judged = _validation_loss(state, feeder, judged_by)
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
        one = one_hot(bags.labels.cpu(), bags.classes)  # (b, k)
        counts = weights @ one
        weights = weights * (
            (weights.sum(-1, keepdim=True) / (counts > 0).sum(-1, keepdim=True) / counts.clamp_min(1)) @ one.mT
        )
    return weights


def _batches(feeder: Feeder, weights: Tensor, recipe: Recipe, epoch: int) -> Iterator[Batch]:
    """One pass over the bags that somebody trains on. weights (r, b), 0 where a model does not.

    Order and division into batches depend on (study seed, epoch) and the cohort alone; a bag that nobody here trains on
    is then left out. So a model meets its bags in the same steps whoever else is in the population.
    """
    order = torch.arange(weights.shape[1])
    if recipe.shuffle:
        generator = torch.Generator().manual_seed(recipe.study_seed * 1_000_003 + epoch)
        order = torch.randperm(len(order), generator=generator)
    learns = (weights > 0).cpu()
    used = learns.any(0)
    plan = [chosen[used[chosen]] for chosen in order.split(recipe.batch)]
    plan = [chosen for chosen in plan if len(chosen) > 0]
    shares = _shares(weights, plan)
    for chosen, share, fed in zip(plan, shares, feeder.feed(plan), strict=True):
        learners = learns[:, chosen].any(1)
        yield Batch(fed.features, fed.labels, fed.offsets, fed.rows, share, learners, feeder.like(chosen))


def _shares(weights: Tensor, plan: list[Tensor]) -> tuple[Tensor, ...]:
    """(r, bags of the batch), one a batch: a bag's weight, divided by how many bags of the batch the model trains on."""
    lengths = [len(chosen) for chosen in plan]
    ordered = weights[:, torch.cat(plan).to(weights.device)]
    batch_of = torch.repeat_interleave(torch.arange(len(plan)), torch.tensor(lengths)).to(weights.device)
    counts = weights.new_zeros(len(weights), len(plan)).index_add_(1, batch_of, (ordered > 0).to(weights.dtype))
    return (ordered / counts.clamp_min(1)[:, batch_of]).split(lengths, dim=1)


@dataclass(frozen=True)
class _Judged:
    """Validation bags (positions) of the models (r, bool) that validate on just the same bags: as many as are answered at once."""

    bags: Tensor
    models: Tensor


def _validation_parts(bags: Bags, validated: Tensor, at_once: Callable[[int], int]) -> list[_Judged]:
    """validated (r, b) cut so that every bag is answered by those who validate on it. at_once: instances for so many models.

    Which bags are answered together depends on the model's own bags alone: so do, on a CPU, the last bits of the answer.
    """
    parts = []
    for row in validated.unique(dim=0):
        models = (validated == row).all(1)
        chosen = row.nonzero().squeeze(-1)
        runs = runs_of(bags.sizes[chosen].tolist(), at_once(int(models.sum())))
        parts += [_Judged(chosen[first:last], models) for first, last in runs]
    return parts


@torch.no_grad()
def _validation_loss(state: State, feeder: Feeder, parts: list[_Judged]) -> Tensor:
    """(r) mean cross-entropy of each running model's answers for its own validation bags; the same measure for every method."""
    device, here = state.population.device, state.rows.cpu()
    sums, counts = torch.zeros(2, len(here), device=device)
    asked = [part for part in parts if part.models[here].any()]
    for part, fed in zip(asked, feeder.feed([part.bags for part in asked]), strict=True):
        rows = at_least_two(part.models[here])
        judging = part.models[here][rows].float().to(device)
        who, rows = rows.tolist(), rows.to(device)
        population = state.population if len(who) == len(here) else state.population.subset(rows, who=who)
        losses = cross_entropy(population(fed.features, fed.offsets).logits, fed.labels)
        sums.index_add_(0, rows, losses.sum(-1) * judging)
        counts.index_add_(0, rows, len(part.bags) * judging)
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
