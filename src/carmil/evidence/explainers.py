"""Explainers: evidence of every instance for every class, positive where it supports, negative where it refutes.

n instances, k classes, h heads.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from carmil.bags.bags import Bags
from carmil.errors import CarmilError
from carmil.evidence.path import path_evidence
from carmil.models.contract import BagModel
from carmil.models.pooling import Offsets
from carmil.models.registry import unknown

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
    """The scores u before the softmax, averaged over heads; the same for every class."""
    with torch.no_grad():
        u = model.attend(model.embed(features, offsets), offsets)
    return u.mean(-1, keepdim=True).expand(-1, model.classes).contiguous()


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
        path_evidence,
        "how much the instance moves the class's logit from what the model ignores to what it attends; sums to that change",
        class_conditional=True,
        signed=True,
        cost="1, and a few gradients of the classifier",
    ),
    "attention": Explainer(
        _attention,
        "the attention score: where the model looks, the same for every class",
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
}


def explain(model: BagModel, bags: Bags, method: str = "path", *, max_instances: int = 2**17) -> Tensor:
    """Evidence (n, k) of every instance of `bags` for every class, by one of EXPLAINERS, on the CPU."""
    explainer = EXPLAINERS.get(method)
    if explainer is None:
        raise CarmilError(unknown("explainer", method, EXPLAINERS))
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    parts = [
        explainer.explain(model, part.features.to(device).float(), Offsets(part.offsets, device)).cpu()
        for part in bags.parts(max_instances)
    ]
    model.train(was_training)
    return torch.cat(parts)
