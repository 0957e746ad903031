"""Training of a population in parts of as many models as fit into memory; the result of each part is stored in a file.

r models in all, q models of a part, b bags, p parameters. With one bag per step, a model's training on a CPU is the
same bit by bit whichever other models are in its part, as long as there is one (see `at_least_two`). The last digits
depend on the partition if a step has several bags (bags that no model of the part trains on are left out of its
sums), and in gated attention whose width is not a multiple of 32 (the remainder of a vector is computed with another
sigmoid).
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from carmil.bags.bags import Bags
from carmil.errors import CarmilError
from carmil.provenance import config_key
from carmil.training.checkpoint import Checkpoint, read_keyed, write_keyed
from carmil.training.early_stopping import at_least_two
from carmil.training.history import History
from carmil.training.loop import OnEpoch, fit
from carmil.training.memory import models_that_fit
from carmil.training.population import Population
from carmil.training.recipe import Recipe


@dataclass(frozen=True, eq=False)
class TrainedPart:
    """Trained models: their `rows` (q) in the whole population, their weights and their history."""

    rows: Tensor
    weights: Tensor
    buffers: Tensor
    history: History


@dataclass(frozen=True, eq=False)
class Part:
    """Some models, `rows` (q) of the whole population, with everything needed to train them on any machine.

    `population` is on the CPU; `checkpoint` and the bags `trained_on` (b) are those of the whole training.
    """

    rows: Tensor
    population: Population
    roles: Tensor
    recipe: Recipe
    checkpoint: Checkpoint | None
    trained_on: Tensor | None = None

    def train(self, bags: Bags, device: torch.device | str, *, on_epoch: OnEpoch | None = None) -> TrainedPart:
        """Train the part, or resume its training; a part that is finished is read."""
        if self.checkpoint is None:
            return self._fit(bags, device, on_epoch, None)
        folder, key = self.checkpoint.parts, self.checkpoint.key
        if not folder.is_dir():
            raise CarmilError(
                f"{folder} does not exist on this machine: put the run's folder on a disk that every training "
                "machine can read"
            )
        name = config_key({"rows": self.rows.tolist()})
        path = folder / f"{name}{_ENDED}"
        if not path.exists():
            begun = Checkpoint(folder / f"{name}.begun.safetensors", f"{key} {name}", every=self.checkpoint.every)
            _write(path, key, self._fit(bags, device, on_epoch, begun))
            begun.remove()
        return _read(path, key)

    def _fit(
        self, bags: Bags, device: torch.device | str, on_epoch: OnEpoch | None, checkpoint: Checkpoint | None
    ) -> TrainedPart:
        population = self.population.subset(torch.arange(len(self.rows))).to(device)
        history = fit(
            population,
            bags,
            self.roles,
            self.recipe,
            trained_on=self.trained_on,
            on_epoch=on_epoch,
            checkpoint=checkpoint,
        )
        return TrainedPart(self.rows, population.weights.cpu(), population.buffers.cpu(), history)


Engine = Callable[[Sequence[Part]], Iterable[TrainedPart]]  # trains parts, in any order, on any machine
_ENDED = ".ended.safetensors"


def fit_in_parts(
    population: Population,
    bags: Bags,
    roles: Tensor,
    recipe: Recipe,
    *,
    device: torch.device | str = "cpu",
    at_most: int | None = None,
    engine: Engine | None = None,
    trained_on: Tensor | None = None,
    on_epoch: OnEpoch | None = None,
    checkpoint: Checkpoint | None = None,
) -> tuple[Population, History]:
    """Train as `fit` does, with at most `at_most` models at once (by default as many as fit), in parts, on `device`
    or by an engine.

    roles (r, b). The trained population is on `device` if all its models were trained at once, else on the CPU.
    With a `checkpoint`, parts that were finished before an interruption are not trained again, even if `at_most`
    has changed. `on_epoch` counts epochs over all parts.
    """
    if at_most is None and engine is None:
        at_most = models_that_fit(population, bags, recipe, device)
    finished = [] if checkpoint is None else _finished_parts(checkpoint)
    divided = partition(roles, at_most, done=[row for part in finished for row in part.rows.tolist()])
    if engine is None and not finished and len(divided) == 1:
        population = population.to(device)
        history = fit(population, bags, roles, recipe, trained_on=trained_on, on_epoch=on_epoch, checkpoint=checkpoint)
        return population, history
    if checkpoint is not None:
        checkpoint.parts.mkdir(parents=True, exist_ok=True)
    population = population.to("cpu")
    parts = [Part(rows, population.subset(rows), roles[rows], recipe, checkpoint, trained_on) for rows in divided]
    finished += _one_by_one(parts, bags, device, on_epoch, len(population)) if engine is None else engine(parts)
    for part in finished:
        population.weights[part.rows], population.buffers[part.rows] = part.weights, part.buffers
    return population, _join_histories(finished, len(population))


def partition(roles: Tensor, at_most: int | None, *, done: Sequence[int] = ()) -> list[Tensor]:
    """Return the rows of each part: nearly equal in number, models with the same bags together. roles (r, b).

    A part has at most `at_most` models, but at least two: a single model is joined by a second one, which is trained
    again. Rows that are done are left out, which does not change the remaining parts.
    """
    rows = torch.arange(len(roles))
    order = roles.unique(dim=0, return_inverse=True)[1].argsort(stable=True)
    missing = order[~torch.isin(order, torch.tensor(done, dtype=torch.long))]
    if len(missing) == 0:
        return []
    count = 1 if at_most is None else math.ceil(len(missing) / max(2, at_most))
    return [at_least_two(torch.isin(rows, part)) for part in missing.tensor_split(count)]


def _one_by_one(
    parts: Sequence[Part], bags: Bags, device: torch.device | str, on_epoch: OnEpoch | None, models: int
) -> Iterator[TrainedPart]:
    queued = sum(len(part.rows) for part in parts)
    for part in parts:
        queued -= len(part.rows)
        yield part.train(bags, device, on_epoch=_overall_progress(on_epoch, part, queued, models))


def _overall_progress(on_epoch: OnEpoch | None, part: Part, queued: int, models: int) -> OnEpoch | None:
    """Report the progress of a part as that of all models; queued models count as running."""
    if on_epoch is None:
        return None
    epochs, here = part.recipe.epochs, len(part.rows)
    before = max(0, models - queued - here)

    def report(epoch: int, losses: dict[str, float], running: int) -> None:
        on_epoch((before * epochs + here * epoch) // models, losses, running + queued)

    return report


def _join_histories(parts: Sequence[TrainedPart], models: int) -> History:
    """Join the histories of all models into one, as long as the longest; NaN after a part's own end."""
    last = max(len(part.history.validation) for part in parts)
    tables: dict[str, Tensor] = {}
    best_epoch, epochs_run = torch.zeros(2, models, dtype=torch.long)
    for part in parts:
        for name, table in part.history.tables.items():
            whole = tables.setdefault(name, torch.full((last, models), float("nan")))
            whole[: len(table), part.rows] = table
        best_epoch[part.rows], epochs_run[part.rows] = part.history.best_epoch, part.history.epochs_run
    return History.from_tables(tables, best_epoch, epochs_run)


def _write(path: Path, key: str, part: TrainedPart) -> None:
    history = part.history
    tensors = {name: getattr(part, name) for name in ("rows", "weights", "buffers")}
    tensors |= {"best_epoch": history.best_epoch, "epochs_run": history.epochs_run}
    write_keyed(path, tensors | {f"curve.{name}": table for name, table in history.tables.items()}, {"key": key})


def _read(path: Path, key: str) -> TrainedPart:
    tensors, _ = read_keyed(path, key)
    tables = {name.removeprefix("curve."): tensors[name] for name in tensors if name.startswith("curve.")}
    history = History.from_tables(tables, tensors["best_epoch"], tensors["epochs_run"])
    return TrainedPart(tensors["rows"], tensors["weights"], tensors["buffers"], history)


def _finished_parts(checkpoint: Checkpoint) -> list[TrainedPart]:
    return [_read(path, checkpoint.key) for path in sorted(checkpoint.parts.glob(f"*{_ENDED}"))]
