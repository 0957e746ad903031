"""Agreement of the maps of models with the known truth of the instances, by model, bag and class.

The truth has shape (n) for the second of two classes, or (n, k) for every output: 1 for the class, -1 against it, 0
neither (for a risk, 1 raises it and -1 lowers it); UNKNOWN instances are left out. r models, b bags, n instances, k
outputs; c = 1 or k columns of truth.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from carmil.bags.bags import Bags
from carmil.evidence.agreement import agreement_by_bag
from carmil.evidence.explainers import EXPLAINERS, explain, predicts_classes
from carmil.evidence.localisation import auroc, ndcg
from carmil.models.contract import BagModel
from carmil.models.pooling import Offsets
from carmil.truth import UNKNOWN

MEASURES = {"auprc_plus": "AUPRC+", "auprc_both": "AUPRC±", "auroc": "AUROC", "ndcg": "NDCG"}
AT_ONCE = 2**17  # instances per pass


@dataclass(frozen=True, eq=False)
class MapAgreement:
    """Agreement of the maps of one explainer, with negative evidence scored by one of NEGATIVE_RULES.

    measures: each of MEASURES, (r, b, c); NaN for a bag that has no target instances, or only target instances, among
    those whose truth is known. Like AUPRC±, AUROC is the mean over the positive and the negative instances if both
    exist. The gain of NDCG is the truth + 1, or 1 for a positive instance if no truth is negative.
    """

    explainer: str
    rule: str
    measures: Mapping[str, Tensor]


def agreement(models: Sequence[BagModel], bags: Bags, chosen: Tensor, explainers: Sequence[str]) -> list[MapAgreement]:
    """Return the agreement of the models' maps on the chosen bags (positions, b of them), for each explainer that
    fits the models.

    The list is empty if no truth is known, or if the truth has shape (n) and the models do not predict one of two
    classes. Every map is computed once; attention has one result per negative rule if the truth is signed.
    """
    truth = bags.instance_labels
    two = models[0].classes == 2 and predicts_classes(models[0])
    if truth is None or len(chosen) == 0 or (truth.ndim == 1 and not two):
        return []
    signed = truth.ndim == 2 or bool(((truth < 0) & (truth != UNKNOWN)).any())
    rules = [
        rule for name in explainers if EXPLAINERS[name].fits(models[0]) for rule in _rules(name, models[0], signed)
    ]
    device = next(models[0].parameters()).device
    measurable = torch.tensor([_measurable(bags, place) for place in chosen.tolist()])  # other bags are not explained
    shape = (len(models), len(chosen), 1 if truth.ndim == 1 else truth.shape[1])
    results = [
        MapAgreement(name, rule, {measure: torch.full(shape, torch.nan, dtype=torch.float64) for measure in MEASURES})
        for name, rule, _ in rules
    ]
    if not measurable.any():
        return results
    parts: list[list[dict[str, Tensor]]] = [[] for _ in rules]
    for part in bags.parts(AT_ONCE, chosen[measurable]):
        on_device = part.to(device)  # copied once, for all models and maps
        maps: dict[str, Tensor] = {}
        for values, (name, rule, negatives) in zip(parts, rules, strict=True):
            for needed in {name, negatives} - {*maps}:
                columns = slice(1, 2) if truth.ndim == 1 else slice(None)
                maps[needed] = torch.stack([explain(model, on_device, needed)[:, columns] for model in models])
            refuting = -maps[name] if rule == "mirror" else maps[negatives]
            values.append(_measured(maps[name], refuting, on_device, signed))
    for one, values in zip(results, parts, strict=True):
        for measure, tensor in one.measures.items():
            tensor[:, measurable] = torch.cat([part[measure] for part in values], 1)
    return results


def _measurable(bags: Bags, place: int) -> bool:
    """Return whether some but not all known instances of a bag are positive, or negative, for any class."""
    assert bags.instance_labels is not None
    truth = bags.instance_labels[int(bags.offsets[place]) : int(bags.offsets[place + 1])]
    truth = truth.reshape(len(truth), -1)
    truth = truth[(truth != UNKNOWN).all(-1)]
    counts = torch.stack([(truth > 0).sum(0), (truth < 0).sum(0)])
    return bool(((counts > 0) & (counts < len(truth))).any())


def _rules(name: str, model: BagModel, signed: bool) -> list[tuple[str, str, str]]:
    """List (explainer, negative rule, map that scores negatives); the mirror rule uses the map itself with its sign changed."""
    rules = [(name, "mirror", name)]
    if signed and name == "attention":
        rules.append((name, "self", name))
        if EXPLAINERS["counterfactual_attention"].fits(model):
            rules.append((name, "counterfactual", "counterfactual_attention"))
    return rules


def _measured(supporting: Tensor, refuting: Tensor, bags: Bags, signed: bool) -> dict[str, Tensor]:
    """Return every measure (r, b, c) of maps (r, n, c); every bag has known instances."""
    assert bags.instance_labels is not None
    truth = bags.instance_labels if bags.instance_labels.ndim == 2 else bags.instance_labels.unsqueeze(-1)
    known, offsets = known_instances(truth, bags.offsets)
    supporting, refuting = (side.to(truth.device)[:, known] for side in (supporting, refuting))
    truth = truth[known]
    gains = truth + 1 if signed else (truth > 0).long()
    positive, both = agreement_by_bag(supporting, refuting, truth, offsets)
    _, areas = agreement_by_bag(supporting, refuting, truth, offsets, auroc)
    values = {
        "auprc_plus": positive,
        "auprc_both": both,
        "auroc": areas,
        "ndcg": ndcg(supporting, gains, offsets).where(~both.isnan(), torch.nan),
    }
    return {measure: tensor.double().cpu() for measure, tensor in values.items()}


def known_instances(truth: Tensor, starts: Tensor) -> tuple[Tensor, Offsets]:
    """Return which instances (n) of truth (n) or (n, k) are known, and the offsets of the bags among these.

    `starts` (b+1) are the offsets of all bags; bags without known instances are left out."""
    known = truth != UNKNOWN
    known = known.all(-1) if known.ndim == 2 else known
    before = torch.cat([starts.new_zeros(1), known.long().cumsum(0).cpu()])[starts]
    return known, Offsets(before.unique_consecutive(), truth.device)


def bag_truth(bags: Bags, place: int) -> Tensor:
    """Return the truth (n) of one bag, that of the last class if there are several columns; features are not read."""
    assert bags.instance_labels is not None
    truth = bags.instance_labels[int(bags.offsets[place]) : int(bags.offsets[place + 1])]
    return truth if truth.ndim == 1 else truth[:, -1]
