"""Counterfactual branches: a second attention in front of the same classifier.

Names have the form branch/model: `car/abmil` is ABMIL with CAR's branch. Every `AttendingModel` can carry every branch; the
model defines how maps become logits.

n instances, b bags, k classes, h heads, m counterfactual maps.
"""

from collections.abc import Container, Mapping
from typing import Any

import torch
from torch import Tensor

from carmil.counterfactual.objective import (
    DEFAULT_DISTANCE,
    WEIGHTS,
    checked_weights,
    cosine_distance,
    evidence_differential_loss,
    l1_distance,
    relative_distance,
)
from carmil.errors import CarmilError, unknown
from carmil.models import registry
from carmil.models.contract import Ability, AttendingModel, BagModel, Counterfactual, Prediction
from carmil.models.layers import INITS, Linear, xavier
from carmil.models.noise import Noisy
from carmil.models.pooling import Offsets
from carmil.models.wrapper import Wrapper
from carmil.targets.links import Link, Softmax

_DISTANCES = {"l1": l1_distance, "cosine": cosine_distance, "relative": relative_distance}


class Branch(Noisy):
    """The source of m counterfactual maps, and of their loss terms."""

    learned = True
    abilities = Ability.NONE  # abilities that the branch adds to those of a model
    needs_classes = False  # whether the target must be classes

    def forward(self, model: AttendingModel, z: Tensor, trunk: Tensor, u: Tensor, offsets: Offsets) -> Tensor:
        """Compute the maps: z (..., n, d), the attention's trunk (..., n, t), u (..., n, h) -> u_cf (..., n, m, h)."""
        raise NotImplementedError

    def projections(self, score: Linear) -> tuple[Tensor, Tensor] | None:
        """Return weight (..., m h, t) and bias (..., m h) if all maps are linear in the trunk.

        score: the projection from the trunk to the model's own scores.
        """
        return None

    def losses(
        self, model: AttendingModel, prediction: Prediction, labels: Tensor, terms: Container[str]
    ) -> dict[str, Tensor]:
        raise NotImplementedError

    @staticmethod
    def coefficients(alpha: float, lambda_: float, distance: str) -> dict[str, float]:
        """Return the weights of the terms of `losses` for an alpha, a lambda and a distance."""
        raise NotImplementedError


class CAR(Branch):
    """The paper's branch: one map, close to the factual one but leading to another prediction.

    `shared`: u_cf_j = w_cf . trunk(z_j), one more projection. `full`: a separate second attention module.
    """

    abilities = Ability.COUNTERFACTUAL_MAP

    def __init__(self, model: AttendingModel, *, branch: str | None = None) -> None:
        super().__init__()
        branch = branch or model.default_branch
        if branch not in ("shared", "full"):
            raise CarmilError(f"unknown kind of branch {branch!r}: expected 'shared' or 'full'")
        self.full = branch == "full"
        self.attention = model.second_attention() if self.full else Linear(model.trunk_size, model.heads)

    def forward(self, model: AttendingModel, z: Tensor, trunk: Tensor, u: Tensor, offsets: Offsets) -> Tensor:
        scores = model.attend_with(self.attention, z, trunk, offsets) if self.full else self.attention(trunk)
        return scores.unsqueeze(-2)

    def projections(self, score: Linear) -> tuple[Tensor, Tensor] | None:
        if self.full:
            return None
        assert isinstance(self.attention, Linear) and self.attention.bias is not None
        return self.attention.weight, self.attention.bias

    def losses(
        self, model: AttendingModel, prediction: Prediction, labels: Tensor, terms: Container[str]
    ) -> dict[str, Tensor]:
        u, cf = _counterfactual(prediction)
        losses = {"diff": evidence_differential_loss(prediction.logits, cf.logits, labels, model.bag_loss)}
        for name, distance in _DISTANCES.items():
            if name in terms:
                factual = model.compared_scores(u.unsqueeze(-2), prediction.logits, prediction.offsets).squeeze(-2)
                counterfactual = model.compared_scores(cf.scores, prediction.logits, prediction.offsets)
                losses[name] = distance(factual, counterfactual, prediction.offsets)
        return losses

    @staticmethod
    def coefficients(
        alpha: float | None = None, lambda_: float | None = None, distance: str = "l1"
    ) -> dict[str, float]:
        usual = WEIGHTS.get(distance, WEIGHTS["l1"])
        alpha, lambda_ = usual[0] if alpha is None else alpha, usual[1] if lambda_ is None else lambda_
        checked_weights(alpha, lambda_, distance)
        return {"diff": alpha, **{name: lambda_ * (name == distance) for name in _DISTANCES}}


