"""The answer without some instances, from stored features, by the models that were tested on the case.

Where z_j and u_j of an instance do not depend on its bag, they are computed once and kept; the instances left are pooled again:

    Z' = sum over j left of softmax(u)_j z_j,    F' = classify(Z')

Other models see the reduced bag. n instances, d features, h heads, m counterfactual maps, k classes.
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

KEPT = 2**29  # bytes of z and u


@dataclass(frozen=True, eq=False)
class Answer:
    """probabilities (k) of the factual attention, and of the counterfactual one where there is one; means over the models."""

    factual: list[float]
    counterfactual: list[float] | None


@dataclass(frozen=True, eq=False)
class _Standing:
    """Instances that do not depend on their bag: z (n, d), maps u and u_cf (n, 1+m, h)."""

    model: BagModel
    instances: Tensor
    maps: Tensor

    def without(self, kept: Tensor) -> Tensor:
        """Logits (1+m, k) of the instances in the mask `kept` (n)."""
        weights = self.maps.masked_fill(~kept[:, None, None], float("-inf")).softmax(0)
        return self.model.classify(torch.einsum("nmh,nd->mhd", weights, self.instances))


@dataclass(frozen=True, eq=False)
class _InCompany:
    """A model that must see the bag that is left."""

    model: BagModel
    features: Tensor

    def without(self, kept: Tensor) -> Tensor:
        return _logits(_asked(self.model, self.features[kept]))


class WhatIf:
    """Answers without some instances. What the last cases need is kept in memory, as far as it fits."""

    def __init__(self, run: RunCases) -> None:
        self.run = run
        self._kept: BoundedCache[list[_Standing | _InCompany]] = BoundedCache(KEPT, _bytes)

    @torch.no_grad()
    def prepare(self, number: int) -> list[_Standing | _InCompany]:
        """Compute what is needed to answer quickly."""
        found = self._kept.get(number)
        if found is None:
            members = self.run.members(number)
            features = self.run.bag(number).features.to(next(members[0].parameters()))
            found = [_prepared(model, features) for model in members]
            self._kept.put(number, found)
        return found

    def stands_alone(self, number: int) -> bool:
        """Whether no instance depends on its bag, so that any answer is quick."""
        return all(isinstance(ready, _Standing) for ready in self.prepare(number))

    @torch.no_grad()
    def answer(self, number: int, removed: Sequence[int]) -> Answer:
        kept = torch.ones(self.run.size(number), dtype=torch.bool)
        kept[torch.tensor(removed, dtype=torch.long)] = False
        if not kept.any():
            raise CarmilError(f"all {len(kept)} instances would be gone: leave at least one")
        logits = torch.stack([ready.without(kept) for ready in self.prepare(number)])
        p = logits.double().softmax(-1).mean(0)
        learned = Ability.COUNTERFACTUAL_MAP in self.run.model.abilities
        return Answer(p[0].tolist(), p[1].tolist() if learned else None)


def highest(values: Tensor, share: float) -> list[int]:
    """The `share` of the instances with the highest values of a map, at least one; of a signed map the most supporting."""
    count = max(1, int(share * len(values)))
    return sorted(values.nan_to_num().argsort(descending=True, stable=True)[:count].tolist())


def inside(points: NDArray[np.float64], polygon: NDArray[np.float64]) -> NDArray[np.int64]:
    """Which points (n, 2) lie inside a polygon (p, 2), by the even-odd rule."""
    x, y = points.T
    odd = np.zeros(len(points), dtype=bool)
    for (x0, y0), (x1, y1) in zip(polygon, np.roll(polygon, -1, axis=0), strict=True):
        if y0 != y1:
            crosses = (y0 > y) != (y1 > y)
            odd ^= crosses & (x < x0 + (y - y0) / (y1 - y0) * (x1 - x0))
    return np.flatnonzero(odd)


def _prepared(model: BagModel, features: Tensor) -> _Standing | _InCompany:
    if Ability.POOLS_BY_ATTENTION | Ability.INSTANCE_WISE not in model.abilities:
        return _InCompany(model, features)
    whole = _asked(model, features)
    assert whole.instances is not None
    return _Standing(model, whole.instances, _maps(whole))


def _asked(model: BagModel, features: Tensor) -> Prediction:
    return model(features, Offsets(torch.tensor([0, len(features)])))


def _logits(seen: Prediction) -> Tensor:
    """F of the factual and of every counterfactual map, (1+m, k), of a single bag."""
    factual = seen.logits[0].unsqueeze(0)
    return factual if seen.counterfactual is None else torch.cat([factual, seen.counterfactual.logits[0]])


def _maps(seen: Prediction) -> Tensor:
    assert seen.scores is not None
    factual = seen.scores.unsqueeze(1)
    return factual if seen.counterfactual is None else torch.cat([factual, seen.counterfactual.scores], dim=1)


def _bytes(ready: list[_Standing | _InCompany]) -> int:
    tensors = [[one.features] if isinstance(one, _InCompany) else [one.instances, one.maps] for one in ready]
    return sum(tensor.numel() * tensor.element_size() for each in tensors for tensor in each)
