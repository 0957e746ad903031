"""Sensitivity: the derivative of each logit with respect to the attention score of each instance.

    dF_c / du_j = a_j G_c . (z_j - Z)          G_c = dF_c/dZ at Z
                = a_j (s_cj - mu_c)            for a linear classifier (the paper's appendix), s_cj = F_c(z_j), mu_c = F_c(Z)

The scores of an instance in several heads are raised together. The sensitivities of a bag sum to zero, since raising all scores
equally changes nothing. G is a gradient of the classifier alone, so the closed form holds for any classifier.

n instances, b bags, k classes.
"""

import torch
from torch import Tensor

from carmil.evidence.pooling_pass import PoolingPass, classifier_gradient, pooling_pass
from carmil.models.contract import BagModel
from carmil.models.pooling import Offsets


def logit_sensitivity(model: BagModel, features: Tensor, offsets: Offsets | Tensor) -> Tensor:
    """dF_c / du_j, (n, k)."""
    return _sensitivity(pooling_pass(model, features, offsets, "sensitivity"))


def margin_sensitivity(model: BagModel, features: Tensor, offsets: Offsets | Tensor) -> Tensor:
    """d(F_c - F_r) / du_j, (n, k), with r the strongest rival of c: the other class with the largest logit.

    The paper's margin is that of the true class over its most competitive rival; here every class is taken in turn.
    """
    state = pooling_pass(model, features, offsets, "sensitivity")
    sensitivity = _sensitivity(state)
    with torch.no_grad():
        rival = strongest_rival(state.model.classify(state.pool))
    return sensitivity - sensitivity.gather(1, rival.index_select(0, state.offsets.bag_of))


def strongest_rival(logits: Tensor) -> Tensor:
    """For every class, the other class with the largest logit: (b, k) -> (b, k)."""
    first, second = logits.topk(2).indices.unsqueeze(-1).unbind(1)
    return torch.where(torch.arange(logits.shape[1], device=logits.device) == first, second, first)


def _sensitivity(state: PoolingPass) -> Tensor:
    return state.shared(classifier_gradient(state.model, state.pool), state.pool)
