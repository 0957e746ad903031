"""Explainers compute the evidence of every instance for every output F: positive if it supports the class (or the
label), negative if it refutes it; for other targets, positive if it raises the output, such as a risk, and negative if
it lowers it.

n instances, b bags, k outputs: classes, labels, or one.
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
from carmil.targets import Classes, Target
from carmil.targets.links import Softmax

Explain = Callable[[BagModel, Tensor, Offsets], Tensor]

ALONE = 512  # bags of one instance per pass; some models arrange each bag as a large square


@dataclass(frozen=True)
class Explainer:
    """A method of explanation, and the meaning of its values. `cost` is counted in forward passes.

    meaning: a description of a value, with {logit} for an output F and {prediction} for F on the scale that users read.
    alike: added if maps are the same for every {output}.   class_conditional: whether every output has its own map.
    needs: abilities that a model must declare.   needs_classes: whether it compares classes with one another.
    total: the sum (b, k) of the evidence of a bag, for methods that define it.
    """

    explain: Explain
    meaning: str
    class_conditional: bool
    signed: bool
    cost: str
    alike: str = ""
    needs: Ability = Ability.NONE
    needs_classes: bool = False
    total: Explain | None = None

    @property
    def kind(self) -> str:
        return f"{'signed' if self.signed else 'unsigned'}, {'a class' if self.class_conditional else 'all classes'}"

    def fits(self, model: BagModel) -> bool:
        return self.needs in model.abilities and not (self.needs_classes and not predicts_classes(model))

    def describe(self, target: Target, output: str = "") -> str:
        """Return the meaning of the map's values, in the target's words, for one output or by default for each."""
        word, unit = target.output_word, target.words.unit
        of_each = {"logit": f"the {word} logit", "prediction": f"the {word} probability"}
        if output:
            of_each = {"logit": f"the logit of {output}", "prediction": f"the probability of {output}"}
        terms = of_each if unit == "logit" else {"logit": f"the {unit}", "prediction": f"the {unit}"}
        alike = f"; {self.alike}" if self.alike and len(target.outputs) != 1 else ""
        return (self.meaning + alike).format(output=word, **terms)

    def unit(self, target: Target) -> str:
        """Return the unit of a value of the map; empty if it has none."""
        if "{logit}" in self.meaning:
            return target.words.unit
        if "{prediction}" in self.meaning:
            return "probability" if target.words.unit == "logit" else target.words.unit
        return ""

    @property
    def description(self) -> str:
        """Return the meaning of the map's values if the target is classes."""
        return self.describe(Classes())


def predicts_classes(model: BagModel) -> bool:
    return isinstance(model.link, Softmax)


def _patch_scores(model: BagModel, features: Tensor, offsets: Offsets) -> Tensor:
    """Return the outputs F of each instance by itself."""
    with torch.no_grad():
        logits = model(features, offsets).instance_logits
    assert logits is not None
    return logits


def _single(model: BagModel, features: Tensor, offsets: Offsets) -> Tensor:
    """Return the prediction for the bag that consists of this instance alone: probabilities of classes or labels, or F itself."""
    parts = [class_logits(model, part, torch.arange(len(part) + 1)) for part in features.split(ALONE)]
    return model.link.per_output(torch.cat(parts))


