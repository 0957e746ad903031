"""Explain one slide with one or several models: maps as columns, and numbers that describe the slide.

With several models every column is the mean over the models, in the units of the map. Evidence is in the unit of the
outputs (for classes, logits), so that the mean of path evidence sums to the mean change of the models' outputs; a is
the mean of the attention weights, u of the attention scores.

n instances of one bag, k outputs, h heads.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from carmil.bags.bags import Bags
from carmil.evidence.attention_maps import attention_weights, scores_by_class
from carmil.evidence.concentration import concentration_of
from carmil.evidence.counterfactual_change import CounterfactualChange, counterfactual_change
from carmil.evidence.counterfactual_search import search_counterfactual
from carmil.evidence.explainers import EXPLAINERS, explain
from carmil.evidence.path import relative_residual
from carmil.evidence.rank_correlation import pearson, spearman
from carmil.models.contract import Ability, BagModel, Prediction
from carmil.models.pooling import Offsets
from carmil.training.predict import check_finite

CONCENTRATION = ("entropy", "normalised_entropy", "gini", "effective")


@dataclass
class BagEvidence:
    """columns: maps (n) by name; numbers: quantities that can be averaged over models, scalars or (k)."""

    columns: dict[str, Tensor] = field(default_factory=dict)
    numbers: dict[str, Tensor] = field(default_factory=dict)


def explain_bag(
    models: Sequence[BagModel], bag: Bags, methods: Sequence[str], outputs: Sequence[str], *, searched: bool
) -> BagEvidence:
    """Explain one bag with all models together.

    The columns of the first of `methods` are called evidence_OUTPUT, those of the others METHOD_OUTPUT; an output is a
    class, or that of another kind of target.
    """
    each = [_explain_by(model, bag, methods, outputs, searched) for model in models]
    evidence = BagEvidence(
        {name: torch.stack([one.columns[name] for one in each]).mean(0) for name in each[0].columns},
        {name: torch.stack([one.numbers[name] for one in each]).mean(0) for name in each[0].numbers},
    )
    offsets = Offsets(bag.offsets)
    if "u_cf" in evidence.columns:
        u, u_cf = evidence.columns["u"].unsqueeze(-1), evidence.columns["u_cf"].unsqueeze(-1)
        evidence.numbers["spearman"] = spearman(u, u_cf, offsets).squeeze()
        evidence.numbers["pearson"] = pearson(u, u_cf, offsets).squeeze()
    return evidence


def concentration_numbers(found: BagEvidence, bag: Bags, of: str) -> dict[str, Tensor]:
    """Return the concentration of the attention weights, and of the absolute evidence for the output `of`."""
    maps = {"attention": found.columns.get("a"), "evidence": found.columns[f"evidence_{of}"].abs()}
    numbers: dict[str, Tensor] = {}
    for name, weights in maps.items():
        if weights is not None:
            measured = concentration_of(weights.abs().unsqueeze(-1), Offsets(bag.offsets))
            numbers |= {f"{name}_{measure}": getattr(measured, measure).squeeze() for measure in CONCENTRATION}
    return numbers


def _explain_by(
    model: BagModel, bag: Bags, methods: Sequence[str], outputs: Sequence[str], searched: bool
) -> BagEvidence:
    first = next(model.parameters())
    features, offsets = bag.features.to(first), Offsets(bag.offsets, first.device)
    with torch.no_grad():
        prediction = model(features, offsets)
        check_finite(prediction.logits, bag.ids)
        found = BagEvidence(numbers={"p": model.link.predictions(prediction.logits.double())[0].cpu()})
    if prediction.scores is not None:
        found.columns |= _scores_and_weights(model, prediction.scores, offsets, outputs, "")
    if Ability.COUNTERFACTUAL_MAP in model.abilities:
        u_cf = prediction.counterfactual.scores.squeeze(-2)
        found.columns |= _scores_and_weights(model, u_cf, offsets, outputs, "_cf")
        found.numbers |= _counterfactual_numbers(
            model,
            prediction,
            counterfactual_change(prediction, softmax=Ability.SCORES_ARE_WEIGHTS not in model.abilities),
            "counterfactual",
        )
    if searched:
        sought = search_counterfactual(model, features, offsets)
        found.columns |= _scores_and_weights(model, sought.counterfactual.scores[:, 0], offsets, outputs, "_searched")
        found.numbers |= _counterfactual_numbers(
            model, prediction, counterfactual_change(prediction, sought.counterfactual), "searched"
        )
        found.numbers["searched_reached"] = sought.reached[0, 0].double().cpu()
        found.numbers["searched_steps"] = sought.steps[0, 0].double().cpu()
    for i, method in enumerate(methods):
        evidence = explain(model, bag, method)
        name = method if i else "evidence"
        found.columns |= {f"{name}_{of}": evidence[:, c] for c, of in enumerate(outputs)}
    total = EXPLAINERS[methods[0]].total
    if total is not None:
        evidence = torch.stack([found.columns[f"evidence_{of}"] for of in outputs], dim=1)
        off = relative_residual(evidence, total(model, features, offsets).cpu(), Offsets(bag.offsets))
        found.numbers["residual"] = off.max().double()
    return found


def _scores_and_weights(
    model: BagModel, scores: Tensor, offsets: Offsets, outputs: Sequence[str], which: str
) -> dict[str, Tensor]:
    """Return u and a as columns, one per output if every output has its own map. Otherwise several heads become one map."""
    u = scores_by_class(model, scores, offsets)
    a = attention_weights(model, u, offsets)
    if Ability.MAP_PER_CLASS in model.abilities:
        pairs = (("u", u), ("a", a))
        return {f"{name}{which}_{of}": x[:, c].cpu() for name, x in pairs for c, of in enumerate(outputs)}
    return {f"u{which}": u[:, 0].cpu(), f"a{which}": a[:, 0].cpu()}


@torch.no_grad()
def _counterfactual_numbers(
    model: BagModel, seen: Prediction, reading: CounterfactualChange, which: str
) -> dict[str, Tensor]:
    """Return the numbers of a counterfactual with one map. p and the change of the outputs are first averaged over the models."""
    change = reading.logit_change[0, 0].double()
    return {
        f"{which}_p": model.link.predictions((seen.logits[0] + change).unsqueeze(0))[0].cpu(),
        f"{which}_change": change.cpu(),
        f"{which}_distance": reading.distance[0, 0].double().cpu(),
        f"{which}_attention_moved": reading.attention_moved[0, 0].double().cpu(),
        f"{which}_carriers": reading.carriers[0, 0].double().cpu(),
    }
