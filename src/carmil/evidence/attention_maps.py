"""Attention maps: factual, counterfactual, their difference, targeted, and rollout.

n instances, k outputs, such as classes, h heads, m counterfactual maps.
"""

import torch
from torch import Tensor

from carmil.models.contract import Ability, BagModel, Prediction
from carmil.models.pooling import Offsets, bag_softmax


def attention(model: BagModel, features: Tensor, offsets: Offsets) -> Tensor:
    """Return the attention scores u, (n, k): those of each class if it has a map, otherwise `scores_by_class`."""
    u = _predict(model, features, offsets).scores
    assert u is not None
    return scores_by_class(model, u, offsets)


def counterfactual_attention(model: BagModel, features: Tensor, offsets: Offsets) -> Tensor:
    """Return the attention scores u_cf of CAR's branch, (n, k), in the same layout as the factual scores."""
    _, u_cf = _two_maps(model, features, offsets)
    return scores_by_class(model, u_cf, offsets)


def factual_minus_counterfactual(model: BagModel, features: Tensor, offsets: Offsets) -> Tensor:
    """Return a_j - a_cf_j, (n, k), averaged over heads that are not classes.

    It is positive where the factual attention is higher, negative where the counterfactual attention is. It compares
    weights, not scores: a softmax ignores a constant, so the sign of u - u_cf has no meaning.
    """
    u, u_cf = _two_maps(model, features, offsets)
    difference = attention_weights(model, u, offsets) - attention_weights(model, u_cf, offsets)
    if Ability.MAP_PER_CLASS in model.abilities:
        return difference
    return _for_every_class(model, difference.mean(-1, keepdim=True))


def targeted(model: BagModel, features: Tensor, offsets: Offsets) -> Tensor:
    """Return delta_c - mean over classes, (n, k): the change of attention that would make class c the prediction."""
    cf = _predict(model, features, offsets).counterfactual
    assert cf is not None
    maps = cf.scores.mean(-1)
    return maps - maps.mean(-1, keepdim=True)


@torch.no_grad()
def rollout(model: BagModel, features: Tensor, offsets: Offsets) -> Tensor:
    """Return attention rolled out over the layers of a transformer, (n, k); equal for all classes."""
    return _for_every_class(model, model.rollout(features, offsets))


def attention_weights(model: BagModel, scores: Tensor, offsets: Offsets) -> Tensor:
    """Return the attention weights a of scores u (..., n, h): their softmax, unless the model's scores are weights already."""
    return scores if Ability.SCORES_ARE_WEIGHTS in model.abilities else bag_softmax(scores, offsets)


def scores_by_class(model: BagModel, u: Tensor, offsets: Offsets) -> Tensor:
    """Return scores of all heads as one map per class: (n, h) -> (n, k).

    Several heads that are not classes become one map: log mean_h softmax(u_h), the logarithm of an instance's mean
    weight.
    """
    if Ability.MAP_PER_CLASS in model.abilities:
        return u
    if u.shape[-1] > 1:
        u = bag_softmax(u, offsets).mean(-1, keepdim=True).clamp_min(torch.finfo(u.dtype).tiny).log()
    return _for_every_class(model, u)


def _predict(model: BagModel, features: Tensor, offsets: Offsets) -> Prediction:
    with torch.no_grad():
        return model(features, offsets)


def _two_maps(model: BagModel, features: Tensor, offsets: Offsets) -> tuple[Tensor, Tensor]:
    """Return u and u_cf, (n, h) both."""
    prediction = _predict(model, features, offsets)
    assert prediction.scores is not None and prediction.counterfactual is not None
    return prediction.scores, prediction.counterfactual.scores.squeeze(-2)


def _for_every_class(model: BagModel, column: Tensor) -> Tensor:
    return column.expand(-1, model.classes).contiguous()
