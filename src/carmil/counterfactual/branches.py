"""Counterfactual branches: another attention in front of the same classifier.

A name reads branch/model: `car/abmil` is ABMIL with a counterfactual branch. Whatever has the three verbs and an
attention made of a trunk and a projection can carry any branch.

n instances, b bags, k classes, h heads, m counterfactual maps.
"""

from collections.abc import Callable, Container
from typing import Any

import torch
from torch import Tensor, nn

from carmil.counterfactual.objective import (
    checked_weights,
    cosine_distance,
    evidence_differential_loss,
    l1_distance,
)
from carmil.errors import CarmilError
from carmil.models import registry
from carmil.models.contract import BagModel, Counterfactual, Prediction, cross_entropy
from carmil.models.layers import Linear
from carmil.models.noise import Noisy
from carmil.models.pooling import Offsets, bag_mean, bag_softmax, bag_weighted_sum


class Branch(Noisy):
    """Makes m counterfactual maps next to the factual one, and says what they are trained for."""

    learned = True

    def forward(self, z: Tensor, trunk: Tensor, u: Tensor) -> Tensor:
        """z (..., n, d), the attention's trunk (..., n, t), u (..., n, h) -> u_cf (..., n, m, h)."""
        raise NotImplementedError

    def losses(self, prediction: Prediction, labels: Tensor, terms: Container[str]) -> dict[str, Tensor]:
        raise NotImplementedError

    @staticmethod
    def coefficients(alpha: float, lambda_: float, distance: str) -> dict[str, float]:
        """What alpha, lambda and the distance mean for the terms of `losses`."""
        raise NotImplementedError


class CAR(Branch):
    """The paper's branch: one map, close to the factual one yet leading to another answer.

    `shared`: u_cf_j = w_cf . trunk(z_j), one more projection. `full`: a second attention module of its own.
    """

    def __init__(self, model: BagModel, *, branch: str = "shared") -> None:
        super().__init__()
        attention = _attention(model)
        self.heads = attention.score.weight.shape[0]
        if branch not in ("shared", "full"):
            raise CarmilError(f"unknown kind of branch {branch!r}: expected 'shared' or 'full'")
        self.full = branch == "full"
        self.attention: nn.Module = (
            attention.fresh()
            if self.full
            else Linear(attention.size, self.heads, bias=attention.score.bias is not None)
        )

    def forward(self, z: Tensor, trunk: Tensor, u: Tensor) -> Tensor:
        return self.attention(z if self.full else trunk).unsqueeze(-2)

    def losses(self, prediction: Prediction, labels: Tensor, terms: Container[str]) -> dict[str, Tensor]:
        cf = _made(prediction)
        losses = {"diff": evidence_differential_loss(prediction.logits, cf.logits, labels)}
        for name, distance in (("l1", l1_distance), ("cosine", cosine_distance)):
            if name in terms:
                losses[name] = distance(prediction.scores, cf.scores, prediction.offsets)
        return losses

    @staticmethod
    def coefficients(alpha: float = 0.2, lambda_: float = 1.0, distance: str = "l1") -> dict[str, float]:
        checked_weights(alpha, lambda_, distance)
        return {"diff": alpha, "l1": lambda_ * (distance == "l1"), "cosine": lambda_ * (distance == "cosine")}


class Targeted(Branch):
    """One map a class: the smallest change of the attention that makes the shared classifier answer that class.

    u^(c) = u + delta_c,  delta_c,j = w_c . trunk(z_j)
    L = CE(F(u), y) + alpha mean_c CE(F(u^(c)), c) + lambda mean |delta|
    """

    def __init__(self, model: BagModel) -> None:
        super().__init__()
        attention = _attention(model)
        self.heads, self.classes = attention.score.weight.shape[0], model.classes
        self.delta = Linear(attention.size, self.classes * self.heads)

    def forward(self, z: Tensor, trunk: Tensor, u: Tensor) -> Tensor:
        return u.unsqueeze(-2) + self.delta(trunk).unflatten(-1, (self.classes, self.heads))

    def losses(self, prediction: Prediction, labels: Tensor, terms: Container[str]) -> dict[str, Tensor]:
        cf = _made(prediction)
        wanted = torch.arange(self.classes, device=labels.device)
        change = (cf.scores - prediction.scores.unsqueeze(-2)).abs().mean((-2, -1)).unsqueeze(-1)
        return {
            "target": cross_entropy(cf.logits, wanted).mean(-1),
            "change": bag_mean(change, prediction.offsets).squeeze(-1),
        }

    @staticmethod
    def coefficients(alpha: float = 0.05, lambda_: float = 0.1, distance: str = "l1") -> dict[str, float]:
        checked_weights(alpha, lambda_, distance)
        if distance != "l1":
            raise CarmilError(f"a targeted branch measures its change by l1, not {distance}")
        return {"target": alpha, "change": lambda_}


