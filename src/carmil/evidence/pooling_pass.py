"""One forward pass of a model with attention pooling, and the shares of the instances in the projection of its pool
onto a direction.

    a = softmax(u),  Z = sum_j a_j z_j,  F = classify(Z)

n instances, b bags, d features, h heads, k outputs, such as classes, m counterfactual maps. Only the model's three verbs are used.
"""

import copy
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from carmil.models.contract import Ability, BagModel
from carmil.models.pooling import Offsets, bag_project, bag_softmax, bag_weighted_sum


@dataclass(frozen=True)
class PoolingPass:
    """z (n, d), u and a (n, h), Z (b, h, d), and u_cf (n, m, h) if the model has learned it."""

    model: BagModel
    offsets: Offsets
    instances: Tensor
    scores: Tensor
    attention: Tensor
    pool: Tensor
    counterfactual: Tensor | None

    def pool_by(self, scores: Tensor) -> Tensor:
        """Return sum_j softmax(scores)_j z_j: (n, h) -> (b, h, d)."""
        return bag_weighted_sum(bag_softmax(scores, self.offsets), self.instances, self.offsets)

    def shared(self, direction: Tensor, origin: Tensor) -> Tensor:
        """Return e_cj = sum_h a_jh G_ch . (z_j - origin_h): direction G (b, k, h, d), origin (b, h, d) -> (n, k)."""
        along = bag_project(self.instances, direction.flatten(1, 2), self.offsets).unflatten(1, direction.shape[1:3])
        base = torch.einsum("bkhd,bhd->bkh", direction, origin).index_select(0, self.offsets.bag_of)
        return ((along - base) * self.attention.unsqueeze(1)).sum(-1)


@torch.no_grad()
def pooling_pass(model: BagModel, features: Tensor, offsets: Offsets | Tensor, purpose: str) -> PoolingPass:
    """Run a model that pools by attention; `purpose` is named in the error for a model that does not."""
    model.require(Ability.POOLS_BY_ATTENTION, purpose)
    prediction = model(features, Offsets.of(offsets, features.device))
    cf = prediction.counterfactual
    return PoolingPass(
        model,
        prediction.offsets,
        prediction.instances,
        prediction.scores,
        prediction.weights,
        prediction.pooled,
        None if cf is None else cf.scores,
    )


def in_double(model: BagModel) -> BagModel:
    """Return a copy in double precision, for differences of logits without rounding errors. It is cached until the
    weights change.
    """
    weights = tuple((one.data_ptr(), one._version) for one in (*model.parameters(), *model.buffers()))
    if model not in _DOUBLES or _DOUBLES[model][0] != weights:
        _DOUBLES[model] = weights, copy.deepcopy(model).double()
    return _DOUBLES[model][1].train(model.training)


_DOUBLES: WeakKeyDictionary[BagModel, tuple[tuple[tuple[int, int], ...], BagModel]] = WeakKeyDictionary()


def classifier_gradient(model: BagModel, points: Tensor) -> Tensor:
    """Return dF_c/dZ for every point and class: (p, h, d) -> (p, k, h, d)."""
    with torch.enable_grad():
        points = points.detach().requires_grad_()
        logits = model.classify(points)
        rows = [
            torch.autograd.grad(logits[:, c].sum(), points, retain_graph=c + 1 < model.classes)[0]
            for c in range(model.classes)
        ]
    return torch.stack(rows, dim=1)
