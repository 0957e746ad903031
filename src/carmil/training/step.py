"""One training step of a population; on a GPU recorded as a CUDA graph and replayed. r models, b bags, n instances."""

from collections.abc import Hashable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from carmil.models.pooling import Offsets
from carmil.recording import Recorder, Recording
from carmil.training.early_stopping import TrainingState, at_least_two
from carmil.training.population import Population

MOST_RECORDED = (
    2000  # recorded steps; the driver stores about two hundred operations for each, for TransMIL about a thousand
)


@dataclass(frozen=True)
class Batch:
    """Some bags on the device; `rows` (n) are the positions of their instances in the cohort.

    share (r, b): the weight of each bag for each model, 0 if the model does not train on it or it has no loss of its own.
    counted (r, b) bool: the bags that each model trains on, none if all of these have the share 0.
    learners (r), on the CPU: the models with a share in some bag of the batch.
    graph_key: batches with equal keys can share a recorded step; None: recording would not pay off.
    """

    features: Tensor
    labels: Tensor
    offsets: Offsets
    rows: Tensor
    share: Tensor
    counted: Tensor
    learners: Tensor
    graph_key: Hashable = None


class Stepper:
    """Runs steps of the population on batches; on a GPU, recurring steps are recorded and replayed."""

    def __init__(self, state: TrainingState) -> None:
        self.state = state
        self.terms: list[str] = []  # names of the rows that a step returns
        self._begin()

    def _begin(self) -> None:
        """Reset the recorded steps for the models that are now in the population."""
        self._population = self.state.population
        # By graph key: offsets of each step that ran once; then the recorded step and its input batch.
        self._steps: dict[Hashable, Offsets | tuple[Batch, Recording, list[str]]] = {}
        self._rows: dict[bytes, Tensor] = {}
        self._recorder = Recorder()

    def __call__(self, batch: Batch) -> Tensor:
        """Take a step on the batch. Return each model's losses on it, one row per term, zero for models without a
        step: (t, r).

        The last term, `steps`, is 1 for a model that took one.
        """
        if self._population is not self.state.population:  # stopped models were removed
            self._begin()
        if batch.graph_key is None or not batch.features.is_cuda or self._recorder.full:
            return self._step(batch)
        key = (batch.graph_key, batch.learners.numpy().tobytes(), self._population.pass_key)
        known = self._steps.get(key)
        if known is None:
            if len(self._steps) < MOST_RECORDED:
                self._steps[key] = batch.offsets
            return self._step(batch)
        if isinstance(known, Offsets):
            fixed = self._fix(replace(batch, offsets=known))
            self._on_device(
                at_least_two(self.state.running & batch.learners)
            )  # models may have stopped since the batch was made
            recorded = self._recorder.record(lambda: self._step(fixed))
            if recorded is None:
                self._steps = {}  # frees memory for another attempt
                return self._step(batch)
            known = self._steps[key] = fixed, recorded, self.terms
        fixed, recorded, self.terms = known
        for name in ("features", "labels", "rows", "share", "counted"):
            target, source = getattr(fixed, name), getattr(batch, name)
            if target.data_ptr() != source.data_ptr():
                target.copy_(source)
        return recorded()

    def _step(self, batch: Batch) -> Tensor:
        state, population = self.state, self.state.population
        active = state.active & (batch.share.sum(-1) > 0)
        on = active.to(batch.share.dtype)
        stepping = state.running & batch.learners
        if bool(stepping.all()):
            means, gradients = self._differentiate(population, batch)
            state.optimizer.step(population.weights, gradients, active)
            losses = torch.stack(list(means.values()))
        else:  # models that take no step, for another fold's bag or because they stopped, are left out
            indices = at_least_two(stepping)
            rows = self._on_device(indices)
            some = population.subset(rows, indices=indices.tolist())
            means, gradients = self._differentiate(
                some, replace(batch, share=batch.share[rows], counted=batch.counted[rows])
            )
            population.buffers[rows] = some.buffers
            state.optimizer.step(population.weights, gradients, active, rows)
            losses = on.new_zeros(len(means), len(on)).index_copy_(1, rows, torch.stack(list(means.values())))
        population.noise.steps += active.long()
        self.terms = [*means, "steps"]
        return torch.cat([torch.where(active, losses, 0.0), on.unsqueeze(0)])

    def _on_device(self, rows: Tensor) -> Tensor:
        """Return rows on the population's device; they are sent once, since nothing can be sent while a step is recorded."""
        key = rows.numpy().tobytes()
        if key not in self._rows:
            self._rows[key] = rows.to(self.state.population.device)
        return self._rows[key]

    @classmethod
    def _differentiate(cls, population: Population, batch: Batch) -> tuple[dict[str, Tensor], list[Tensor]]:
        """Return losses and gradients.

        These are each model's mean losses (r) on its bags of the batch, and the gradients of their total, one per
        parameter.
        """
        leaves = population.leaves()
        means = cls.means(population, batch, leaves)
        gradients = torch.autograd.grad(means["total"].sum(), leaves, allow_unused=True, materialize_grads=True)
        return {name: value.detach() for name, value in means.items()}, [gradient.flatten(1) for gradient in gradients]

    @staticmethod
    def means(population: Population, batch: Batch, leaves: list[Tensor]) -> dict[str, Tensor]:
        """Return each model's mean loss terms (r) on its bags of the batch, and their `total`, as functions of its leaves."""
        prediction = population(batch.features, batch.offsets, leaves=leaves, rows=batch.rows, counted=batch.counted)
        losses = population.losses(prediction, batch.labels, batch.counted)
        means = dict(zip(losses, (torch.stack(list(losses.values())) * batch.share).sum(-1), strict=True))
        return {**means, "total": population.total(means)}

    @staticmethod
    def _fix(batch: Batch) -> Batch:
        """Return a batch of fixed tensors, which a recorded step reads each time it is replayed."""
        if not isinstance(batch.graph_key, int):  # the next batch with this key has other features
            batch = replace(batch, features=batch.features.clone(), labels=batch.labels.clone())
        return replace(batch, rows=batch.rows.clone(), share=batch.share.clone(), counted=batch.counted.clone())
