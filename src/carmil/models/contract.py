"""What every model promises: three verbs, one pooling, losses that are told apart.

n instances of all bags together, b bags, d features, k classes, h heads (attention maps), m counterfactual maps.
Leading axes, such as that of a population's models, come along everywhere.
"""

from collections.abc import Callable, Container, Hashable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from carmil.models.layers import Linear
from carmil.models.pooling import Offsets, bag_softmax, bag_weighted_sum

Draw = Callable[[tuple[int, int], Tensor], Tensor]


@dataclass(frozen=True)
class Counterfactual:
    """What the counterfactual maps look at, and what the model would answer: u_cf (..., n, m, h), F(u_cf) (..., b, m, k)."""

    scores: Tensor
    logits: Tensor


@dataclass(frozen=True)
class Prediction:
    """What a model answers; what it does not have is None.

    logits F (..., b, k)                    scores u (..., n, h): the attention before the softmax
    instances z (..., n, d)                 pooled Z (..., b, h, d)
    weights (..., n, h): the attention after masking and softmax, as it was used
    instance_logits (..., n, k): what each instance says by itself, in the methods that have such scores
    extras: what else a method's own losses need
    """

    logits: Tensor
    offsets: Offsets
    scores: Tensor | None = None
    instances: Tensor | None = None
    pooled: Tensor | None = None
    weights: Tensor | None = None
    instance_logits: Tensor | None = None
    counterfactual: Counterfactual | None = None
    extras: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Seen:
    """maps u and u_cf (..., n, 1+m, h), the factual one first; weights (..., n, (1+m) h) and pooled (..., b, (1+m) h, d)."""

    maps: Tensor
    weights: Tensor
    pooled: Tensor
    instance_logits: Tensor | None = None


class BagModel(nn.Module):
    """Bags in, class logits out."""

    classes: int
    # How much each of `losses` counts, unless a study says otherwise.
    coefficients: dict[str, float] = {"cls": 1.0}  # noqa: RUF012
    # Passes over the bags that make an epoch. Nearly all methods have one.
    phases: tuple[str, ...] = ("train",)
    # How much of a bag's label is spread over all classes while training; a recipe sets it.
    label_smoothing: float = 0.0

    def forward(self, features: Tensor, offsets: Offsets | Tensor) -> Prediction:
        raise NotImplementedError

    def input_layers(self) -> tuple[Linear, ...]:
        """The linear layers that read the features, if nothing else does: they take over the scale of the features."""
        return ()

    def reference(self, features: Tensor) -> Tensor:
        """The instance (d) that stands for nothing, from which gradients and coalitions count: zeros, or where features are
        scaled their mean."""
        return features.new_zeros(features.shape[-1])

    def losses(self, prediction: Prediction, labels: Tensor, terms: Container[str]) -> dict[str, Tensor]:
        """The terms of the loss that are asked for, for each bag, (..., b); when validating, always `cls`, which is judged by."""
        return {"cls": cross_entropy(prediction.logits, labels, self.label_smoothing if self.training else 0.0)}

    def begin(self, phase: str, epoch: int) -> Hashable:
        """Told before every pass of the training, and with phase "validation" before validation. Answers what kind of pass of the
        phase it is: on a GPU steps are recorded and replayed in all passes of a kind, so that nothing but tensors may differ
        between these."""
        return None


class Branch(Protocol):
    """What an attending model needs to know of a counterfactual branch: it makes maps u_cf (..., n, m, h)."""

    def __call__(self, model: "AttendingModel", z: Tensor, trunk: Tensor, u: Tensor, offsets: Offsets) -> Tensor: ...

    def reads(self, score: Linear) -> tuple[Tensor, Tensor] | None:
        """Where all maps are linear in the trunk, as the model's own `score` is: weight (..., m h, t) and bias (..., m h)."""
        ...


