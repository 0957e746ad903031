"""Explainers: evidence of every instance for every class, positive where it supports, negative where it refutes.

n instances, k classes, h heads.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from carmil.bags.bags import Bags
from carmil.errors import CarmilError, unknown
from carmil.evidence.path import path_evidence
from carmil.models.contract import AttendingModel, BagModel
from carmil.models.pooling import Offsets, bag_softmax

Explain = Callable[[BagModel, Tensor, Offsets], Tensor]


@dataclass(frozen=True)
class Explainer:
    """A way to explain, and what its numbers mean. `cost` is counted in forward passes."""

    explain: Explain
    description: str
    class_conditional: bool
    signed: bool
    cost: str


def _attention(model: BagModel, features: Tensor, offsets: Offsets) -> Tensor:
    """The scores u before the softmax: a map a class if the heads are the classes'. Several other heads are one map, which
    is the same for every class: log mean_h softmax(u_h), the logarithm of the weight that an instance has in their mean."""
    with torch.no_grad():
        u = model(features, offsets).scores
    if u is None:
        raise CarmilError(f"{type(model).__name__} does not attend: there is no attention to show")
    if getattr(model, "heads_are_classes", False):
        return u
    if u.shape[-1] > 1:
        u = bag_softmax(u, offsets).mean(-1, keepdim=True).clamp_min(torch.finfo(u.dtype).tiny).log()
    return u.expand(-1, model.classes).contiguous()


def _path(model: BagModel, features: Tensor, offsets: Offsets) -> Tensor:
    if not isinstance(model, AttendingModel) or not model.softmax_pooling:
        raise CarmilError(f"path evidence needs attention pooling, which {type(model).__name__} does not have")
    return path_evidence(model, features, offsets)


def _patch_scores(model: BagModel, features: Tensor, offsets: Offsets) -> Tensor:
    """What each instance says by itself, class by class."""
    with torch.no_grad():
        logits = model(features, offsets).instance_logits
    if logits is None:
        raise CarmilError(f"{type(model).__name__} has no scores of single instances")
    return logits


def _rollout(model: BagModel, features: Tensor, offsets: Offsets) -> Tensor:
    """Attention rolled out over the layers of a transformer; the same for every class."""
    rolled_out = getattr(getattr(model, "model", model), "rollout", None)
    if rolled_out is None:
        raise CarmilError(f"{type(model).__name__} has no layers of self-attention to roll out")
    with torch.no_grad():
        return rolled_out(features, offsets).expand(-1, model.classes).contiguous()


def _single(model: BagModel, features: Tensor, offsets: Offsets) -> Tensor:
    """The probability of each class for the bag of this instance alone."""
    with torch.no_grad():
        return model(features, torch.arange(len(features) + 1)).logits.softmax(-1)


def _random(model: BagModel, features: Tensor, offsets: Offsets) -> Tensor:
    """Standard normal numbers, the same at every call: the floor that a map must rise above."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(len(features), model.classes, generator=generator).to(features.device)


def _targeted(model: BagModel, features: Tensor, offsets: Offsets) -> Tensor:
    """delta_c - mean over classes: what the attention must gain for c to win."""
    with torch.no_grad():
        prediction = model(features, offsets)
    cf = prediction.counterfactual
    if cf is None or cf.scores.shape[-2] != model.classes:
        raise CarmilError("targeted evidence needs a model with a targeted branch, such as 'targeted/abmil'")
    maps = cf.scores.mean(-1)
    return maps - maps.mean(-1, keepdim=True)


EXPLAINERS: dict[str, Explainer] = {
    "path": Explainer(
        _path,
        "how much the instance moves the class's logit from what the model ignores to what it attends; sums to that change",
        class_conditional=True,
        signed=True,
        cost="1, and a few gradients of the classifier",
    ),
    "attention": Explainer(
        _attention,
        "the attention score: where the model looks; the same for every class unless each class has a map of its own",
        class_conditional=False,
        signed=False,
        cost="1",
    ),
    "targeted": Explainer(
        _targeted,
        "what attention must gain for the class to win (models with a targeted branch)",
        class_conditional=True,
        signed=True,
        cost="1",
    ),
    "rollout": Explainer(
        _rollout,
        "attention rolled out over the layers (TransMIL); the same for every class",
        class_conditional=False,
        signed=False,
        cost="1",
    ),
    "patch_scores": Explainer(
        _patch_scores,
        "the instance's own class logits (models that have them: additive, mean, max, dsmil)",
        class_conditional=True,
        signed=True,
        cost="1",
    ),
    "single": Explainer(
        _single,
        "the class probability of the bag of this instance alone (Perturbation Single)",
        class_conditional=True,
        signed=False,
        cost="n bags of one instance",
    ),
    "random": Explainer(_random, "chance", class_conditional=True, signed=True, cost="0"),
}


def explain(model: BagModel, bags: Bags, method: str = "path", *, max_instances: int = 2**17) -> Tensor:
    """Evidence (n, k) of every instance of `bags` for every class, by one of EXPLAINERS, on the CPU."""
    explainer = EXPLAINERS.get(method)
    if explainer is None:
        raise CarmilError(unknown("explainer", method, EXPLAINERS))
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    try:
        parts = [
            explainer.explain(model, part.features.to(device).float(), Offsets(part.offsets, device)).cpu()
            for part in bags.parts(max_instances)
        ]
    finally:
        model.train(was_training)
    return torch.cat(parts)
