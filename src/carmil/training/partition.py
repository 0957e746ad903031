"""A population trained in parts, as many models at a time as there is room for; a part that has ended is kept in a file.

r models in all, q models of a part, b bags, p parameters. Where a step is one bag, a model becomes the same on a CPU, bit by
bit, whichever others are in its part, as long as there is one (see `at_least_two`). The last digits follow the division where
a step is several bags (those that nobody in the part trains on are left out of its sums), and in gated attention whose width
is no multiple of 32 (the remainder of a vector is another sigmoid).
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
    """Models whose training has ended: which `rows` (q) of the whole they are, what they became and how."""

    rows: Tensor
    weights: Tensor
    buffers: Tensor
    history: History


@dataclass(frozen=True, eq=False)
class Part:
    """Some models, `rows` (q) of the whole, and all that is needed to train them, here or elsewhere.

    `population` is on the CPU; `checkpoint` and the bags `trained_on` (b) are the whole training's.
    """

    rows: Tensor
    population: Population
    roles: Tensor
    recipe: Recipe
    checkpoint: Checkpoint | None
    trained_on: Tensor | None = None

    def train(self, bags: Bags, device: torch.device | str, *, on_epoch: OnEpoch | None = None) -> TrainedPart:
        """Goes on where it was killed; a part that has ended before is read."""
        if self.checkpoint is None:
            return self._trained(bags, device, on_epoch, None)
        folder, key = self.checkpoint.parts, self.checkpoint.key
        if not folder.is_dir():
            raise CarmilError(f"{folder} is not there: a run's folder must lie where every machine that trains sees it")
        name = config_key({"rows": self.rows.tolist()})
        there = folder / f"{name}{_ENDED}"
        if not there.exists():
            begun = Checkpoint(folder / f"{name}.begun.safetensors", f"{key} {name}", every=self.checkpoint.every)
            _write(there, key, self._trained(bags, device, on_epoch, begun))
            begun.remove()
        return _read(there, key)

    def _trained(
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


Engine = Callable[[Sequence[Part]], Iterable[TrainedPart]]  # trains parts, in any order and at any place
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
    """`fit` with at most this many models at once, one part after the other on `device`, or all parts by the engine.

    Without a number, as many as fit.

    roles (r, b). Gives the trained population: on `device` if all its models were trained at once, else on the CPU.
    With a `checkpoint`, parts that ended before a training was killed are not trained again, also if the number of models
    at once is another now. `on_epoch` is told of an epoch that grows over all parts.
    """
    if at_most is None and engine is None:
        at_most = models_that_fit(population, bags, recipe, device)
    ended = [] if checkpoint is None else _ended_before(checkpoint)
    divided = partition(roles, at_most, done=[row for part in ended for row in part.rows.tolist()])
    if engine is None and not ended and len(divided) == 1:
        population = population.to(device)
        history = fit(population, bags, roles, recipe, trained_on=trained_on, on_epoch=on_epoch, checkpoint=checkpoint)
        return population, history
    if checkpoint is not None:
        checkpoint.parts.mkdir(parents=True, exist_ok=True)
    population = population.to("cpu")
    parts = [Part(rows, population.subset(rows), roles[rows], recipe, checkpoint, trained_on) for rows in divided]
    ended += _one_by_one(parts, bags, device, on_epoch, len(population)) if engine is None else engine(parts)
    for part in ended:
        population.weights[part.rows], population.buffers[part.rows] = part.weights, part.buffers
    return population, _joined(ended, len(population))


def partition(roles: Tensor, at_most: int | None, *, done: Sequence[int] = ()) -> list[Tensor]:
    """The rows of each part: nearly equal in number, models with the same bags together. roles (r, b).

    At most `at_most` in a part, but never one alone: it has another model beside it, trained once more. Rows that
    are done are left out; the parts that remain are those there would have been.
    """
    everyone = torch.arange(len(roles))
    order = roles.unique(dim=0, return_inverse=True)[1].argsort(stable=True)
    missing = order[~torch.isin(order, torch.tensor(done, dtype=torch.long))]
    if len(missing) == 0:
        return []
    count = 1 if at_most is None else math.ceil(len(missing) / max(2, at_most))
    return [at_least_two(torch.isin(everyone, part)) for part in missing.tensor_split(count)]


def _one_by_one(
    parts: Sequence[Part], bags: Bags, device: torch.device | str, on_epoch: OnEpoch | None, models: int
) -> Iterator[TrainedPart]:
    waiting = sum(len(part.rows) for part in parts)
    for part in parts:
        waiting -= len(part.rows)
        yield part.train(bags, device, on_epoch=_over_all(on_epoch, part, waiting, models))


def _over_all(on_epoch: OnEpoch | None, part: Part, waiting: int, models: int) -> OnEpoch | None:
    """Tells of a part as of all models: those done have run all epochs, those waiting none; who waits still runs."""
    if on_epoch is None:
        return None
    epochs, here = part.recipe.epochs, len(part.rows)
    before = max(0, models - waiting - here)

    def told(epoch: int, losses: dict[str, float], running: int) -> None:
        on_epoch((before * epochs + here * epoch) // models, losses, running + waiting)

    return told


def _joined(ended: Sequence[TrainedPart], models: int) -> History:
    """One history of all models, as long as the longest; NaN where a part's was over."""
    last = max(len(part.history.validation) for part in ended)
    tables: dict[str, Tensor] = {}
    best_epoch, epochs_run = torch.zeros(2, models, dtype=torch.long)
    for part in ended:
        for name, table in _tables(part.history).items():
            whole = tables.setdefault(name, torch.full((last, models), float("nan")))
            whole[: len(table), part.rows] = table
        best_epoch[part.rows], epochs_run[part.rows] = part.history.best_epoch, part.history.epochs_run
    return History(validation=tables.pop("validation"), train=tables, best_epoch=best_epoch, epochs_run=epochs_run)


def _tables(history: History) -> dict[str, Tensor]:
    return {**history.train, "validation": history.validation}


def _write(path: Path, key: str, ended: TrainedPart) -> None:
    history = ended.history
    tensors = {name: getattr(ended, name) for name in ("rows", "weights", "buffers")}
    tensors |= {"best_epoch": history.best_epoch, "epochs_run": history.epochs_run}
    write_keyed(path, tensors | {f"curve.{name}": table for name, table in _tables(history).items()}, {"key": key})


def _read(path: Path, key: str) -> TrainedPart:
    kept, _ = read_keyed(path, key)
    tables = {name.removeprefix("curve."): kept[name] for name in kept if name.startswith("curve.")}
    history = History(
        validation=tables.pop("validation"), train=tables, best_epoch=kept["best_epoch"], epochs_run=kept["epochs_run"]
    )
    return TrainedPart(kept["rows"], kept["weights"], kept["buffers"], history)


def _ended_before(checkpoint: Checkpoint) -> list[TrainedPart]:
    return [_read(path, checkpoint.key) for path in sorted(checkpoint.parts.glob(f"*{_ENDED}"))]
