"""The contract of a model: bags in, outputs F out; it declares further functions as its abilities.

A model that pools by attention has three verbs, embed, attend and classify, with the shared pooling between the last
two. Others (the mean, DSMIL's critical instance, TransMIL's class token) implement and declare fewer.

F has one column per class or, for other targets, per output (`carmil.targets`); `link` turns F into a loss and
predictions.

n instances of all bags together, b bags, d features, k outputs, h heads (attention maps), m counterfactual maps.
Leading axes, such as that of a population's models, are carried through everywhere.
"""

from collections.abc import Callable, Container, Hashable, Mapping
from dataclasses import dataclass, field
from enum import Flag, auto
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from carmil.errors import CarmilError
from carmil.models.layers import Linear
from carmil.models.pooling import Offsets, bag_softmax, bag_weighted_sum
from carmil.targets.links import Link, Softmax

Draw = Callable[[tuple[int, int], Tensor], Tensor]


class Ability(Flag):
    """The abilities of a model besides computing logits. An explainer names the abilities that it needs; a wrapper has
    those of its model.
    """

    NONE = 0
    GRADIENTS = auto()  # F can be differentiated with respect to the features
    SMALL_BAGS = auto()  # a bag of one or a few instances has a valid prediction
    ATTENDS = auto()  # `Prediction.scores` holds attention scores u
    SCORES_ARE_WEIGHTS = auto()  # these are attention weights already: no softmax follows
    MAP_PER_CLASS = auto()  # attention map c belongs to class c
    POOLS_BY_ATTENTION = auto()  # F = classify(sum_j softmax(u)_j z_j), with the verbs embed, attend and classify
    INSTANCE_WISE = auto()  # z_j and u_j depend on instance j alone, not on the rest of its bag
    LRP = auto()  # classify is made of linear layers, ReLUs and layer norms, for which the relevance rules hold
    INSTANCE_LOGITS = auto()  # `Prediction.instance_logits` holds class logits of each instance
    ROLLOUT = auto()  # `rollout` follows the attention through the layers of a transformer
    COUNTERFACTUAL_MAP = auto()  # one learned counterfactual map u_cf
    TARGET_MAPS = auto()  # one learned counterfactual map per class


@dataclass(frozen=True)
class Counterfactual:
    """Scores of the counterfactual maps and their logits: u_cf (..., n, m, h), F(u_cf) (..., b, m, k)."""

    scores: Tensor
    logits: Tensor


