"""One training step of a population, run as it is or, on a GPU, recorded and replayed. r models, b bags, n instances."""

from collections.abc import Hashable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from carmil.models.pooling import Offsets
from carmil.recording import Recorder, Recording
from carmil.training.early_stopping import TrainingState, at_least_two
from carmil.training.population import Population

MOST_RECORDED = 2000  # steps; the driver keeps some two hundred operations for each, of TransMIL some thousand


@dataclass(frozen=True)
class Batch:
    """Some bags on the device: `rows` (n) are their instances in the cohort; `share` (r, b) says who trains on which
    bag, and sums to 1 for a model that has one here. `learners` (r), where Python can read it: who has one.

    Batches with the same `like` can be stepped on by the same recorded operations; None: not worth recording.
    """

    features: Tensor
    labels: Tensor
    offsets: Offsets
    rows: Tensor
    share: Tensor
    learners: Tensor
    like: Hashable = None


class Stepper:
    """One training step of the population, recorded on a GPU where it is of a kind that comes again."""

    def __init__(self, state: TrainingState) -> None:
        self.state = state
        self.terms: list[str] = []  # what a step gives, row by row
        self._begin()

    def _begin(self) -> None:
        """With the models that are in the population now."""
        self._population = self.state.population
        # Of every kind of step that was met how its bags lie, and then what it reads as it is replayed.
        self._met: dict[Hashable, Offsets | tuple[Batch, Recording, list[str]]] = {}
        self._rows: dict[bytes, Tensor] = {}
        self._recorder = Recorder()

    def __call__(self, batch: Batch) -> Tensor:
        """Steps on the batch; each model's losses on it, one of `terms` a row, zero for a model that took no step. (t, r)

        The last term, `steps`, is 1 for a model that took one.
        """
        if self._population is not self.state.population:  # models that had stopped were left out
            self._begin()
        if batch.like is None or not batch.features.is_cuda or self._recorder.full:
            return self._step(batch)
        like = (batch.like, batch.learners.numpy().tobytes(), self._population.passing)
        met = self._met.get(like)
        if met is None:
            if len(self._met) < MOST_RECORDED:
                self._met[like] = batch.offsets
            return self._step(batch)
        if isinstance(met, Offsets):
            kept = self._kept(replace(batch, offsets=met))
            self._on_device(at_least_two(self.state.running & batch.learners))  # somebody may have stopped since
            recorded = self._recorder.record(lambda: self._step(kept))
            if recorded is None:
                self._met = {}  # gives back the memory that is missing
                return self._step(batch)
            met = self._met[like] = kept, recorded, self.terms
        reads, recorded, self.terms = met
        for there, given in (
            (reads.features, batch.features),
            (reads.labels, batch.labels),
            (reads.rows, batch.rows),
            (reads.share, batch.share),
        ):
            if there.data_ptr() != given.data_ptr():
                there.copy_(given)
        return recorded()

    def _step(self, batch: Batch) -> Tensor:
        state, population = self.state, self.state.population
        active = state.active & (batch.share.sum(-1) > 0)
        on = active.to(batch.share.dtype)
        stepping = state.running & batch.learners
        if bool(stepping.all()):
            means, gradients = self._differentiated(population, batch)
            state.optimizer.step(population.weights, gradients, active)
            losses = torch.stack(list(means.values()))
        else:  # nothing is computed for a model that takes no step: another fold's bag, or stopped
            who = at_least_two(stepping)
            rows = self._on_device(who)
            some = population.subset(rows, who=who.tolist())
            means, gradients = self._differentiated(some, replace(batch, share=batch.share[rows]))
            population.buffers[rows] = some.buffers
            state.optimizer.step(population.weights, gradients, active, rows)
            losses = on.new_zeros(len(means), len(on)).index_copy_(1, rows, torch.stack(list(means.values())))
        population.noise.steps += active.long()
        self.terms = [*means, "steps"]
        return torch.cat([torch.where(active, losses, 0.0), on.unsqueeze(0)])

    def _on_device(self, rows: Tensor) -> Tensor:
        """Rows of the population where it is; sent there once, since nothing can be sent while a step is recorded."""
        name = rows.numpy().tobytes()
        if name not in self._rows:
            self._rows[name] = rows.to(self.state.population.device)
        return self._rows[name]

    @classmethod
    def _differentiated(cls, population: Population, batch: Batch) -> tuple[dict[str, Tensor], list[Tensor]]:
        """Each model's mean losses (r) on its bags of the batch, and the gradients of their total, one a parameter (r, ...)."""
        leaves = population.leaves()
        means = cls.means(population, batch, leaves)
        gradients = torch.autograd.grad(means["total"].sum(), leaves, allow_unused=True, materialize_grads=True)
        return {name: value.detach() for name, value in means.items()}, [gradient.flatten(1) for gradient in gradients]

    @staticmethod
    def means(population: Population, batch: Batch, leaves: list[Tensor]) -> dict[str, Tensor]:
        """Each model's mean loss terms (r) on its bags of the batch, and their `total`, as functions of its leaves."""
        counted = batch.share > 0
        prediction = population(batch.features, batch.offsets, leaves=leaves, rows=batch.rows, counted=counted)
        losses = population.losses(prediction, batch.labels)
        means = dict(zip(losses, (torch.stack(list(losses.values())) * batch.share).sum(-1), strict=True))
        return {**means, "total": population.total(means)}

    @staticmethod
    def _kept(batch: Batch) -> Batch:
        """What a recorded step reads, each time it is replayed."""
        if not isinstance(batch.like, int):  # another batch of this kind brings its own features
            batch = replace(batch, features=batch.features.clone(), labels=batch.labels.clone())
        return replace(batch, rows=batch.rows.clone(), share=batch.share.clone())
