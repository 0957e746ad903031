"""Maps of attention: the factual one, the counterfactual one, what parts them, what a class would need, and rollout.

n instances, k classes, h heads, m counterfactual maps.
"""

from contextlib import nullcontext

import torch
from torch import Tensor

from carmil.errors import CarmilError
from carmil.evidence.abilities import bare, has_counterfactual, has_targets, rolls_out
from carmil.models.contract import BagModel, Prediction
from carmil.models.pooling import Offsets, bag_softmax
from carmil.models.scaled import Scaled


def attention(model: BagModel, features: Tensor, offsets: Offsets) -> Tensor:
    """The scores u before the softmax: a map a class if the heads are the classes'. Several other heads are one map, which
    is the same for every class: log mean_h softmax(u_h), the logarithm of the weight that an instance has in their mean."""
    u = _seen(model, features, offsets).scores
    if u is None:
        raise CarmilError(f"{type(model).__name__} does not attend: there is no attention to show")
    return scores_by_class(model, u, offsets)


def counterfactual_attention(model: BagModel, features: Tensor, offsets: Offsets) -> Tensor:
    """The scores u_cf of CAR's branch, shown as the factual ones are."""
    _, u_cf = _two_maps(model, features, offsets)
    return scores_by_class(model, u_cf, offsets)


def factual_minus_counterfactual(model: BagModel, features: Tensor, offsets: Offsets) -> Tensor:
    """a_j - a_cf_j, mean over heads that are not classes: positive where the answer is looked for, negative where another
    one would be. Weights, not scores: a softmax does not see a constant, so the sign of u - u_cf means nothing."""
    u, u_cf = _two_maps(model, features, offsets)
    if getattr(model, "softmax_pooling", True):  # TransMIL's scores are weights already
        u, u_cf = bag_softmax(u, offsets), bag_softmax(u_cf, offsets)
    difference = u - u_cf
    return difference if a_map_a_class(model) else _for_every_class(model, difference.mean(-1, keepdim=True))


def targeted(model: BagModel, features: Tensor, offsets: Offsets) -> Tensor:
    """delta_c - mean over classes: what the attention must gain for c to win."""
    if not has_targets(model):
        raise CarmilError("targeted evidence needs a model with a targeted branch, such as 'targeted/abmil'")
    cf = _seen(model, features, offsets).counterfactual
    assert cf is not None
    maps = cf.scores.mean(-1)
    return maps - maps.mean(-1, keepdim=True)


def rollout(model: BagModel, features: Tensor, offsets: Offsets) -> Tensor:
    """Attention rolled out over the layers of a transformer; the same for every class."""
    if not rolls_out(model):
        raise CarmilError(f"{type(model).__name__} has no layers of self-attention to roll out")
    reading = model.reading(features) if isinstance(model, Scaled) else nullcontext(features)
    with torch.no_grad(), reading as x:
        return _for_every_class(model, bare(model).rollout(x, offsets))  # type: ignore[operator]


def _seen(model: BagModel, features: Tensor, offsets: Offsets) -> Prediction:
    with torch.no_grad():
        return model(features, offsets)


def _two_maps(model: BagModel, features: Tensor, offsets: Offsets) -> tuple[Tensor, Tensor]:
    """u and u_cf, (n, h) both."""
    if not has_counterfactual(model):
        raise CarmilError(
            f"{type(model).__name__} has no counterfactual attention: it takes a model with CAR's branch, such as 'car/abmil'"
        )
    seen = _seen(model, features, offsets)
    assert seen.scores is not None and seen.counterfactual is not None
    return seen.scores, seen.counterfactual.scores.squeeze(-2)


def scores_by_class(model: BagModel, u: Tensor, offsets: Offsets) -> Tensor:
    """Scores of all heads as a map for every class: (n, h) -> (n, k)."""
    if a_map_a_class(model):
        return u
    if u.shape[-1] > 1:
        u = bag_softmax(u, offsets).mean(-1, keepdim=True).clamp_min(torch.finfo(u.dtype).tiny).log()
    return _for_every_class(model, u)


def a_map_a_class(model: BagModel) -> bool:
    """Has every class an attention of its own?"""
    return getattr(model, "heads_are_classes", False)


def _for_every_class(model: BagModel, column: Tensor) -> Tensor:
    return column.expand(-1, model.classes).contiguous()