class CIA(Branch):
    """No learned branch: while training, the factual attention must do better than a random one, drawn anew each step."""

    learned = False

    def __init__(self, model: BagModel) -> None:
        super().__init__()
        _attention(model)

    def forward(self, z: Tensor, trunk: Tensor, u: Tensor) -> Tensor:
        return self.draw((u.shape[-2], u.shape[-1]), u).unsqueeze(-2)

    def losses(self, prediction: Prediction, labels: Tensor, terms: Container[str]) -> dict[str, Tensor]:
        return {"diff": evidence_differential_loss(prediction.logits, _made(prediction).logits, labels)}

    @staticmethod
    def coefficients(alpha: float = 0.2, lambda_: float = 0.0, distance: str = "l1") -> dict[str, float]:
        checked_weights(alpha, lambda_, distance)
        return {"diff": alpha}


class CounterfactualModel(BagModel):
    """A model with a counterfactual branch. Encoder, classifier and pooling are the model's own, shared by all maps."""

    def __init__(self, model: BagModel, branch: Branch) -> None:
        super().__init__()
        self.model = model
        self.branch = branch
        self.classes = model.classes
        self.coefficients = {**model.coefficients, **branch.coefficients()}  # type: ignore[call-arg]

    def embed(self, features: Tensor, offsets: Offsets) -> Tensor:
        return self.model.embed(features, offsets)

    def attend(self, instances: Tensor, offsets: Offsets) -> Tensor:
        return self.model.attend(instances, offsets)

    def classify(self, pooled: Tensor) -> Tensor:
        return self.model.classify(pooled)

    def forward(self, features: Tensor, offsets: Offsets | Tensor) -> Prediction:
        if not (self.branch.learned or self.training):
            return self.model(features, offsets)
        offsets = Offsets.of(offsets, features.device)
        attention = _attention(self.model)
        z = self.embed(features, offsets)
        trunk = attention.trunk(z)
        u = attention.score(trunk)
        u_cf = self.branch(z, trunk, u)
        maps = torch.cat([u.unsqueeze(-2), u_cf.expand(*u.shape[:-1], *u_cf.shape[-2:])], dim=-2)
        # All maps are pooled by one product, and classified as if each were a bag.
        Z = bag_weighted_sum(bag_softmax(maps.flatten(-2), offsets), z, offsets).unflatten(-2, maps.shape[-2:])
        F = self.classify(Z.flatten(-4, -3)).unflatten(-2, (offsets.bags, maps.shape[-2]))
        return Prediction(
            logits=F[..., 0, :],
            scores=u,
            instances=z,
            pooled=Z[..., 0, :, :],
            offsets=offsets,
            counterfactual=Counterfactual(scores=maps[..., 1:, :], logits=F[..., 1:, :]),
        )

    def losses(self, prediction: Prediction, labels: Tensor, terms: Container[str]) -> dict[str, Tensor]:
        own = self.model.losses(prediction, labels, terms)
        if prediction.counterfactual is None:
            return own
        return {**own, **self.branch.losses(prediction, labels, terms)}


BRANCHES: dict[str, tuple[Callable[..., Branch], str]] = {
    "car": (CAR, "a learned attention close to the factual one, yet leading to another answer (the paper)"),
    "targeted": (Targeted, "for every class the smallest change of attention that makes the model answer it"),
    "cia": (CIA, "the attention must beat a random one (CIA-MIL)"),
}


def create_model(name: str, in_features: int = 1024, classes: int = 2, **options: Any) -> BagModel:
    """A fresh model by name: `abmil`, or with a branch in front, `car/abmil`.

    `options` are those of the model's class; `branch='shared'` or `'full'` chooses what CAR's branch is made of.
    """
    prefix, slash, rest = name.rpartition("/")
    if not slash:
        return registry.create(name, in_features, classes, **options)
    if prefix not in BRANCHES:
        raise CarmilError(f"{name!r}: {registry.unknown('branch', prefix, BRANCHES)}")
    branch_options = {"branch": options.pop("branch")} if "branch" in options and prefix == "car" else {}
    model = registry.create(rest, in_features, classes, **options)
    return CounterfactualModel(model, BRANCHES[prefix][0](model, **branch_options))


def list_models() -> dict[str, str]:
    """Every name that `create_model` takes, and what stands behind it in a few words."""
    plain = {name: entry.description for name, entry in registry.entries().items()}
    branched = {f"{prefix}/{name}": about for prefix, (_, about) in BRANCHES.items() for name in plain}
    return {**plain, **branched}


def _attention(model: BagModel) -> Any:
    attention = getattr(model, "attention", None)
    if attention is None:
        raise CarmilError(f"{type(model).__name__} has no attention that a counterfactual branch could stand next to")
    return attention


def _made(prediction: Prediction) -> Counterfactual:
    if prediction.counterfactual is None:
        raise ValueError("this prediction was made without its counterfactual branch")
    return prediction.counterfactual