class AttendingModel(BagModel):
    """z = embed(x),  u = attend(z),  Z = sum_j softmax(u)_j z_j,  F = classify(Z).

    Attention is made of a trunk (features worth attending by) and a score read from it, so that a counterfactual branch
    can read another score from the same trunk, or stand next to it as an attention of its own.
    """

    heads: int = 1
    heads_are_classes: bool = False  # map c belongs to class c
    softmax_pooling: bool = True  # Z is the sum of softmax(u)_j z_j
    instance_wise: bool = False  # z_j and u_j depend on instance j alone, not on the others of its bag
    trunk_size: int
    own_branch: str = "shared"  # what CAR's branch is made of unless asked: "shared" or "full"

    def embed(self, features: Tensor, offsets: Offsets) -> Tensor:
        """x (..., n, in) -> z (..., n, d)."""
        raise NotImplementedError

    def trunk(self, instances: Tensor, offsets: Offsets) -> Tensor:
        """z (..., n, d) -> (..., n, trunk_size)."""
        raise NotImplementedError

    def score(self, trunk: Tensor, instances: Tensor, offsets: Offsets) -> Tensor:
        """The trunk and z -> u (..., n, h), before the softmax."""
        raise NotImplementedError

    def classify(self, pooled: Tensor) -> Tensor:
        """Z (..., b, h, d) -> F (..., b, k)."""
        raise NotImplementedError

    def attend(self, instances: Tensor, offsets: Offsets) -> Tensor:
        """z (..., n, d) -> u (..., n, h), before the softmax."""
        return self.score(self.trunk(instances, offsets), instances, offsets)

    def second_attention(self) -> nn.Module:
        """A fresh attention for a full counterfactual branch; `attend_with` knows how to use it."""
        raise NotImplementedError

    def attend_with(self, attention: nn.Module, instances: Tensor, trunk: Tensor, offsets: Offsets) -> Tensor:
        """u_cf (..., n, h) by an attention that `second_attention` made; the factual trunk is there to be looked at."""
        raise NotImplementedError

    def masked(self, scores: Tensor, offsets: Offsets) -> Tensor:
        """The scores (..., n, h) with -inf where a method forbids itself to look while training."""
        return scores

    def instance_logits(self, trunk: Tensor) -> Tensor | None:
        """What each instance says by itself, (..., n, k), if the method has it at hand in its trunk."""
        return None

    def attend_at_random(self, trunk: Tensor, u: Tensor, offsets: Offsets, draw: Draw) -> Tensor:
        """Scores that know nothing, (..., n, h): uniform ones, unless the method says otherwise."""
        return draw((u.shape[-2], u.shape[-1]), u)

    def compared(self, scores: Tensor, logits: Tensor, offsets: Offsets) -> Tensor:
        """Which part of the scores (..., n, m, h) a distance between maps compares: all of it, unless the method says otherwise."""
        return scores

    def forward(self, features: Tensor, offsets: Offsets | Tensor, branch: Branch | None = None) -> Prediction:
        offsets = Offsets.of(offsets, features.device)
        z = self.embed(features, offsets)
        seen = self.look(z, offsets, branch)
        # Every map is classified as if it were a bag of its own.
        Z = seen.pooled.unflatten(-2, seen.maps.shape[-2:])
        F = self.classify(Z.flatten(-4, -3)).unflatten(-2, (offsets.bags, seen.maps.shape[-2]))
        return Prediction(
            logits=F[..., 0, :],
            offsets=offsets,
            scores=seen.maps[..., 0, :],
            instances=z,
            pooled=Z[..., 0, :, :],
            weights=seen.weights[..., : seen.maps.shape[-1]],
            instance_logits=seen.instance_logits,
            counterfactual=Counterfactual(seen.maps[..., 1:, :], F[..., 1:, :]) if branch is not None else None,
        )

    def look(self, instances: Tensor, offsets: Offsets, branch: Branch | None) -> Seen:
        """Scores of all maps, their softmax, and what is pooled by it: all maps by one product."""
        z = instances
        trunk = self.trunk(z, offsets)
        u = self.score(trunk, z, offsets)
        maps, looked_at = u.unsqueeze(-2), self.masked(u, offsets)
        if branch is not None:
            u_cf = branch(self, z, trunk, u, offsets)
            u_cf = u_cf.expand(*u.shape[:-1], *u_cf.shape[-2:])
            maps = torch.cat([maps, u_cf], dim=-2)
            looked_at = torch.cat([looked_at, u_cf.flatten(-2)], dim=-1)
        weights = bag_softmax(looked_at, offsets)
        return Seen(maps, weights, bag_weighted_sum(weights, z, offsets), self.instance_logits(trunk))


def cross_entropy(logits: Tensor, labels: Tensor, smoothing: float = 0.0) -> Tensor:
    """-log softmax(logits)_y, a part of y spread over all classes. logits (..., b, k), labels (b) or (..., b) -> (..., b)."""
    labels = labels.expand(logits.shape[:-1]).unsqueeze(-1)
    surprise = -torch.log_softmax(logits, dim=-1)
    loss = surprise.gather(-1, labels).squeeze(-1)
    return loss if smoothing == 0 else (1 - smoothing) * loss + smoothing * surprise.mean(-1)


def one_hot(labels: Tensor, classes: int) -> Tensor:
    """(b) -> (b, k), 1 in the column of the label."""
    return (labels.unsqueeze(-1) == torch.arange(classes, device=labels.device)).float()
