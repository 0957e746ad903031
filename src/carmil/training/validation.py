"""Validation losses, which early stopping compares between epochs. r models, b bags."""

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby

import torch
from torch import Tensor

from carmil.bags.bags import Bags, runs_of
from carmil.recording import Recorder, Recording
from carmil.training.early_stopping import TrainingState, at_least_two
from carmil.training.feeder import DeviceBags, Feeder
from carmil.training.population import Population


@dataclass(frozen=True)
class ValidationPart:
    """Validation bags (positions), few enough for one pass, and the models (r, bool) whose validation bags include
    exactly these. group: the number of these models' group.
    """

    bags: Tensor
    models: Tensor
    group: int


@dataclass(frozen=True)
class _Query:
    """A pass over some bags by the models `rows` of the population (`indices`: the same on the CPU); `group` as in
    ValidationPart.

    counts: 1 for a model that validates on these bags, 0 for one that is only added as a second model
    (`at_least_two`).
    """

    bags: Tensor
    rows: Tensor
    indices: list[int]
    counts: Tensor
    group: int


def validation_parts(bags: Bags, validated: Tensor, pass_size: Callable[[int], int]) -> list[ValidationPart]:
    """Divide the validation bags (r, b) into passes. pass_size: returns the number of instances per pass, given the
    number of models.

    The bags that share a pass depend on the model's own bags only; on a CPU, so do the last bits of the logits.
    """
    parts = []
    for group, row in enumerate(validated.unique(dim=0)):
        models = (validated == row).all(1)
        chosen = row.nonzero().squeeze(-1)
        runs = runs_of(bags.sizes[chosen].tolist(), pass_size(int(models.sum())))
        parts += [ValidationPart(chosen[first:last], models, group) for first, last in runs]
    return parts


class Validator:
    """The mean loss of each running model on its own validation bags, computed in the same way for every method."""

    def __init__(self, state: TrainingState, feeder: Feeder, parts: list[ValidationPart]) -> None:
        self.state, self.feeder, self.parts = state, feeder, parts
        self._records = state.population.device.type == "cuda" and feeder.resident
        self._begin()

    def _begin(self) -> None:
        """Reset the recorded passes for the models that are now in the population."""
        present, device = self.state.rows.cpu(), self.state.population.device
        self._population: Population = self.state.population
        self._queries: list[_Query] = []
        for part in self.parts:
            validating = part.models[present]
            if validating.any():
                rows = at_least_two(validating)
                counts = validating[rows].float().to(device)
                self._queries.append(_Query(part.bags, rows.to(device), rows.tolist(), counts, part.group))
        self._passes: dict[
            Hashable, tuple[DeviceBags, Recording | None]
        ] = {}  # tensors read by a recorded pass must keep their addresses
        self._recorder = Recorder()

    @torch.no_grad()
    def __call__(self) -> Tensor:
        """Return the losses (r) of the models in the population."""
        if self._population is not self.state.population:  # stopped models were removed
            self._begin()
        sums, counts = torch.zeros(2, len(self._population), device=self._population.device)
        for query, outputs in self._comparable():
            losses, count = self._loss_sum(query, outputs)
            sums.index_add_(0, query.rows, losses * query.counts)
            counts.index_add_(0, query.rows, count * query.counts)
        return sums / counts

    def _comparable(self) -> Iterator[tuple[_Query, Tensor]]:
        """Yield the queries with their outputs (r, b, k); those of the same models as one if their loss compares bags."""
        queries = zip(self._queries, self._outputs(), strict=True)
        if not self._population.link.compares_bags:
            yield from queries
            return
        for _, same in groupby(queries, key=lambda pair: pair[0].group):
            parts = [(query, outputs.clone()) for query, outputs in same]  # a recorded pass reuses its memory
            bags = torch.cat([query.bags for query, _ in parts])
            yield replace(parts[0][0], bags=bags), torch.cat([outputs for _, outputs in parts], dim=-2)

    def _outputs(self) -> Iterator[Tensor]:
        """Yield, for each query, the outputs of its models for its bags."""
        if self._records:
            yield from (self._replay((i, self._population.pass_key), query) for i, query in enumerate(self._queries))
        else:
            batches = self.feeder.feed([query.bags for query in self._queries])
            for query, batch in zip(self._queries, batches, strict=True):
                yield self._predict(query, batch)

    def _replay(self, key: Hashable, query: _Query) -> Tensor:
        """Run a pass the first time, record it the second time, then replay it."""
        if key not in self._passes:
            (batch,) = self.feeder.feed([query.bags])
            # Features may be large: they are gathered again each time, and not even a view of them is stored.
            self._passes[key] = replace(batch, features=batch.features.new_empty(0, batch.features.shape[1])), None
            return self._predict(query, batch)
        batch, recorded = self._passes[key]

        def work() -> Tensor:
            return self._predict(query, replace(batch, features=self.feeder.features[batch.rows]))

        if recorded is None:
            recorded = None if self._recorder.full else self._recorder.record(work)
            if recorded is None:
                self._passes = {known: (bags, None) for known, (bags, _) in self._passes.items()}  # frees memory
                return work()
            self._passes[key] = batch, recorded
        return recorded()

    def _predict(self, query: _Query, batch: DeviceBags) -> Tensor:
        population = self._some(query)
        return population(batch.features, batch.offsets).logits

    def _loss_sum(self, query: _Query, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sum of the losses of each model, and the number of bags that have one."""
        population, outcomes = self._some(query), self.feeder.labels[query.bags.to(outputs.device)]
        population.bind()  # a replayed pass binds nothing
        return population.model.bag_loss(outputs, outcomes).sum(-1), population.link.informative(outcomes).sum()

    def _some(self, query: _Query) -> Population:
        whole = len(query.indices) == len(self._population)
        return self._population if whole else self._population.subset(query.rows, indices=query.indices)
