"""Additive MIL (Javed et al., 2022): the logits of a bag are the sum of its instances' logits.

a = softmax(MLP(x)),   l_j = g(a_j x_j),   F = sum_j l_j

The attention MLP has batch normalisation and LeakyReLU(0.2), g has ReLU. l_jc, the contribution of instance j to
class c, is signed evidence per class without further computation.
"""

import math

import torch
from torch import Tensor, nn

from carmil.models.contract import Ability, BagModel, Prediction
from carmil.models.layers import BatchNorm, Linear
from carmil.models.pooling import Offsets, bag_softmax, bag_sum
from carmil.models.registry import register


class AdditiveMIL(BagModel):
    abilities = BagModel.abilities | Ability.ATTENDS | Ability.INSTANCE_LOGITS
    # The softmax cancels the last bias of the attention, and batch normalisation cancels the biases before it.
    inert_parameters = ("attention.0.bias", "attention.3.bias", "attention.6.bias")

    def __init__(self, in_features: int, classes: int, *, hidden: int = 256) -> None:
        super().__init__()
        self.classes = classes
        self.attention = nn.Sequential(
            Linear(in_features, hidden),
            BatchNorm(hidden),
            nn.LeakyReLU(0.2),
            Linear(hidden, hidden),
            BatchNorm(hidden),
            nn.LeakyReLU(0.2),
            Linear(hidden, 1),
        )
        self.first = Linear(in_features, hidden, bias=False)
        self.first_bias = nn.Parameter(torch.empty(hidden).uniform_(-1, 1) / math.sqrt(in_features))
        self.rest = nn.Sequential(nn.ReLU(), Linear(hidden, hidden), nn.ReLU(), Linear(hidden, classes))

    def input_layers(self) -> tuple[Linear, ...]:
        first = self.attention[0]
        assert isinstance(first, Linear)
        return first, self.first

    def forward(self, features: Tensor, offsets: Offsets | Tensor) -> Prediction:
        offsets = Offsets.of(offsets, features.device)
        u = self.attention(features)
        a = bag_softmax(u, offsets)
        # W (a_j x_j) + b = a_j (W x_j) + b, so all models share one product with the features.
        logits = self.rest(a * self.first(features) + self.first_bias.unsqueeze(-2))
        return Prediction(logits=bag_sum(logits, offsets), offsets=offsets, scores=u, weights=a, instance_logits=logits)


register("additive", AdditiveMIL, "additive MIL: the logits of a bag are the sum of its instances' logits")