def _random(model: BagModel, features: Tensor, offsets: Offsets) -> Tensor:
    """Return standard normal numbers, the same at every call: the baseline for other maps."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(len(features), model.classes, generator=generator).to(features)


def _path(reference: str, start: str, needs: Ability = Ability.NONE) -> Explainer:
    return Explainer(
        partial(path_evidence, reference=reference),
        f"contribution to {{logit}}; all add up to its change from {start}",
        class_conditional=True,
        signed=True,
        cost="1, and a few tens of gradients of the classifier",
        needs=Ability.POOLS_BY_ATTENTION | needs,
        total=partial(path_change, reference=reference),
    )


def _coalition(size: int, others: str) -> Explainer:
    return Explainer(
        partial(coalition_evidence, size=size),
        f"what the instance adds to {{logit}}, alone and beside {others} of its bag drawn at random",
        class_conditional=True,
        signed=True,
        cost="1, and some tens of answers of the classifier for every instance; or so many small bags",
        needs=Ability.SMALL_BAGS,
    )


EXPLAINERS: dict[str, Explainer] = {
    "path": _path("reversed", "what is attended least"),
    "path.uniform": _path("uniform", "equal attention"),
    "path.zero": _path("zero", "an empty bag (features 0)"),
    "path.counterfactual": _path(
        "counterfactual", "the counterfactual attention (CAR's branch)", Ability.COUNTERFACTUAL_MAP
    ),
    "coalition": _coalition(2, "another instance"),
    "coalition.4": _coalition(4, "up to three others"),
    "attention": Explainer(
        attention,
        "the attention score: where the model looks",
        class_conditional=False,
        signed=False,
        cost="1",
        alike="the same for every {output} unless each {output} has a map of its own",
        needs=Ability.ATTENDS,
    ),
    "counterfactual_attention": Explainer(
        counterfactual_attention,
        "the counterfactual attention score (CAR's branch): where the model would look to give another answer",
        class_conditional=False,
        signed=False,
        cost="1",
        alike="the same for every {output}, as attention is",
        needs=Ability.COUNTERFACTUAL_MAP,
    ),
    "factual_minus_counterfactual": Explainer(
        factual_minus_counterfactual,
        "attention weight minus counterfactual attention weight (CAR's branch)",
        class_conditional=False,
        signed=True,
        cost="1",
        alike="the same for every {output}, as attention is",
        needs=Ability.COUNTERFACTUAL_MAP,
    ),
    "targeted": Explainer(
        targeted,
        "how attention must change for the class to win (models with a targeted branch)",
        class_conditional=True,
        signed=True,
        cost="1",
        needs=Ability.TARGET_MAPS,
        needs_classes=True,
    ),
    "margin_sensitivity": Explainer(
        margin_sensitivity,
        "how the class's lead over its strongest rival follows the instance's attention score; sums to zero",
        class_conditional=True,
        signed=True,
        cost="1, and k gradients of the classifier",
        needs=Ability.POOLS_BY_ATTENTION,
        needs_classes=True,
    ),
    "leave_one_out": Explainer(
        leave_one_out,
        "how much {logit} drops without the instance; embedding and scores of the others are kept",
        class_conditional=True,
        signed=True,
        cost="1, and n answers of the classifier",
        needs=Ability.POOLS_BY_ATTENTION,
    ),
    "single": Explainer(
        _single,
        "{prediction} for the bag of this instance alone (Perturbation Single)",
        class_conditional=True,
        signed=False,
        cost="n bags of one instance",
        needs=Ability.SMALL_BAGS,
    ),
    "input_x_gradient": Explainer(
        input_x_gradient,
        "the instance's features, counted from the mean training instance (or from zeros), times the gradient of {logit}",
        class_conditional=True,
        signed=True,
        cost="1, with k gradients",
        needs=Ability.GRADIENTS,
    ),
    "integrated_gradients": Explainer(
        integrated_gradients,
        "the features times the mean gradient of {logit} on the way from the mean training instance (zeros where "
        "features are not scaled); sums to its change",
        class_conditional=True,
        signed=True,
        cost="about 40, or hundreds where the path has many kinks; nearly all with k gradients",
        needs=Ability.GRADIENTS,
        total=feature_change,
    ),
    "lrp": Explainer(
        lrp,
        "layer-wise relevance: {logit} propagated back to the instances with attention held fixed; sums to it",
        class_conditional=True,
        signed=True,
        cost="1, and k gradients of the classifier",
        needs=Ability.POOLS_BY_ATTENTION | Ability.LRP,
        total=class_logits,
    ),
    "rollout": Explainer(
        rollout,
        "attention rolled out over the layers (TransMIL)",
        class_conditional=False,
        signed=False,
        cost="1",
        alike="the same for every {output}",
        needs=Ability.ROLLOUT,
    ),
    "patch_scores": Explainer(
        _patch_scores,
        "{logit} of the instance by itself (models that have one: additive, mean, max, dsmil, weno)",
        class_conditional=True,
        signed=True,
        cost="1",
        needs=Ability.INSTANCE_LOGITS,
    ),
    "random": Explainer(_random, "chance", class_conditional=True, signed=True, cost="0"),
}


# In order of preference: the default explainer of a model is the first that the model supports.
DEFAULTS = ("path", "patch_scores", "attention", "single")


def explain(model: BagModel, bags: Bags, method: str = "path", *, max_instances: int = 2**17) -> Tensor:
    """Return the evidence (n, k) of every instance of `bags` for every output, by one of EXPLAINERS, on the CPU."""
    explainer = _explainer(method, model)
    return _over_parts(explainer.explain, model, bags, max_instances)


def explainers_of(model: BagModel) -> list[str]:
    """Return the names in EXPLAINERS whose needs this model meets."""
    return [name for name, explainer in EXPLAINERS.items() if explainer.fits(model)]


def default_explainer(model: BagModel) -> str:
    """Return the first of DEFAULTS whose needs this model meets."""
    return next(name for name in DEFAULTS if EXPLAINERS[name].fits(model))


def check_explainers(methods: Iterable[str]) -> None:
    """Refuse names that are not in EXPLAINERS."""
    for method in methods:
        if method not in EXPLAINERS:
            raise CarmilError(unknown("explainer", method, EXPLAINERS))


def residual(model: BagModel, bags: Bags, method: str = "path", *, max_instances: int = 2**17) -> Tensor:
    """Return the error of evidence that has an expected sum, |sum_j e_cj - total_c| / max(1, |total_c|), (b, k)."""
    explainer = _explainer(method, model)
    if explainer.total is None:
        complete = ", ".join(name for name, other in EXPLAINERS.items() if other.total is not None)
        raise CarmilError(f"{method!r} has no expected sum, so there is no residual; {complete} have one")
    evidence = _over_parts(explainer.explain, model, bags, max_instances)
    total = _over_parts(explainer.total, model, bags, max_instances)
    return relative_residual(evidence, total, Offsets(bags.offsets))


def _explainer(method: str, model: BagModel) -> Explainer:
    check_explainers([method])
    explainer = EXPLAINERS[method]
    model.require(explainer.needs, repr(method))
    if not explainer.fits(model):
        raise CarmilError(f"{method!r} compares classes with one another: this model predicts none")
    return explainer


def _over_parts(explain: Explain, model: BagModel, bags: Bags, max_instances: int) -> Tensor:
    """Return the evidence of all bags, computed for some bags at a time, in the model's own precision."""
    first = next(model.parameters())
    was_training = model.training
    model.eval()
    try:
        parts = [
            # Features are converted on the device, since 16-bit features take fewer bytes to copy.
            explain(model, part.features.to(first.device).to(first), Offsets(part.offsets, first.device)).cpu()
            for part in bags.parts(max_instances)
        ]
    finally:
        model.train(was_training)
    return torch.cat(parts)
