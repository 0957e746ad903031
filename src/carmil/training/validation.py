"""Validation losses, by which epochs are compared. r models, b bags."""

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from carmil.bags.bags import Bags, runs_of
from carmil.recording import Recorder, Recording
from carmil.training.early_stopping import TrainingState, at_least_two
from carmil.training.feeder import DeviceBags, Feeder
from carmil.training.population import Population


@dataclass(frozen=True)
class ValidationPart:
    """Validation bags (positions), few enough for one pass, and the models (r, bool) that validate on exactly these."""

    bags: Tensor
    models: Tensor


@dataclass(frozen=True)
class _Query:
    """A pass over some bags by the models `rows` of the population, in `indices` on the CPU.

    counts: 1 for a model that validates on these bags, 0 for one that is only there as a second model (`at_least_two`).
    """

    bags: Tensor
    rows: Tensor
    indices: list[int]
    counts: Tensor


def validation_parts(bags: Bags, validated: Tensor, pass_size: Callable[[int], int]) -> list[ValidationPart]:
    """Divide the validation bags (r, b) into passes. pass_size: instances per pass for a number of models.

    Which bags share a pass depends on the model's own bags alone, and so, on a CPU, do the last bits of the logits.
    """
    parts = []
    for row in validated.unique(dim=0):
        models = (validated == row).all(1)
        chosen = row.nonzero().squeeze(-1)
        runs = runs_of(bags.sizes[chosen].tolist(), pass_size(int(models.sum())))
        parts += [ValidationPart(chosen[first:last], models) for first, last in runs]
    return parts


class Validator:
    """The mean loss of each running model on its own validation bags; the same measure for every method."""

    def __init__(self, state: TrainingState, feeder: Feeder, parts: list[ValidationPart]) -> None:
        self.state, self.feeder, self.parts = state, feeder, parts
        self._records = state.population.device.type == "cuda" and feeder.resident
        self._begin()

    def _begin(self) -> None:
        """Start afresh with the models that are in the population now."""
        present, device = self.state.rows.cpu(), self.state.population.device
        self._population: Population = self.state.population
        self._queries: list[_Query] = []
        for part in self.parts:
            validating = part.models[present]
            if validating.any():
                rows = at_least_two(validating)
                self._queries.append(
                    _Query(part.bags, rows.to(device), rows.tolist(), validating[rows].float().to(device))
                )
        self._passes: dict[
            Hashable, tuple[DeviceBags, Recording | None]
        ] = {}  # tensors that a recorded pass reads must stay in place
        self._recorder = Recorder()

    @torch.no_grad()
    def __call__(self) -> Tensor:
        """(r) of the models in the population."""
        if self._population is not self.state.population:  # stopped models were dropped
            self._begin()
        sums, counts = torch.zeros(2, len(self._population), device=self._population.device)
        for query, losses in zip(self._queries, self._losses(), strict=True):
            sums.index_add_(0, query.rows, losses * query.counts)
            counts.index_add_(0, query.rows, len(query.bags) * query.counts)
        return sums / counts

    def _losses(self) -> Iterator[Tensor]:
        """For each query, the sum of the losses over its bags."""
        if self._records:
            yield from (self._replay((i, self._population.pass_key), query) for i, query in enumerate(self._queries))
        else:
            batches = self.feeder.feed([query.bags for query in self._queries])
            for query, batch in zip(self._queries, batches, strict=True):
                yield self._loss_sum(query, batch)

    def _replay(self, key: Hashable, query: _Query) -> Tensor:
        """Run a pass the first time, record it the second time, then replay it."""
        if key not in self._passes:
            (batch,) = self.feeder.feed([query.bags])
            # Features may be large: they are gathered again each time, and not even a view of them is kept.
            self._passes[key] = replace(batch, features=batch.features.new_empty(0, batch.features.shape[1])), None
            return self._loss_sum(query, batch)
        batch, recorded = self._passes[key]

        def work() -> Tensor:
            return self._loss_sum(query, replace(batch, features=self.feeder.features[batch.rows]))

        if recorded is None:
            recorded = None if self._recorder.full else self._recorder.record(work)
            if recorded is None:
                self._passes = {known: (bags, None) for known, (bags, _) in self._passes.items()}  # frees memory
                return work()
            self._passes[key] = batch, recorded
        return recorded()

    def _loss_sum(self, query: _Query, batch: DeviceBags) -> Tensor:
        whole = len(query.indices) == len(self._population)
        population = self._population if whole else self._population.subset(query.rows, indices=query.indices)
        logits = population(batch.features, batch.offsets).logits
        return population.model.bag_loss(logits, batch.labels).sum(-1)
