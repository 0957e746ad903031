"""Early stopping: the models that are still running, and the best weights of each so far. r models."""

import torch
from torch import Tensor

from carmil.training.optimizers import OPTIMIZERS, Optimizer
from carmil.training.population import Population
from carmil.training.recipe import Recipe

FEW_ON_A_GPU = (
    8  # a population this small is not halved: recording all steps again would cost as much time as halving saves
)


class TrainingState:
    """Early stopping and best weights of every model. `population` holds the models still running, `rows` their
    positions.

    `active` marks the running models that take steps; `running` is its copy on the CPU.
    """

    def __init__(self, population: Population, recipe: Recipe) -> None:
        r, device = len(population), population.device
        self.population, self.recipe = population, recipe
        self.rows = torch.arange(r, device=device)
        self.active = torch.ones(r, dtype=torch.bool, device=device)
        self.running = self.active.cpu()
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

    def after_epoch(self, epoch: int, losses: Tensor) -> int:
        """Record the validation losses of the models in the population; return how many models continue."""
        rows = self.rows
        self.epochs_run[rows] += self.active.long()
        if epoch >= self.recipe.warmup or epoch == self.recipe.epochs - 1:
            better = self.active & (losses < self.best_loss[rows])
            self.best[rows[better]] = self.population.weights[better]
            self.best_buffers[rows[better]] = self.population.buffers[better]
            self.best_loss[rows[better]] = losses[better]
            self.best_epoch[rows[better]] = epoch
            self.waited[rows] = torch.where(better, 0, self.waited[rows] + 1)
            self.active &= self.waited[rows] < self.recipe.patience
        self.running = self.active.cpu()
        running = int(self.running.sum())
        few = FEW_ON_A_GPU if self.population.weights.is_cuda else 2
        if 0 < running <= len(rows) // 2 and len(rows) > few:
            self._compact()
        return running

    def _compact(self) -> None:
        """Remove the models that have stopped, each time their number has halved, so that there are few different shapes."""
        keep = at_least_two(self.active)
        self.population = self.population.subset(keep)
        self.optimizer.take(keep)
        self.rows, self.active, self.running = self.rows[keep], self.active[keep], self.running[keep.cpu()]

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors needed to resume training."""
        population = self.population
        tensors = {name: getattr(self, name) for name in _SAVED}
        tensors |= {"weights": population.weights, "buffers": population.buffers, "steps": population.noise.steps}
        return tensors | {f"optimizer.{i}": tensor for i, tensor in enumerate(self.optimizer.state)}

    def restore(self, saved: dict[str, Tensor]) -> None:
        """Restore the state that `tensors` returned."""
        rows = saved["rows"].to(self.rows.device)
        if len(rows) < len(self.rows):
            self.population = self.population.subset(rows)
            self.optimizer.take(rows)
            self.rows, self.active = rows, self.active[rows]
        for name, tensor in self.tensors().items():
            tensor.copy_(saved[name])
        self.running = self.active.cpu()


def at_least_two(active: Tensor) -> Tensor:
    """Return the rows of the active models, with one more row if only one of several is active. active (r) bool.

    A product for a single model is summed in another order than the same product for two or more: with at least two,
    the training of a model does not depend on when the others stop.
    """
    rows = active.nonzero().squeeze(-1)
    if len(rows) == 1 and len(active) > 1:
        rows = torch.tensor(sorted({int(rows[0]), 0 if int(rows[0]) else 1}), device=active.device)
    return rows


_SAVED = ("rows", "active", "best", "best_buffers", "best_loss", "best_epoch", "waited", "epochs_run")
