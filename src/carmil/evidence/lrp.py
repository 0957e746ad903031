"""Layer-wise relevance propagation: the class logit, handed back layer by layer to what it was made of.

    linear layer     R_i = sum_k x_i w_ki / (sum_i' x_i' w_ki' + eps) R_k       bias dropped: its share goes to the inputs
    ReLU             R passes
    pooling          R_ji = a_j z_ji / Z_i R_i                                 the attention is taken as it is (xMIL's AH rule)

From F_c to the instances, e_cj = sum_i R_ji, as in xMIL (gamma 0, eps 1e-8). It conserves: sum_j e_cj = F_c, as long as Z says
anything at all. Below z_j the same rules hand an instance's relevance to its own features, which changes nothing of the sum;
where the embedding mixes instances (RRT) it ends at z. Mind the price of dropping biases: with a linear classifier instances are
scaled by F_c / (F_c - b_c), which turns all signs over where the bias alone decides. Path evidence from zero is the same unscaled.

n instances, b bags, d features, h heads, k classes.
"""

import torch
from torch import Tensor, nn

from carmil.evidence.pooling_pass import classifier_gradient, in_double, pooling_pass
from carmil.models.contract import BagModel
from carmil.models.layers import HeadLinear, Linear
from carmil.models.pooling import Offsets

EPSILON = 1e-8


def lrp(model: BagModel, features: Tensor, offsets: Offsets | Tensor) -> Tensor:
    """Relevance of every instance for every class logit, (n, k)."""
    seen = pooling_pass(model, features, offsets, "LRP")
    rules = in_double(seen.model)
    for layer in rules.modules():
        if isinstance(layer, Linear | HeadLinear):
            layer.register_forward_hook(_hands_back)
    # With these layers relevance is what it is in a network without biases: R = Z dF/dZ, a_j z_j dF/dZ for an instance.
    gradient = classifier_gradient(rules, seen.pool.double()).to(seen.pool.dtype)
    return seen.shared(gradient, torch.zeros_like(seen.pool))


def _hands_back(layer: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
    """The layer's own output, as a multiple of what it would be without bias: the multiple is no function of the input."""
    if layer.bias is None:
        return output
    unbiased = output - layer.bias  # type: ignore[operator]
    away_from_zero = unbiased + EPSILON * torch.where(unbiased < 0, -1.0, 1.0)
    return unbiased * (output / away_from_zero).detach()
