"""The training loop.

r models, b bags. Every model has its own training and validation bags; this module has no access to test bags.
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
from carmil.training.outcomes import centre_links, fit_links
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

    roles (r, b) or (b). After `warmup` epochs a strictly lower mean validation loss is a new best; a model
    stops after `patience` epochs without one. `on_epoch(epoch, mean losses, models still running)` is called after
    each epoch. With a `checkpoint`, an interrupted training resumes from it, and on a CPU its result has the same
    bits. trained_on (b): the bags that some model of the study trains on, from which batches are made; by default all
    bags. It is an error if a model never has a finite validation loss, as there are no weights to keep.

    The parameters that the target's link fits to outcomes, such as cut points, are initialised from each model's own
    TRAIN bags, unless the population has a warm start.
    """
    roles = _checked_roles(population, bags, roles).cpu()
    assert bags.labels is not None
    _check_recipe(recipe, population, bags.labels)
    configure_process()
    trained = roles == TRAIN
    if not population.warm:
        fit_links(population, bags, trained)
    state = TrainingState(population, recipe)
    parts = validation_parts(bags, roles == VALIDATION, population.instances_per_pass)
    weights = _bag_weights(bags, trained, recipe).to(population.device)
    informative = population.link.informative(bags.labels).cpu()
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
                given = weights[state.rows], informative, state.running, trained.any(0), trained_on
                for batch in _batches(feeder, *given, recipe, epoch):
                    sums = sums + step(batch)
                *means, _ = sums / sums[-1]  # a stopped model took no step, and its losses become NaN
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
            f"model {failed[0]} (one of {len(failed)}) never had a finite validation loss: lower its learning "
            f"rate ({population.members[failed[0]].lr:g}) or check its features"
        )
    population.weights, population.buffers = state.best, state.best_buffers
    centre_links(population, bags, trained)
    return curves.history(state)


def _bag_weights(bags: Bags, train: Tensor, recipe: Recipe) -> Tensor:
    """Return (r, b) the weight of a bag for each model that trains on it, 0 for other models; balanced: equal per
    class, 1 on average.
    """
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
    feeder: Feeder,
    weights: Tensor,
    informative: Tensor,
    running: Tensor,
    used: Tensor,
    trained_on: Tensor | None,
    recipe: Recipe,
    epoch: int,
) -> Iterator[Batch]:
    """Yield the batches of one pass over the training bags.

    weights (r, b), 0 where a model does not train on a bag; informative (b) bool: whether a bag has a loss of its own;
    running (r) bool; used (b) bool: the bags that some model of the population trains on. A model learns from a batch if
    it trains on some informative bag of it.

    Order and batches depend on (study seed, epoch) and the cohort alone. Bags that no model of the population trains on
    are left out afterwards; those of stopped models are not, so that a model's sums have the same bags, and the same
    bits, whichever others have stopped.
    """
    order = torch.arange(weights.shape[1])
    if recipe.shuffle:
        generator = torch.Generator().manual_seed(recipe.study_seed * 1_000_003 + epoch)
        order = torch.randperm(len(order), generator=generator)
    if trained_on is not None:
        order = order[trained_on[order]]
    trained = (weights > 0).cpu()
    learns = trained & informative
    learned = learns[running].any(0)
    plan = [chosen[used[chosen]] for chosen in order.split(recipe.batch)]
    plan = [chosen for chosen in plan if learned[chosen].any()]
    parts = zip(plan, _shares(weights, informative, plan), feeder.feed(plan), strict=True)
    for chosen, (share, counted), bags in parts:
        learners, key = learns[:, chosen].any(1), feeder.graph_key(chosen)
        yield Batch(bags.features, bags.labels, bags.offsets, bags.rows, share, counted, learners, key)


def _shares(weights: Tensor, informative: Tensor, plan: list[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield `share` and `counted` of each batch, (r, bags of the batch).

    A bag's share is its weight divided by the number of informative bags of the batch that the model trains on. In a
    batch without such a bag, a model takes no step, and none of its bags is counted.
    """
    lengths = [len(chosen) for chosen in plan]
    ordered = torch.cat(plan)
    trained, informs = weights[:, ordered.to(weights.device)], informative[ordered].to(weights.device)
    batch_of = torch.repeat_interleave(torch.arange(len(plan)), torch.tensor(lengths)).to(weights.device)
    learned = trained * informs
    counts = weights.new_zeros(len(weights), len(plan)).index_add_(1, batch_of, (learned > 0).to(weights.dtype))
    counts = counts[:, batch_of]
    share, counted = learned / counts.clamp_min(1), (trained > 0) & (counts > 0)
    yield from zip(share.split(lengths, dim=1), counted.split(lengths, dim=1), strict=True)


def _check_recipe(recipe: Recipe, population: Population, labels: Tensor) -> None:
    if population.link.compares_bags and recipe.batch == 1:
        raise CarmilError(
            "batch is 1: expected at least 2, better 32, as the loss of this target compares the bags of a step; "
            "set --batch, or choose a loss that needs no other bags, for survival --loss discrete"
        )
    if recipe.class_weights == "balanced" and labels.is_floating_point():
        raise CarmilError("class_weights is balanced: expected none, as the target has no classes")
    if recipe.label_smoothing > 0 and not population.link.smooths_labels:
        raise CarmilError(
            f"label_smoothing is {recipe.label_smoothing}: expected 0, as the loss of this target has no classes to spread over"
        )


def _checked_roles(population: Population, bags: Bags, roles: Tensor) -> Tensor:
    if bags.labels is None:
        raise CarmilError("the bags have no labels: training needs a label for every bag")
    roles = roles.expand(len(population), -1) if roles.ndim == 1 else roles
    if roles.shape != (len(population), len(bags)):
        raise CarmilError(
            f"roles have shape {tuple(roles.shape)}: expected ({len(population)} models, {len(bags)} bags)"
        )
    link = population.link
    link.check(bags.labels, population.model.classes)
    informative = link.informative(bags.labels).to(roles.device)
    for role, name in ((TRAIN, "training"), (VALIDATION, "validation")):
        without = ~((roles == role) & informative).any(1)
        if without.any():
            raise CarmilError(f"model {int(without.nonzero()[0])} has no {name} {link.informative_bag}")
    return roles