@dataclass(frozen=True)
class Prediction:
    """The output of a model; None where it has no such output.

    logits F (..., b, k)                    scores u (..., n, h): attention before the softmax
    instances z (..., n, d)                 pooled Z (..., b, h, d)
    weights (..., n, h): attention after masking and softmax, as used for pooling
    instance_logits (..., n, k): class logits of each instance by itself
    extras: further tensors for the method's own losses
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
class PooledMaps:
    """Maps u and u_cf (..., n, 1+m, h), the factual map first; weights (..., n, (1+m) h) and pooled (..., b, (1+m) h, d)."""

    maps: Tensor
    weights: Tensor
    pooled: Tensor
    instance_logits: Tensor | None = None


class BagModel(nn.Module):
    """Base class of models: bags in, outputs F out, one per class or other output of the target.

    `embed`, `attend` and `classify` are needed for POOLS_BY_ATTENTION, `rollout` for ROLLOUT.
    """

    classes: int  # the number of outputs k
    link: Link
    heads: int = 1  # attention maps
    abilities: Ability = Ability.GRADIENTS | Ability.SMALL_BAGS
    # The default weight of each term of `losses`.
    coefficients: dict[str, float] = {"cls": 1.0}  # noqa: RUF012
    # Passes over the bags in one epoch. Nearly all methods have one.
    phases: tuple[str, ...] = ("train",)
    permutation_invariant: bool = True
    inert_parameters: tuple[str, ...] = ()  # name endings of parameters that the output does not depend on
    # The share of a bag's label that is spread over all classes during training; set by the recipe.
    label_smoothing: float = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.link = Softmax()

    def forward(self, features: Tensor, offsets: Offsets | Tensor) -> Prediction:
        raise NotImplementedError

    @classmethod
    def needs_classes(cls, options: Mapping[str, Any]) -> str:
        """Return the name of the part of the method that, with these options, works for classes only; "" if there is
        none.
        """
        return ""

    def embed(self, features: Tensor, offsets: Offsets) -> Tensor:
        """Embed instances: x (..., n, in) -> z (..., n, d)."""
        raise NotImplementedError

    def attend(self, instances: Tensor, offsets: Offsets) -> Tensor:
        """Compute attention scores: z (..., n, d) -> u (..., n, h), before the softmax."""
        raise NotImplementedError

    def classify(self, pooled: Tensor) -> Tensor:
        """Compute logits: Z (..., b, h, d) -> F (..., b, k)."""
        raise NotImplementedError

    def rollout(self, features: Tensor, offsets: Offsets | Tensor) -> Tensor:
        """Roll attention out over all layers, x (..., n, in) -> (..., n, 1)."""
        raise NotImplementedError

    def input_layers(self) -> tuple[Linear, ...]:
        """Return the linear layers that read the features, if no other layer does: feature scaling is folded into them."""
        return ()

    def reference(self, features: Tensor) -> Tensor:
        """Return the baseline instance (d) of gradients and coalitions: zeros, or the mean training instance of scaled features."""
        return features.new_zeros(features.shape[-1])

    def bag_loss(self, logits: Tensor, labels: Tensor, smoothing: float = 0.0) -> Tensor:
        """Return the loss of each bag, (..., b, k) -> (..., b), for training, the branches and validation alike."""
        return self.link.loss(logits, labels, smoothing)

    def losses(self, prediction: Prediction, labels: Tensor, terms: Container[str]) -> dict[str, Tensor]:
        """Return the requested terms of the training loss, for each bag, (..., b)."""
        return {"cls": self.bag_loss(prediction.logits, labels, self.label_smoothing if self.training else 0.0)}

    def begin(self, phase: str, epoch: int) -> Hashable:
        """Prepare for a pass; called before each training pass, and with phase "validation" before validation.

        Passes of a phase that return equal keys may share a CUDA graph: nothing but tensors may differ between them.
        """
        return None

    @property
    def method(self) -> str:
        """Return the class name of the method, without wrappers."""
        return type(self).__name__

    def require(self, needed: Ability, purpose: str) -> None:
        """Refuse a purpose that needs abilities which this model does not declare."""
        missing = [str(ability.name).lower().replace("_", " ") for ability in needed & ~self.abilities]
        if missing:
            raise CarmilError(
                f"{purpose} needs a model that declares {' and '.join(repr(name) for name in missing)}; {self.method} does not"
            )


class CounterfactualAttention(Protocol):
    """The interface of a counterfactual branch to an attending model: it computes maps u_cf (..., n, m, h)."""

    def __call__(self, model: "AttendingModel", z: Tensor, trunk: Tensor, u: Tensor, offsets: Offsets) -> Tensor: ...

    def projections(self, score: Linear) -> tuple[Tensor, Tensor] | None:
        """Return weight (..., m h, t) and bias (..., m h) if all maps are linear in the trunk, like the model's own `score`."""
        ...


