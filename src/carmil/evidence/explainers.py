"""Explainers: the evidence of every instance for every class, positive where it supports, negative where it refutes.

n instances, b bags, k classes.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from carmil.bags.bags import Bags
from carmil.errors import CarmilError, unknown
from carmil.evidence.attention_maps import (
    attention,
    counterfactual_attention,
    factual_minus_counterfactual,
    rollout,
    targeted,
)
from carmil.evidence.coalition import coalition_evidence
from carmil.evidence.gradients import class_logits, feature_change, input_x_gradient, integrated_gradients
from carmil.evidence.leave_one_out import leave_one_out
from carmil.evidence.lrp import lrp
from carmil.evidence.path import path_change, path_evidence, relative_residual
from carmil.evidence.sensitivity import margin_sensitivity
from carmil.models.contract import Ability, BagModel
from carmil.models.pooling import Offsets

Explain = Callable[[BagModel, Tensor, Offsets], Tensor]

ALONE = 512  # bags of one instance per pass: some models lay out each as a large square


@dataclass(frozen=True)
class Explainer:
    """A way to explain, and what its numbers mean. `cost` is counted in forward passes.

    needs: abilities that a model must declare.   total: what the evidence of a bag sums to, (b, k), where a sum is promised.
    """

    explain: Explain
    description: str
    class_conditional: bool
    signed: bool
    cost: str
    needs: Ability = Ability.NONE
    total: Explain | None = None

    def fits(self, model: BagModel) -> bool:
        return self.needs in model.abilities


def _patch_scores(model: BagModel, features: Tensor, offsets: Offsets) -> Tensor:
    """The class logits of each instance by itself."""
    with torch.no_grad():
        logits = model(features, offsets).instance_logits
    assert logits is not None
    return logits


def _single(model: BagModel, features: Tensor, offsets: Offsets) -> Tensor:
    """The probability of each class for the bag of this instance alone."""
    parts = [class_logits(model, part, torch.arange(len(part) + 1)) for part in features.split(ALONE)]
    return torch.cat(parts).softmax(-1)


def _random(model: BagModel, features: Tensor, offsets: Offsets) -> Tensor:
    """Standard normal numbers, the same at every call: the baseline that a map must beat."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(len(features), model.classes, generator=generator).to(features)


def _path(reference: str, description: str, needs: Ability = Ability.NONE) -> Explainer:
    return Explainer(
        partial(path_evidence, reference=reference),
        f"how much the instance changes the class's logit on the way from {description} to what the model attends; sums to "
        "that change",
        class_conditional=True,
        signed=True,
        cost="1, and a few tens of gradients of the classifier",
        needs=Ability.POOLS_BY_ATTENTION | needs,
        total=partial(path_change, reference=reference),
    )


def _coalition(size: int, others: str) -> Explainer:
    return Explainer(
        partial(coalition_evidence, size=size),
        f"what the instance adds to the class's logit, alone and beside {others} of its bag drawn at random",
        class_conditional=True,
        signed=True,
        cost="1, and some tens of answers of the classifier for every instance; or so many small bags",
        needs=Ability.SMALL_BAGS,
    )


