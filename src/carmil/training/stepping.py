"""One training step of a population, run as it is or, on a GPU, recorded and replayed. r models, b bags, n instances."""

from collections.abc import Hashable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from carmil.models.pooling import Offsets
from carmil.training.population import Population
from carmil.training.stopping import State, at_least_two
from carmil.training.streams import own_stream

MOST_RECORDED = 2000  # steps; the driver keeps some two hundred operations for each


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


@dataclass(frozen=True)
class _Recorded:
    """A step as a CUDA graph: what it reads, and what it leaves behind."""

    graph: torch.cuda.CUDAGraph
    inputs: Batch
    outputs: Tensor


class Stepper:
    """One training step of the population.

    On a GPU a step is some two hundred operations, which take longer to ask for than to compute unless bags and population
    are large. So a step of a kind that comes again is run the first time, recorded the second, and replayed from then on.
    """

    def __init__(self, state: State) -> None:
        self.state = state
        self.terms: list[str] = []  # what a step gives, row by row
        self._recorded: dict[Hashable, _Recorded | Offsets] = {}  # of a kind that was met once, how its bags lie
        self._rows: dict[bytes, Tensor] = {}
        self._models = len(state.rows)
        self._pool: Any = None  # memory that all recorded steps share
        self._full = False  # memory is not enough to record more

    def __call__(self, batch: Batch) -> Tensor:
        """Steps on the batch; each model's losses on it, one of `terms` a row, zero for a model that took no step. (t, r)

        The last term, `steps`, is 1 for a model that took one.
        """
        if self._models != len(self.state.rows):  # models that had stopped were left out
            self._recorded, self._rows, self._pool, self._models = {}, {}, None, len(self.state.rows)
        if batch.like is None or not batch.features.is_cuda or len(self.state.population.model.phases) > 1:
            return self._step(batch)
        like = (batch.like, batch.learners.numpy().tobytes())
        if like not in self._recorded:
            if len(self._recorded) < MOST_RECORDED and not self._full:
                self._recorded[like] = batch.offsets
            return self._step(batch)
        recorded = self._recorded[like]
        if isinstance(recorded, Offsets):
            try:
                recorded = self._recorded[like] = self._record(replace(batch, offsets=recorded))
            except torch.OutOfMemoryError:
                self._recorded, self._pool, self._full = {}, None, True
                return self._step(batch)
        for kept, given in (
            (recorded.inputs.features, batch.features),
            (recorded.inputs.labels, batch.labels),
            (recorded.inputs.rows, batch.rows),
            (recorded.inputs.share, batch.share),
        ):
            if kept.data_ptr() != given.data_ptr():
                kept.copy_(given)
        recorded.graph.replay()
        return recorded.outputs

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

    def _record(self, batch: Batch) -> _Recorded:
        """Recording does not run it: the replay does."""
        if not isinstance(batch.like, int):  # another batch of this kind brings its own features
            batch = replace(batch, features=batch.features.clone(), labels=batch.labels.clone())
        batch = replace(batch, rows=batch.rows.clone(), share=batch.share.clone())
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        # One stream for all: what was used on one is kept for that one, and would be taken anew for another.
        graph, here, side = torch.cuda.CUDAGraph(), torch.cuda.current_stream(), own_stream("recording")
        side.wait_stream(here)
        with torch.cuda.stream(side):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                outputs = self._step(batch)
            except BaseException:
                with suppress(RuntimeError):  # a recording left open would spoil everything after it
                    graph.capture_end()
                raise
            graph.capture_end()
        here.wait_stream(side)
        return _Recorded(graph, batch, outputs)