class AttendingModel(BagModel):
    """Base class of models with attention: z = embed(x),  u = attend(z),  Z = sum_j softmax(u)_j z_j,  F = classify(Z).

    Attention consists of a trunk (features computed for the attention) and a score that is computed from the trunk,
    so that a counterfactual branch can compute another score from the same trunk, or be a separate attention beside
    it.
    """

    abilities = BagModel.abilities | Ability.ATTENDS | Ability.POOLS_BY_ATTENTION | Ability.LRP
    trunk_size: int
    default_branch: str = "shared"  # default kind of CAR's branch: "shared" or "full"

    def trunk(self, instances: Tensor, offsets: Offsets) -> Tensor:
        """Compute the trunk: z (..., n, d) -> (..., n, trunk_size)."""
        raise NotImplementedError

    def score(self, trunk: Tensor, instances: Tensor, offsets: Offsets) -> Tensor:
        """Compute scores: the trunk and z -> u (..., n, h), before the softmax."""
        raise NotImplementedError

    def attend(self, instances: Tensor, offsets: Offsets) -> Tensor:
        return self.score(self.trunk(instances, offsets), instances, offsets)

    def second_attention(self) -> nn.Module:
        """Return a new attention module for a full counterfactual branch, to be used by `attend_with`."""
        raise NotImplementedError

    def attend_with(self, attention: nn.Module, instances: Tensor, trunk: Tensor, offsets: Offsets) -> Tensor:
        """Compute u_cf (..., n, h) with a module from `second_attention`; `trunk` is that of the factual attention."""
        raise NotImplementedError

    def mask_scores(self, scores: Tensor, offsets: Offsets) -> Tensor:
        """Return the scores (..., n, h), with -inf at instances that the method masks in training."""
        return scores

    def instance_logits(self, trunk: Tensor) -> Tensor | None:
        """Return class logits of each instance, (..., n, k), if the trunk contains them."""
        return None

    def attend_at_random(self, trunk: Tensor, u: Tensor, offsets: Offsets, draw: Draw) -> Tensor:
        """Draw random scores (..., n, h), independent of the bag: uniform by default."""
        return draw((u.shape[-2], u.shape[-1]), u)

    def compared_scores(self, scores: Tensor, logits: Tensor, offsets: Offsets) -> Tensor:
        """Return the part of the scores (..., n, m, h) that distances between maps are computed from: by default all of it."""
        return scores

    def forward(
        self, features: Tensor, offsets: Offsets | Tensor, branch: CounterfactualAttention | None = None
    ) -> Prediction:
        offsets = Offsets.of(offsets, features.device)
        z = self.embed(features, offsets)
        pooled = self.attend_and_pool(z, offsets, branch)
        # Every map is classified like a separate bag.
        Z = pooled.pooled.unflatten(-2, pooled.maps.shape[-2:])
        F = self.classify(Z.flatten(-4, -3)).unflatten(-2, (offsets.bags, pooled.maps.shape[-2]))
        return Prediction(
            logits=F[..., 0, :],
            offsets=offsets,
            scores=pooled.maps[..., 0, :],
            instances=z,
            pooled=Z[..., 0, :, :],
            weights=pooled.weights[..., : pooled.maps.shape[-1]],
            instance_logits=pooled.instance_logits,
            counterfactual=Counterfactual(pooled.maps[..., 1:, :], F[..., 1:, :]) if branch is not None else None,
        )

    def attend_and_pool(
        self, instances: Tensor, offsets: Offsets, branch: CounterfactualAttention | None
    ) -> PooledMaps:
        """Return the scores of all maps, their softmax, and the pools, with one product for all maps."""
        z = instances
        trunk = self.trunk(z, offsets)
        u = self.score(trunk, z, offsets)
        maps, scores = u.unsqueeze(-2), self.mask_scores(u, offsets)
        if branch is not None:
            u_cf = branch(self, z, trunk, u, offsets)
            u_cf = u_cf.expand(*u.shape[:-1], *u_cf.shape[-2:])
            maps = torch.cat([maps, u_cf], dim=-2)
            scores = torch.cat([scores, u_cf.flatten(-2)], dim=-1)
        weights = bag_softmax(scores, offsets)
        return PooledMaps(maps, weights, bag_weighted_sum(weights, z, offsets), self.instance_logits(trunk))


def one_hot(labels: Tensor, classes: int) -> Tensor:
    """Encode labels (b) as (b, k), 1 in the column of the label."""
    return (labels.unsqueeze(-1) == torch.arange(classes, device=labels.device)).float()