class Targeted(Branch):
    """One map per class: the smallest change of the attention with which the shared classifier predicts that class.

    u^(c) = u + delta_c,  delta_c,j = w_c . trunk(z_j)
    L = CE(F(u), y) + alpha mean_c CE(F(u^(c)), c) + lambda mean |delta|
    """

    abilities = Ability.TARGET_MAPS
    needs_classes = True

    def __init__(self, model: AttendingModel) -> None:
        super().__init__()
        self.heads, self.classes = model.heads, model.classes
        self.delta = Linear(model.trunk_size, self.classes * self.heads)

    def forward(self, model: AttendingModel, z: Tensor, trunk: Tensor, u: Tensor, offsets: Offsets) -> Tensor:
        return u.unsqueeze(-2) + self.delta(trunk).unflatten(-1, (self.classes, self.heads))

    def projections(self, score: Linear) -> tuple[Tensor, Tensor] | None:
        if score.bias is None or self.delta.bias is None:
            return None
        weight = self.delta.weight + torch.cat([score.weight] * self.classes, dim=-2)
        return weight, self.delta.bias + torch.cat([score.bias] * self.classes, dim=-1)

    def losses(
        self, model: AttendingModel, prediction: Prediction, labels: Tensor, terms: Container[str]
    ) -> dict[str, Tensor]:
        u, cf = _counterfactual(prediction)
        wanted = torch.arange(self.classes, device=labels.device)
        return {
            "target": model.bag_loss(cf.logits, wanted).mean(-1),
            "change": l1_distance(u, cf.scores, prediction.offsets),
        }

    @staticmethod
    def coefficients(alpha: float = 0.05, lambda_: float = 0.1, distance: str = "l1") -> dict[str, float]:
        checked_weights(alpha, lambda_, distance)
        if distance != "l1":
            raise CarmilError(f"a targeted branch measures its change by l1: expected this distance, not {distance}")
        return {"target": alpha, "change": lambda_}


class CIA(Branch):
    """No learned branch: in training, the factual attention must outperform a random one, drawn at every step."""

    learned = False

    def __init__(self, model: AttendingModel) -> None:
        super().__init__()

    def forward(self, model: AttendingModel, z: Tensor, trunk: Tensor, u: Tensor, offsets: Offsets) -> Tensor:
        return model.attend_at_random(trunk, u, offsets, self.draw).unsqueeze(-2)

    def losses(
        self, model: AttendingModel, prediction: Prediction, labels: Tensor, terms: Container[str]
    ) -> dict[str, Tensor]:
        _, cf = _counterfactual(prediction)
        return {"diff": evidence_differential_loss(prediction.logits, cf.logits, labels, model.bag_loss)}

    @staticmethod
    def coefficients(alpha: float = 0.2, lambda_: float = 0.0, distance: str = "l1") -> dict[str, float]:
        checked_weights(alpha, lambda_, distance)
        return {"diff": alpha}


class CounterfactualModel(Wrapper):
    """A model with a counterfactual branch. Encoder, classifier and pooling belong to the model and are shared by all maps."""

    model: AttendingModel

    def __init__(self, model: AttendingModel, branch: Branch) -> None:
        super().__init__(model)
        self.branch = branch
        self.abilities = model.abilities | branch.abilities
        # If the model weights its bag loss, the terms of the branch have the same weight.
        scale = model.coefficients["cls"]
        own = branch.coefficients()  # type: ignore[call-arg]
        self.coefficients = {**model.coefficients, **{term: scale * value for term, value in own.items()}}

    def forward(self, features: Tensor, offsets: Offsets | Tensor) -> Prediction:
        makes_maps = self.branch.learned or self.training
        return self.model(features, offsets, branch=self.branch if makes_maps else None)

    def losses(self, prediction: Prediction, labels: Tensor, terms: Container[str]) -> dict[str, Tensor]:
        own = self.model.losses(prediction, labels, terms)
        if prediction.counterfactual is None:
            return own
        return {**own, **self.branch.losses(self.model, prediction, labels, terms)}


