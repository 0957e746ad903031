"""CLAM (Lu et al., 2021): attention pooling with a clustering loss on the instances with the largest and smallest
attention scores.

z_j = relu(E x_j),   u_j = w' (tanh(V z_j) * sigmoid(U z_j))              or, not gated, w' tanh(V z_j)
single branch:  F   = W sum_j softmax(u)_j z_j + c
multi-branch:   F_c = w_c . sum_j softmax(u_c)_j z_j + b_c            one map per class
instance loss:  the targets of a binary classifier per class are positive for the B instances with the largest scores in the
                map of the bag's class, and negative for the B with the smallest. L = 0.7 CE(F, y) + 0.3 L_instance

n instances, b bags, d features, k classes, h heads, B instances sampled from each end.
"""

from collections.abc import Container, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from carmil.models.attention import Attention, WithAttention
from carmil.models.contract import Ability, Prediction, one_hot
from carmil.models.layers import HeadLinear, Hidden, Linear
from carmil.models.pooling import Offsets, bag_topk
from carmil.models.registry import register


class CLAM(WithAttention):
    """subtyping: the classes are mutually exclusive, so the top instances are negatives for every other class."""

    coefficients = {"cls": 0.7, "instance": 0.3}  # noqa: RUF012
    abilities = WithAttention.abilities | Ability.INSTANCE_WISE
    inert_parameters = ("score.bias",)

    def __init__(
        self,
        in_features: int,
        classes: int,
        *,
        multi_branch: bool = False,
        gated: bool = True,
        hidden: int = 512,
        attention: int = 256,
        dropout: float = 0.25,
        sampled: int = 8,
        subtyping: bool = False,
    ) -> None:
        super().__init__()
        self.classes, self.sampled, self.subtyping = classes, sampled, subtyping
        self.heads = classes if multi_branch else 1
        if multi_branch:
            self.abilities |= Ability.MAP_PER_CLASS
        self.embedding = Hidden(in_features, hidden, dropout=dropout)
        self.attention = Attention(hidden, attention, gated=gated, heads=self.heads, dropout=dropout)
        self.classifier: nn.Module = HeadLinear(classes, hidden, 1) if multi_branch else Linear(hidden, classes)
        self.instance_classifiers = HeadLinear(classes, hidden, 2)

    @classmethod
    def needs_classes(cls, options: Mapping[str, Any]) -> str:
        return "instance loss"

    def embed(self, features: Tensor, offsets: Offsets) -> Tensor:
        return self.embedding(features)

    def input_layers(self) -> tuple[Linear, ...]:
        return (self.embedding.linear,)

    def classify(self, pooled: Tensor) -> Tensor:
        if Ability.MAP_PER_CLASS in self.abilities:
            return self.classifier(pooled).squeeze(-1)
        return self.classifier(pooled.squeeze(-2))

    def losses(self, prediction: Prediction, labels: Tensor, terms: Container[str]) -> dict[str, Tensor]:
        losses = super().losses(prediction, labels, terms)
        if self.training and "instance" in terms:
            losses["instance"] = self._instance_loss(prediction, labels)
        return losses

    def _instance_loss(self, prediction: Prediction, labels: Tensor) -> Tensor:
        """Return the instance loss of each bag, (..., b)."""
        attended, exists = self._instance_logits(prediction, 1)
        ignored, _ = self._instance_logits(prediction, -1)
        own = one_hot(labels, self.classes)  # (b, k)
        weight = exists / exists.sum(-1, keepdim=True)  # (b, B)
        own_loss = _mean(_binary(attended, 1) + _binary(ignored, 0), weight) / 2
        loss = (own * own_loss).sum(-1)
        if self.subtyping:
            other_loss = _mean(_binary(attended, 0), weight)
            loss = (loss + ((1 - own) * other_loss).sum(-1)) / self.classes
        return loss

    def _instance_logits(self, prediction: Prediction, sign: int) -> tuple[Tensor, Tensor]:
        """Return the logits of each class for the B instances at one end of its map, (..., b, B, k, 2).

        The second value is a mask of the instances that exist, (b, B).
        """
        assert prediction.scores is not None
        assert prediction.instances is not None
        z, offsets = prediction.instances, prediction.offsets
        _, rows = bag_topk(sign * prediction.scores.detach(), offsets, self.sampled)
        rows = rows.expand(*rows.shape[:-1], self.classes)
        index = rows.flatten(-3).unsqueeze(-1)
        sampled = z.gather(-2, index.expand(*index.shape[:-1], z.shape[-1])).unflatten(-2, (-1, self.classes))
        logits = self.instance_classifiers(sampled).unflatten(-3, (offsets.bags, self.sampled))
        exists = torch.arange(self.sampled, device=z.device) < offsets.sizes.unsqueeze(-1)
        return logits, exists.to(z.dtype)


def _binary(logits: Tensor, target: int) -> Tensor:
    """Return the cross-entropy with one target for all. (..., 2) -> (...)."""
    return -logits.log_softmax(-1)[..., target]


def _mean(values: Tensor, weight: Tensor) -> Tensor:
    """Return the weighted mean over the sampled instances: (..., b, B, k), (b, B) -> (..., b, k)."""
    return (values * weight.unsqueeze(-1)).sum(-2)


register("clam.sb", CLAM, "CLAM, one map: gated attention and an instance loss", multi_branch=False)
register("clam.mb", CLAM, "CLAM, one map per class", multi_branch=True)
