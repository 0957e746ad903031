"""Predictions without some instances, from stored features, by the models that were tested on the case.

If z_j and u_j of an instance do not depend on its bag, they are computed once and cached; the remaining instances are
pooled again:

    Z' = sum over remaining j of softmax(u)_j z_j,    F' = classify(Z')

Other models run again on the reduced bag. n instances, d features, h heads, m counterfactual maps, k classes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from carmil.errors import CarmilError
from carmil.models.contract import Ability, BagModel, Prediction
from carmil.models.pooling import Offsets
from carmil.viewer.cases import RunCases
from carmil.viewer.limits import BoundedCache

KEPT = 2**29  # bytes of cached z and u


@dataclass(frozen=True, eq=False)
class Answer:
    """Predictions (p) of the factual attention and, if the model has one, of the counterfactual; means over the models."""

    factual: list[float]
    counterfactual: list[float] | None


@dataclass(frozen=True, eq=False)
class _CachedInstances:
    """Cached instances that do not depend on their bag: z (n, d), maps u and u_cf (n, 1+m, h)."""

    model: BagModel
    instances: Tensor
    maps: Tensor

    def without(self, kept: Tensor) -> Tensor:
        """Return the logits (1+m, k) of the instances in the mask `kept` (n)."""
        weights = self.maps.masked_fill(~kept[:, None, None], float("-inf")).softmax(0)
        return self.model.classify(torch.einsum("nmh,nd->mhd", weights, self.instances))


@dataclass(frozen=True, eq=False)
class _ReducedBag:
    """A model that must run again on the reduced bag."""

    model: BagModel
    features: Tensor

    def without(self, kept: Tensor) -> Tensor:
        return _logits(_predict(self.model, self.features[kept]))


class WhatIf:
    """Predictions without some instances. The data of recent cases is cached up to KEPT bytes."""

    def __init__(self, run: RunCases, *, share: float = 1.0) -> None:
        self.run = run
        self._cache: BoundedCache[list[_CachedInstances | _ReducedBag]] = BoundedCache(int(KEPT * share), _bytes)

    @torch.no_grad()
    def prepare(self, number: int) -> list[_CachedInstances | _ReducedBag]:
        """Compute and cache the data that makes later answers fast."""
        members_ready = self._cache.get(number)
        if members_ready is None:
            members = self.run.members(number)
            features = self.run.bag(number).features.to(next(members[0].parameters()))
            members_ready = [_prepare(model, features) for model in members]
            self._cache.put(number, members_ready)
        return members_ready

    def stands_alone(self, number: int) -> bool:
        """Return whether no instance depends on its bag, so that every answer is fast."""
        return all(isinstance(ready, _CachedInstances) for ready in self.prepare(number))

    @torch.no_grad()
    def answer(self, number: int, removed: Sequence[int]) -> Answer:
        kept = torch.ones(self.run.size(number), dtype=torch.bool)
        kept[torch.tensor(removed, dtype=torch.long)] = False
        if not kept.any():
            raise CarmilError(f"all {len(kept)} instances would be removed: keep at least one")
        each = [ready.model.link.predictions(ready.without(kept).double()) for ready in self.prepare(number)]
        p = torch.stack(each).mean(0)
        learned = Ability.COUNTERFACTUAL_MAP in self.run.model.abilities
        return Answer(p[0].tolist(), p[1].tolist() if learned else None)


def highest(values: Tensor, share: float) -> list[int]:
    """Return the `share` of the instances with the highest values of a map, at least one; for signed maps, the most supporting."""
    count = max(1, int(share * len(values)))
    return sorted(values.nan_to_num().argsort(descending=True, stable=True)[:count].tolist())


def inside(points: NDArray[np.float64], polygon: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return the indices of the points (n, 2) inside a polygon (p, 2), by the even-odd rule."""
    x, y = points.T
    enclosed = np.zeros(len(points), dtype=bool)
    for (x0, y0), (x1, y1) in zip(polygon, np.roll(polygon, -1, axis=0), strict=True):
        if y0 != y1:
            crosses = (y0 > y) != (y1 > y)
            enclosed ^= crosses & (x < x0 + (y - y0) / (y1 - y0) * (x1 - x0))
    return np.flatnonzero(enclosed)


def _prepare(model: BagModel, features: Tensor) -> _CachedInstances | _ReducedBag:
    if Ability.POOLS_BY_ATTENTION | Ability.INSTANCE_WISE not in model.abilities:
        return _ReducedBag(model, features)
    prediction = _predict(model, features)
    assert prediction.instances is not None
    return _CachedInstances(model, prediction.instances, _maps(prediction))


def _predict(model: BagModel, features: Tensor) -> Prediction:
    return model(features, Offsets(torch.tensor([0, len(features)])))


def _logits(prediction: Prediction) -> Tensor:
    """Return the logits of the factual and of every counterfactual map of a single bag, (1+m, k)."""
    factual = prediction.logits[0].unsqueeze(0)
    return factual if prediction.counterfactual is None else torch.cat([factual, prediction.counterfactual.logits[0]])


def _maps(prediction: Prediction) -> Tensor:
    assert prediction.scores is not None
    factual = prediction.scores.unsqueeze(1)
    return (
        factual if prediction.counterfactual is None else torch.cat([factual, prediction.counterfactual.scores], dim=1)
    )


def _bytes(ready: list[_CachedInstances | _ReducedBag]) -> int:
    tensors = [[item.features] if isinstance(item, _ReducedBag) else [item.instances, item.maps] for item in ready]
    return sum(tensor.numel() * tensor.element_size() for each in tensors for tensor in each)
