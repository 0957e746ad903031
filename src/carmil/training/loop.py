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
from carmil.training.optimizers import OPTIMIZERS, Optimizer
from carmil.training.population import Population

UNUSED, TRAIN, VALIDATION = 0, 1, 2


@dataclass(frozen=True)
class Recipe:
    """How a population is trained. The defaults are those of the digit-bag benchmark (xMIL's template)."""

    epochs: int = 1000
    batch: int = 16
    optimizer: str = "sgd"
    momentum: float = 0.9
    weight_decay: float = 0.0
    shuffle: bool = False
    warmup: int = 10
    patience: int = 100
    study_seed: int = 0

    def __post_init__(self) -> None:
        for name, low in (
            ("epochs", 1),
            ("batch", 1),
            ("warmup", 0),
            ("patience", 1),
            ("weight_decay", 0),
            ("momentum", 0),
        ):
            if not getattr(self, name) >= low:
                raise CarmilError(f"{name} is {getattr(self, name)}: expected at least {low}")
        if self.optimizer not in OPTIMIZERS:
            raise CarmilError(f"unknown optimizer {self.optimizer!r}: expected one of {', '.join(OPTIMIZERS)}")


@dataclass(frozen=True)
class History:
    """What happened: loss terms by epoch and model, (epochs, r), NaN after a model stopped; and each model's best epoch."""

    train: dict[str, Tensor]
    validation: Tensor
    best_epoch: Tensor
    epochs_run: Tensor


@dataclass(frozen=True)
class Batch:
    """Some bags on the device: `rows` (n) are their instances in the cohort; `share` (r, b) says who trains on which
    bag, and sums to 1 for a model that has one here."""

    features: Tensor
    labels: Tensor
    offsets: Offsets
    rows: Tensor
    share: Tensor


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
    state = _State(population, recipe)
    validation = _validation_parts(bags, (roles == VALIDATION).any(0), len(population))
    records: list[tuple[dict[str, Tensor], Tensor, Tensor]] = []
    step = _Stepper(state, replayed=bags.features.is_cuda and len(set(bags.sizes.tolist())) == 1)
    for epoch in range(recipe.epochs):
        population.train()
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


class _State:
    """Early stopping and best weights of every model; `population` holds those still running, `rows` says which."""

    def __init__(self, population: Population, recipe: Recipe) -> None:
        r, device = len(population), population.device
        self.population, self.recipe = population, recipe
        self.rows = torch.arange(r, device=device)
        self.active = torch.ones(r, dtype=torch.bool, device=device)
        self.best, self.best_buffers = population.weights.clone(), population.buffers.clone()
        self.best_loss = torch.full((r,), float("inf"), device=device)
        self.best_epoch = torch.full((r,), -1, dtype=torch.long, device=device)
        self.waited = torch.zeros(r, dtype=torch.long, device=device)
        self.epochs_run = torch.zeros(r, dtype=torch.long, device=device)
        lr = torch.tensor([member.lr for member in population.members], device=device)
        options = {"momentum": recipe.momentum} if recipe.optimizer == "sgd" else {}
        self.optimizer: Optimizer = OPTIMIZERS[recipe.optimizer](
            population.weights, lr, weight_decay=recipe.weight_decay, **options
        )

    def after_epoch(self, epoch: int, judged: Tensor) -> int:
        """Books the epoch's validation losses (models in the population); says how many models go on."""
        rows = self.rows
        self.epochs_run[rows] += self.active.long()
        if epoch >= self.recipe.warmup or epoch == self.recipe.epochs - 1:
            better = self.active & (judged < self.best_loss[rows])
            self.best[rows[better]] = self.population.weights[better]
            self.best_buffers[rows[better]] = self.population.buffers[better]
            self.best_loss[rows[better]] = judged[better]
            self.best_epoch[rows[better]] = epoch
            self.waited[rows] = torch.where(better, 0, self.waited[rows] + 1)
            self.active &= self.waited[rows] < self.recipe.patience
        running = int(self.active.sum())
        if 0 < running <= len(rows) // 2:
            self._compact()
        return running

    def _compact(self) -> None:
        """Half of the models have stopped: leave them out. Halving keeps the number of shapes small."""
        keep = self.active.nonzero().squeeze(-1)
        self.population = self.population.subset(keep)
        self.optimizer.take(keep)
        self.rows, self.active = self.rows[keep], self.active[keep]


class _Stepper:
    """One training step of the population; on a GPU, where bags share one size, replayed as a CUDA graph."""

    def __init__(self, state: _State, *, replayed: bool) -> None:
        self.state = state
        self.replayed = replayed and len(state.population.model.phases) == 1
        self._graph: torch.cuda.CUDAGraph | None = None
        self._key: tuple[int, ...] = ()
        self._inputs: Batch | None = None
        self._outputs: dict[str, Tensor] = {}

    def __call__(self, batch: Batch) -> dict[str, Tensor]:
        """Steps on the batch; each model's losses on it (r), zero for a model that took no step, and `steps` (r)."""
        if not self.replayed or batch.offsets.size is None:
            return self._step(batch)
        key = (len(self.state.rows), batch.offsets.bags, batch.offsets.size)
        if key != self._key:
            if self._graph is None or key[0] != self._key[0]:
                self._capture(batch, key)
                return self._outputs
            return self._step(batch)  # a last, smaller batch
        assert self._inputs is not None and self._graph is not None
        self._inputs.features.copy_(batch.features)
        self._inputs.labels.copy_(batch.labels)
        self._inputs.rows.copy_(batch.rows)
        self._inputs.share.copy_(batch.share)
        self._graph.replay()
        return self._outputs

    def _step(self, batch: Batch) -> dict[str, Tensor]:
        state, population = self.state, self.state.population
        active = state.active & (batch.share.sum(-1) > 0)
        weights = population.weights.detach().requires_grad_()
        counted = batch.share > 0
        prediction = population(batch.features, batch.offsets, weights=weights, rows=batch.rows, counted=counted)
        losses = population.losses(prediction, batch.labels)
        means = {name: (value * batch.share).sum(-1) for name, value in losses.items()}
        (gradient,) = torch.autograd.grad(means["total"].sum(), weights)
        state.optimizer.step(population.weights, gradient, active)
        population.noise.steps += active.long()
        on = active.to(gradient.dtype)
        return {**{name: value.detach() * on for name, value in means.items()}, "steps": on}

    def _capture(self, batch: Batch, key: tuple[int, ...]) -> None:
        """Records the step on buffers of its own. Recording does not run it; the first replay does."""
        self._inputs = Batch(
            batch.features.clone(), batch.labels.clone(), batch.offsets, batch.rows.clone(), batch.share.clone()
        )
        before = _Snapshot(self.state)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                self._step(self._inputs)
        torch.cuda.current_stream().wait_stream(side)
        before.restore()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._outputs = self._step(self._inputs)
        self._key = key
        self._graph.replay()


class _Snapshot:
    """What a step changes, put back after the warm-up that recording a CUDA graph needs."""

    def __init__(self, state: _State) -> None:
        population = state.population
        self._live = [population.weights, population.buffers, population.noise.steps, *state.optimizer.state]
        self._copies = [tensor.detach().clone() for tensor in self._live]

    def restore(self) -> None:
        for tensor, copy in zip(self._live, self._copies, strict=True):
            tensor.data.copy_(copy)


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


def _history(records: list[tuple[dict[str, Tensor], Tensor, Tensor]], state: _State) -> History:
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