EXPLAINERS: dict[str, Explainer] = {
    "path": _path("reversed", "what the model ignores"),
    "path.uniform": _path("uniform", "the mean instance"),
    "path.zero": _path("zero", "nothing"),
    "path.counterfactual": _path("counterfactual", "what CAR's branch attends", Ability.COUNTERFACTUAL_MAP),
    "coalition": _coalition(2, "another instance"),
    "coalition.4": _coalition(4, "up to three others"),
    "attention": Explainer(
        attention,
        "the attention score: where the model looks; the same for every class unless each class has a map of its own",
        class_conditional=False,
        signed=False,
        cost="1",
        needs=Ability.ATTENDS,
    ),
    "counterfactual_attention": Explainer(
        counterfactual_attention,
        "the counterfactual attention score (CAR's branch): where the model would look to give another answer; the same for "
        "every class, as attention is",
        class_conditional=False,
        signed=False,
        cost="1",
        needs=Ability.COUNTERFACTUAL_MAP,
    ),
    "factual_minus_counterfactual": Explainer(
        factual_minus_counterfactual,
        "attention weight minus counterfactual attention weight (CAR's branch); the same for every class, as attention is",
        class_conditional=False,
        signed=True,
        cost="1",
        needs=Ability.COUNTERFACTUAL_MAP,
    ),
    "targeted": Explainer(
        targeted,
        "how attention must change for the class to win (models with a targeted branch)",
        class_conditional=True,
        signed=True,
        cost="1",
        needs=Ability.TARGET_MAPS,
    ),
    "margin_sensitivity": Explainer(
        margin_sensitivity,
        "how the class's lead over its strongest rival follows the instance's attention score; sums to zero",
        class_conditional=True,
        signed=True,
        cost="1, and k gradients of the classifier",
        needs=Ability.POOLS_BY_ATTENTION,
    ),
    "leave_one_out": Explainer(
        leave_one_out,
        "how much the class's logit drops without the instance; embedding and scores of the others are kept",
        class_conditional=True,
        signed=True,
        cost="1, and n answers of the classifier",
        needs=Ability.POOLS_BY_ATTENTION,
    ),
    "single": Explainer(
        _single,
        "the class probability of the bag of this instance alone (Perturbation Single)",
        class_conditional=True,
        signed=False,
        cost="n bags of one instance",
        needs=Ability.SMALL_BAGS,
    ),
    "input_x_gradient": Explainer(
        input_x_gradient,
        "the instance's features, counted from the mean training instance (or from zeros), times the gradient of the class's logit",
        class_conditional=True,
        signed=True,
        cost="1, with k gradients",
        needs=Ability.GRADIENTS,
    ),
    "integrated_gradients": Explainer(
        integrated_gradients,
        "the features times the mean gradient of the class's logit on the way from the mean training instance (zeros where "
        "features are not scaled); sums to its change",
        class_conditional=True,
        signed=True,
        cost="about 40, or hundreds where the path has many kinks; nearly all with k gradients",
        needs=Ability.GRADIENTS,
        total=feature_change,
    ),
    "lrp": Explainer(
        lrp,
        "layer-wise relevance: the class's logit propagated back to the instances with attention held fixed; sums to the logit",
        class_conditional=True,
        signed=True,
        cost="1, and k gradients of the classifier",
        needs=Ability.POOLS_BY_ATTENTION | Ability.LRP,
        total=class_logits,
    ),
    "rollout": Explainer(
        rollout,
        "attention rolled out over the layers (TransMIL); the same for every class",
        class_conditional=False,
        signed=False,
        cost="1",
        needs=Ability.ROLLOUT,
    ),
    "patch_scores": Explainer(
        _patch_scores,
        "the instance's own class logits (models that have them: additive, mean, max, dsmil, weno)",
        class_conditional=True,
        signed=True,
        cost="1",
        needs=Ability.INSTANCE_LOGITS,
    ),
    "random": Explainer(_random, "chance", class_conditional=True, signed=True, cost="0"),
}


# A model is explained by the first of these that it can answer, unless another one is chosen.
DEFAULTS = ("path", "patch_scores", "attention", "single")


def explain(model: BagModel, bags: Bags, method: str = "path", *, max_instances: int = 2**17) -> Tensor:
    """Evidence (n, k) of every instance of `bags` for every class, by one of EXPLAINERS, on the CPU."""
    explainer = _explainer(method, model)
    return _over_parts(explainer.explain, model, bags, max_instances)


def explainers_of(model: BagModel) -> list[str]:
    """The names in EXPLAINERS whose needs this model declares."""
    return [name for name, explainer in EXPLAINERS.items() if explainer.fits(model)]


def default_explainer(model: BagModel) -> str:
    """The first of DEFAULTS whose needs this model declares."""
    return next(name for name in DEFAULTS if EXPLAINERS[name].fits(model))


def check_explainers(methods: Iterable[str]) -> None:
    """Refuse names that are not in EXPLAINERS."""
    for method in methods:
        if method not in EXPLAINERS:
            raise CarmilError(unknown("explainer", method, EXPLAINERS))


def residual(model: BagModel, bags: Bags, method: str = "path", *, max_instances: int = 2**17) -> Tensor:
    """The error of evidence with a promised sum, |sum_j e_cj - total_c| / max(1, |total_c|), (b, k)."""
    explainer = _explainer(method, model)
    if explainer.total is None:
        complete = ", ".join(name for name, other in EXPLAINERS.items() if other.total is not None)
        raise CarmilError(f"{method!r} has no expected sum, so there is no residual; {complete} have one")
    evidence = _over_parts(explainer.explain, model, bags, max_instances)
    total = _over_parts(explainer.total, model, bags, max_instances)
    return relative_residual(evidence, total, Offsets(bags.offsets))


def _explainer(method: str, model: BagModel) -> Explainer:
    check_explainers([method])
    model.require(EXPLAINERS[method].needs, repr(method))
    return EXPLAINERS[method]


def _over_parts(explain: Explain, model: BagModel, bags: Bags, max_instances: int) -> Tensor:
    """The evidence of all bags, some bags at a time, in the model's own precision."""
    first = next(model.parameters())
    was_training = model.training
    model.eval()
    try:
        parts = [
            # Sent as they are and widened on the device: features of 16 bits take fewer bytes on the way.
            explain(model, part.features.to(first.device).to(first), Offsets(part.offsets, first.device)).cpu()
            for part in bags.parts(max_instances)
        ]
    finally:
        model.train(was_training)
    return torch.cat(parts)
