"""Sensitivity: the derivative of each logit with respect to the attention score of each instance.

    dF_c / du_j = a_j G_c . (z_j - Z)          G_c = dF_c/dZ at Z
                = a_j (s_cj - mu_c)            for a linear classifier (the paper's appendix), s_cj = F_c(z_j), mu_c = F_c(Z)

The derivative is with respect to a common change of the instance's scores in all heads. The sensitivities of a bag
sum to zero, since an equal change of all scores has no effect. G is a gradient of the classifier alone, so the closed
form holds for any classifier.

n instances, b bags, k classes.
"""

import torch
from torch import Tensor

from carmil.evidence.pooling_pass import PoolingPass, classifier_gradient, pooling_pass
from carmil.models.contract import BagModel
from carmil.models.pooling import Offsets


def logit_sensitivity(model: BagModel, features: Tensor, offsets: Offsets | Tensor) -> Tensor:
    """Return dF_c / du_j, (n, k)."""
    return _sensitivity(pooling_pass(model, features, offsets, "sensitivity"))


def margin_sensitivity(model: BagModel, features: Tensor, offsets: Offsets | Tensor) -> Tensor:
    """Return d(F_c - F_r) / du_j, (n, k), with r the strongest rival of c: the other class with the largest logit.

    The paper's margin is that of the true class over its most competitive rival; this function computes it for every
    class.
    """
    state = pooling_pass(model, features, offsets, "sensitivity")
    sensitivity = _sensitivity(state)
    with torch.no_grad():
        rival = strongest_rival(state.model.classify(state.pool))
    return sensitivity - sensitivity.gather(1, rival.index_select(0, state.offsets.bag_of))


def strongest_rival(logits: Tensor) -> Tensor:
    """Return, for every class, the other class with the largest logit: (b, k) -> (b, k)."""
    first, second = logits.topk(2).indices.unsqueeze(-1).unbind(1)
    return torch.where(torch.arange(logits.shape[1], device=logits.device) == first, second, first)


def _sensitivity(state: PoolingPass) -> Tensor:
    return state.shared(classifier_gradient(state.model, state.pool), state.pool)