BRANCHES: dict[str, tuple[type[Branch], str]] = {
    "car": (CAR, "a learned attention close to the factual one that leads to another prediction (the paper)"),
    "targeted": (Targeted, "for every class, the smallest change of attention that makes the model predict it"),
    "cia": (CIA, "the attention must outperform a random one (CIA-MIL)"),
}


def create_model(
    name: str,
    in_features: int = 1024,
    classes: int = 2,
    *,
    init: str = "own",
    link: Link | None = None,
    **options: Any,
) -> BagModel:
    """Build a new model by name: `abmil`, or with a branch in front, `car/abmil`.

    classes: the number of outputs. link: that of a target (`carmil.targets`), by default that of classes.

    `options` are those of the model's class; `branch='shared'` or `'full'` selects the kind of CAR's branch. `init`:
    `own` for the model's own initial weights, `xavier` for Xavier-normal weights with zero biases. A branch does not
    change the initial weights of the model.
    """
    if init not in INITS:
        raise CarmilError(unknown("init", init, INITS))
    begin = xavier if init == "xavier" else lambda model: None
    prefix, slash, rest = name.rpartition("/")
    if not slash:
        plain = registry.create(name, in_features, classes, link=link, **options)
        begin(plain)
        return plain
    if prefix not in BRANCHES:
        raise CarmilError(f"{name!r}: {unknown('branch', prefix, BRANCHES)}")
    branch_options = {"branch": options.pop("branch")} if "branch" in options and prefix == "car" else {}
    with registry.seed_lock:
        model = registry.create(rest, in_features, classes, link=link, **options)
        begin(model)
        if not isinstance(model, AttendingModel):
            raise CarmilError(f"{name!r}: {rest} does not support counterfactual branches; {_carriers()} do")
        if BRANCHES[prefix][0].needs_classes and not isinstance(model.link, Softmax):
            raise CarmilError(f"{name!r} predicts classes only, as it has a map for each of them: use 'car/{rest}'")
        branch = BRANCHES[prefix][0](model, **branch_options)
        begin(branch)
        return CounterfactualModel(model, branch)


def list_models() -> dict[str, str]:
    """Return every name that `create_model` accepts, with a short description."""
    entries = registry.registered_models()
    branched = {
        f"{prefix}/{name}": about
        for prefix, (_, about) in BRANCHES.items()
        for name, entry in entries.items()
        if entry.carries_branch
    }
    return {**{name: entry.description for name, entry in entries.items()}, **branched}


def study_coefficients(
    name: str, given: Mapping[str, float | str | None]
) -> tuple[dict[str, float], dict[str, float | str]]:
    """Return the weights of a study's loss terms, and the alpha, lambda_ and distance from which they are computed.

    CAR's distance is `relative` by default: the scales of the paper's l1 and cosine differ between cohorts.
    """
    weights = {option: value for option, value in given.items() if value is not None}
    if name.startswith("car/"):
        distance = str(weights.get("distance", DEFAULT_DISTANCE))
        alpha, lambda_ = WEIGHTS.get(distance, WEIGHTS["l1"])
        weights = {"alpha": alpha, "lambda_": lambda_, "distance": distance, **weights}
    if weights and "/" not in name:
        raise CarmilError(f"{name!r} has no counterfactual branch for {', '.join(weights)}: try 'car/{name}'")
    return branch_coefficients(name, **weights) if weights else {}, weights


def branch_coefficients(name: str, **given: Any) -> dict[str, float]:
    """Return the weights of a named model's loss terms for the given alpha, lambda_ and distance."""
    prefix, _, rest = name.rpartition("/")
    if not prefix:
        return {}
    branch: Any = BRANCHES[prefix][0]
    scale = registry.registered_models()[rest].build.coefficients["cls"]
    return {term: scale * value for term, value in branch.coefficients(**given).items()}


def _carriers() -> str:
    return ", ".join(name for name, entry in registry.registered_models().items() if entry.carries_branch)


def _counterfactual(prediction: Prediction) -> tuple[Tensor, Counterfactual]:
    if prediction.counterfactual is None or prediction.scores is None:
        raise ValueError("this prediction has no counterfactual maps: expected a model with a counterfactual branch")
    return prediction.scores, prediction.counterfactual
