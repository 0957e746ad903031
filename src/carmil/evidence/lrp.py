"""Layer-wise relevance propagation: the class logit, redistributed layer by layer to its inputs.

    linear layer     R_i = sum_k x_i w_ki / (sum_i' x_i' w_ki' + eps) R_k       bias dropped: its share goes to the inputs
    ReLU             R is passed on unchanged
    layer norm       linear: the deviation in its denominator is treated as a constant
    pooling          R_ji = a_j z_ji / Z_i R_i                                 attention is treated as a constant (xMIL's AH rule)

From F_c to the instances, e_cj = sum_i R_ji, as in xMIL (gamma 0, eps 1e-8). Relevance is conserved: sum_j e_cj =
F_c, unless Z is zero. Below z_j the same rules propagate an instance's relevance to its own features, which does not
change its sum; if the embedding mixes instances (RRT), propagation ends at z. Dropping biases has a disadvantage:
with a linear classifier the evidence is scaled by F_c / (F_c - b_c), which flips all signs if the bias alone decides.
Path evidence from zero has the same values, unscaled.

n instances, b bags, d features, h heads, k outputs, such as classes.
"""

import copy

import torch
from torch import Tensor, nn

from carmil.evidence.pooling_pass import classifier_gradient, in_double, pooling_pass
from carmil.models.contract import BagModel
from carmil.models.layers import HeadLinear, LayerNorm, Linear
from carmil.models.pooling import Offsets

EPSILON = 1e-8


def lrp(model: BagModel, features: Tensor, offsets: Offsets | Tensor) -> Tensor:
    """Return the relevance of every instance for every class logit, (n, k)."""
    state = pooling_pass(model, features, offsets, "LRP")
    rules = copy.deepcopy(in_double(state.model))  # hooks must not stay on the cached copy
    for layer in rules.modules():
        if isinstance(layer, Linear | HeadLinear):
            layer.register_forward_hook(_drop_bias)
        elif isinstance(layer, LayerNorm):
            layer.register_forward_hook(_keep_deviation)
    # With these layers, relevance is that of a network without biases: R = Z dF/dZ, and a_j z_j dF/dZ for an instance.
    gradient = classifier_gradient(rules, state.pool.double()).to(state.pool.dtype)
    return state.shared(gradient, torch.zeros_like(state.pool))


def _drop_bias(layer: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
    """Return the layer's output as a multiple of its output without bias; the factor is detached from the input."""
    if layer.bias is None:
        return output
    return _scaled(output - layer.bias, output)  # type: ignore[operator]


def _keep_deviation(layer: LayerNorm, inputs: tuple[Tensor], output: Tensor) -> Tensor:
    """Return the layer's output as a linear function of its input; the factors are detached."""
    centred = inputs[0] - inputs[0].mean(-1, keepdim=True)
    return _scaled(centred, output)


def _scaled(unbiased: Tensor, output: Tensor) -> Tensor:
    """Return the output as a multiple of `unbiased`; the factor is detached from the input."""
    away_from_zero = unbiased + EPSILON * torch.where(unbiased < 0, -1.0, 1.0)
    return unbiased * (output / away_from_zero).detach()
