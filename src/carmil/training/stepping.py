"""One training step of a population, run as it is or replayed as a CUDA graph. r models, b bags, n instances."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from carmil.models.pooling import Offsets
from carmil.training.population import Population
from carmil.training.stopping import State, at_least_two


@dataclass(frozen=True)
class Batch:
    """Some bags on the device: `rows` (n) are their instances in the cohort; `share` (r, b) says who trains on which
    bag, and sums to 1 for a model that has one here."""

    features: Tensor
    labels: Tensor
    offsets: Offsets
    rows: Tensor
    share: Tensor


class Stepper:
    """One training step of the population; on a GPU, where bags share one size, replayed as a CUDA graph."""

    def __init__(self, state: State, *, replayed: bool) -> None:
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
        on = active.to(batch.share.dtype)
        if batch.features.is_cuda or bool(active.all()):
            means, gradients = self._differentiated(population, batch)
            state.optimizer.step(population.weights, gradients, active)
            losses = {name: value * on for name, value in means.items()}
        else:  # on a CPU nothing is computed for a model that takes no step: another fold's bag, or stopped
            rows = at_least_two(active)
            some = population.subset(rows)
            means, gradients = self._differentiated(some, replace(batch, share=batch.share[rows]))
            population.buffers[rows] = some.buffers
            state.optimizer.step(population.weights, gradients, active, rows)
            losses = {name: torch.zeros_like(on).index_copy(0, rows, value) * on for name, value in means.items()}
        population.noise.steps += active.long()
        return {**losses, "steps": on}

    @staticmethod
    def _differentiated(population: Population, batch: Batch) -> tuple[dict[str, Tensor], list[Tensor]]:
        """Each model's mean losses (r) on its bags of the batch, and the gradients of their total, one a parameter (r, ...)."""
        leaves = population.leaves()
        counted = batch.share > 0
        prediction = population(batch.features, batch.offsets, leaves=leaves, rows=batch.rows, counted=counted)
        losses = population.losses(prediction, batch.labels)
        means = {name: (value * batch.share).sum(-1) for name, value in losses.items()}
        gradients = torch.autograd.grad(means["total"].sum(), leaves, allow_unused=True, materialize_grads=True)
        return {name: value.detach() for name, value in means.items()}, [gradient.flatten(1) for gradient in gradients]

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

    def __init__(self, state: State) -> None:
        population = state.population
        self._live = [population.weights, population.buffers, population.noise.steps, *state.optimizer.state]
        self._copies = [tensor.detach().clone() for tensor in self._live]

    def restore(self) -> None:
        for tensor, copy in zip(self._live, self._copies, strict=True):
            tensor.data.copy_(copy)
