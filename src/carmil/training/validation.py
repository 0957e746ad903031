"""Validation: by what a model's epochs are judged, and when it stops. r models, b bags."""

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
    """Validation bags (positions) of the models (r, bool) that validate on just the same bags: as many as are answered at once."""

    bags: Tensor
    models: Tensor


@dataclass(frozen=True)
class _Asked:
    """Some bags, and who of the population is asked about them: `rows` of it, in `who` where Python can read them. `judging` is
    1 for a model that is judged by them, 0 for one that is asked for company."""

    bags: Tensor
    rows: Tensor
    who: list[int]
    judging: Tensor


def validation_parts(bags: Bags, validated: Tensor, at_once: Callable[[int], int]) -> list[ValidationPart]:
    """validated (r, b) cut so that every bag is answered by those who validate on it. at_once: instances for so many models.

    Which bags are answered together depends on the model's own bags alone: so do, on a CPU, the last bits of the answer.
    """
    parts = []
    for row in validated.unique(dim=0):
        models = (validated == row).all(1)
        chosen = row.nonzero().squeeze(-1)
        runs = runs_of(bags.sizes[chosen].tolist(), at_once(int(models.sum())))
        parts += [ValidationPart(chosen[first:last], models) for first, last in runs]
    return parts


class Validator:
    """The mean cross-entropy of each running model's answers for its own validation bags; the same measure for every method."""

    def __init__(self, state: TrainingState, feeder: Feeder, parts: list[ValidationPart]) -> None:
        self.state, self.feeder, self.parts = state, feeder, parts
        on_gpu = state.population.device.type == "cuda"
        self._comes_again = on_gpu and feeder.resident
        self._begin()

    def _begin(self) -> None:
        """With the models that are in the population now."""
        here, device = self.state.rows.cpu(), self.state.population.device
        self._population: Population = self.state.population
        self._asked: list[_Asked] = []
        for part in self.parts:
            mine = part.models[here]
            if mine.any():
                rows = at_least_two(mine)
                self._asked.append(_Asked(part.bags, rows.to(device), rows.tolist(), mine[rows].float().to(device)))
        self._met: dict[
            Hashable, tuple[DeviceBags, Recording | None]
        ] = {}  # what a recorded pass reads must stay where it is
        self._recorder = Recorder()

    @torch.no_grad()
    def __call__(self) -> Tensor:
        """(r) of the models in the population."""
        if self._population is not self.state.population:  # models that had stopped were left out
            self._begin()
        sums, counts = torch.zeros(2, len(self._population), device=self._population.device)
        for asked, losses in zip(self._asked, self._losses(), strict=True):
            sums.index_add_(0, asked.rows, losses * asked.judging)
            counts.index_add_(0, asked.rows, len(asked.bags) * asked.judging)
        return sums / counts

    def _losses(self) -> Iterator[Tensor]:
        """Part by part, the sum over its bags of the loss of those who are asked."""
        if self._comes_again:
            passing = self._population.passing
            yield from (self._again((i, passing), asked) for i, asked in enumerate(self._asked))
        else:
            feeding = self.feeder.feed([asked.bags for asked in self._asked])
            for asked, fed in zip(self._asked, feeding, strict=True):
                yield self._summed(asked, fed)

    def _again(self, like: Hashable, asked: _Asked) -> Tensor:
        if like not in self._met:
            (fed,) = self.feeder.feed([asked.bags])
            # Features, which may be many, are taken anew each time: not even a view of them is kept.
            self._met[like] = replace(fed, features=fed.features.new_empty(0, fed.features.shape[1])), None
            return self._summed(asked, fed)
        fed, recorded = self._met[like]

        def work() -> Tensor:
            return self._summed(asked, replace(fed, features=self.feeder.features[fed.rows]))

        if recorded is None:
            recorded = None if self._recorder.full else self._recorder.record(work)
            if recorded is None:
                self._met = {one: (kept, None) for one, (kept, _) in self._met.items()}  # gives memory back
                return work()
            self._met[like] = fed, recorded
        return recorded()

    def _summed(self, asked: _Asked, fed: DeviceBags) -> Tensor:
        whole = len(asked.who) == len(self._population)
        population = self._population if whole else self._population.subset(asked.rows, who=asked.who)
        logits = population(fed.features, fed.offsets).logits
        return population.model.bag_loss(logits, fed.labels).sum(-1)
