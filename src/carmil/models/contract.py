"""What every model promises: three verbs, one pooling, losses that are told apart.

n instances of all bags together, b bags, d features, k classes, h heads (attention maps), m counterfactual maps.
Leading axes, such as that of a population's models, come along everywhere.
"""

from collections.abc import Container
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from carmil.models.pooling import Offsets, bag_softmax, bag_weighted_sum


@dataclass(frozen=True)
class Counterfactual:
    """What the counterfactual maps look at, and what the model would answer: u_cf (..., n, m, h), F(u_cf) (..., b, m, k)."""

    scores: Tensor
    logits: Tensor


@dataclass(frozen=True)
class Prediction:
    """logits F (..., b, k), scores u (..., n, h) before the softmax, instances z (..., n, d), pooled Z (..., b, h, d)."""

    logits: Tensor
    scores: Tensor
    instances: Tensor
    pooled: Tensor
    offsets: Offsets
    counterfactual: Counterfactual | None = None


class BagModel(nn.Module):
    """Bags in, class logits out:  z = embed(x),  u = attend(z),  Z = sum_j softmax(u)_j z_j,  F = classify(Z)."""

    classes: int
    coefficients: dict[str, float] = {"cls": 1.0}  # noqa: RUF012  how much each of `losses` counts, unless a study says otherwise

    def embed(self, features: Tensor, offsets: Offsets) -> Tensor:
        """x (..., n, in) -> z (..., n, d)."""
        raise NotImplementedError

    def attend(self, instances: Tensor, offsets: Offsets) -> Tensor:
        """z (..., n, d) -> u (..., n, h), before the softmax."""
        raise NotImplementedError

    def classify(self, pooled: Tensor) -> Tensor:
        """Z (..., b, h, d) -> F (..., b, k)."""
        raise NotImplementedError

    def forward(self, features: Tensor, offsets: Offsets | Tensor) -> Prediction:
        offsets = Offsets.of(offsets, features.device)
        z = self.embed(features, offsets)
        u = self.attend(z, offsets)
        Z = bag_weighted_sum(bag_softmax(u, offsets), z, offsets)
        return Prediction(logits=self.classify(Z), scores=u, instances=z, pooled=Z, offsets=offsets)

    def losses(self, prediction: Prediction, labels: Tensor, terms: Container[str]) -> dict[str, Tensor]:
        """The terms of the loss that are asked for, for each bag, (..., b). `cls`, which validation judges by, is always there."""
        return {"cls": cross_entropy(prediction.logits, labels)}


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """-log softmax(logits)_y. logits (..., b, k), labels (b) or (..., b) -> (..., b)."""
    labels = labels.expand(logits.shape[:-1]).unsqueeze(-1)
    return -torch.log_softmax(logits, dim=-1).gather(-1, labels).squeeze(-1)
