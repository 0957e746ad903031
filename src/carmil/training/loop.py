"""The training loop.

r models, b bags. Every model has its own bags to train on and to validate on; nothing here can name a test bag.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from carmil.bags.bags import Bags
from carmil.errors import CarmilError
from carmil.models.contract import one_hot
from carmil.training.checkpoint import Checkpoint
from carmil.training.early_stopping import TrainingState
from carmil.training.feeder import Feeder, open_feeder
from carmil.training.history import History, HistoryBuilder
from carmil.training.population import Population
from carmil.training.process_settings import configure_process
from carmil.training.recipe import TRAIN, VALIDATION, Recipe
from carmil.training.step import Batch, Stepper
from carmil.training.validation import Validator, validation_parts

OnEpoch = Callable[[int, dict[str, float], int], None]


def fit(
    population: Population,
    bags: Bags,
    roles: Tensor,
    recipe: Recipe,
    *,
    trained_on: Tensor | None = None,
    on_epoch: OnEpoch | None = None,
    checkpoint: Checkpoint | None = None,
) -> History:
    """Train every model on its TRAIN bags; keep the weights of its best epoch on its VALIDATION bags.

    roles (r, b) or (b). After `warmup` epochs a strictly lower mean validation cross-entropy is a new best; `patience`
    epochs without one, and the model stops. `on_epoch(epoch, mean losses, models still running)` is called after each epoch.
    With a `checkpoint`, an interrupted training resumes from it, and on a CPU ends with the same bits.
    trained_on (b): the bags that some model of the study trains on; batches are made of these, by default of all bags.
    A model that never had a finite validation loss is an error: it has no weights to keep.
    """
    roles = _checked_roles(population, bags, roles).cpu()
    configure_process()
    state = TrainingState(population, recipe)
    parts = validation_parts(bags, roles == VALIDATION, population.instances_per_pass)
    weights = _bag_weights(bags, roles == TRAIN, recipe).to(population.device)
    largest = bags.sizes.topk(min(recipe.batch, len(bags))).indices
    population.smooth_labels(recipe.label_smoothing)
    curves = HistoryBuilder(recipe.epochs, len(population))
    first = 0 if checkpoint is None else checkpoint.load(state, curves)
    with open_feeder(population, bags, [largest, *(part.bags for part in parts)]) as feeder:
        step, validate = Stepper(state), Validator(state, feeder, parts)
        for epoch in range(first, recipe.epochs):
            if not state.running.any():
                break
            population.train()
            state.optimizer.slow_down(recipe.pace(epoch))
            losses: dict[str, Tensor] = {}
            for phase in population.model.phases:
                state.population.begin(phase, epoch)
                sums = torch.zeros((), device=population.device)
                for batch in _batches(feeder, weights[state.rows], state.running, trained_on, recipe, epoch):
                    sums = sums + step(batch)
                *means, _ = sums / sums[-1]  # a stopped model took no step: its losses become NaN
                losses |= dict(zip(step.terms, means, strict=False))
            population.train(False)
            state.population.begin("validation", epoch)
            validation = validate()
            curves.add(epoch, losses, validation, state.rows)
            running = state.after_epoch(epoch, validation)
            if on_epoch is not None:
                on_epoch(epoch, {name: float(value.nanmean()) for name, value in losses.items()}, running)
            if checkpoint is not None:
                checkpoint.save_if_due(epoch, state, curves)
    failed = (state.best_epoch < 0).nonzero().flatten().tolist()
    if failed:
        raise CarmilError(
            f"model {failed[0]} (of {len(failed)} such) never had a finite validation loss: lower its learning rate "
            f"({population.members[failed[0]].lr:g}) or check its features"
        )
    population.weights, population.buffers = state.best, state.best_buffers
    return curves.history(state)


def _bag_weights(bags: Bags, train: Tensor, recipe: Recipe) -> Tensor:
    """(r, b) the weight of a bag for each model that trains on it, 0 for the others; balanced: equal per class, 1 on average."""
    weights = train.float()
    if recipe.class_weights == "balanced":
        assert bags.labels is not None
        labels = one_hot(bags.labels.cpu(), bags.classes)  # (b, k)
        counts = weights @ labels
        weights = weights * (
            (weights.sum(-1, keepdim=True) / (counts > 0).sum(-1, keepdim=True) / counts.clamp_min(1)) @ labels.mT
        )
    return weights


def _batches(
    feeder: Feeder, weights: Tensor, running: Tensor, trained_on: Tensor | None, recipe: Recipe, epoch: int
) -> Iterator[Batch]:
    """One pass over the training bags. weights (r, b), 0 where a model does not train on a bag; running (r) bool.

    Order and batches depend on (study seed, epoch) and the cohort alone; bags that no running model trains on are then left
    out. So a model meets its bags in the same steps whichever other models are in the population.
    """
    order = torch.arange(weights.shape[1])
    if recipe.shuffle:
        generator = torch.Generator().manual_seed(recipe.study_seed * 1_000_003 + epoch)
        order = torch.randperm(len(order), generator=generator)
    if trained_on is not None:
        order = order[trained_on[order]]
    learns = (weights > 0).cpu()
    used = learns[running].any(0)
    plan = [chosen[used[chosen]] for chosen in order.split(recipe.batch)]
    plan = [chosen for chosen in plan if len(chosen) > 0]
    shares = _shares(weights, plan)
    for chosen, share, bags in zip(plan, shares, feeder.feed(plan), strict=True):
        learners = learns[:, chosen].any(1)
        yield Batch(bags.features, bags.labels, bags.offsets, bags.rows, share, learners, feeder.graph_key(chosen))


def _shares(weights: Tensor, plan: list[Tensor]) -> tuple[Tensor, ...]:
    """(r, bags of the batch) for each batch: a bag's weight divided by the number of its bags that the model trains on."""
    lengths = [len(chosen) for chosen in plan]
    ordered = weights[:, torch.cat(plan).to(weights.device)]
    batch_of = torch.repeat_interleave(torch.arange(len(plan)), torch.tensor(lengths)).to(weights.device)
    counts = weights.new_zeros(len(weights), len(plan)).index_add_(1, batch_of, (ordered > 0).to(weights.dtype))
    return (ordered / counts.clamp_min(1)[:, batch_of]).split(lengths, dim=1)


def _checked_roles(population: Population, bags: Bags, roles: Tensor) -> Tensor:
    if bags.labels is None:
        raise CarmilError("the bags have no labels to train on")
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
