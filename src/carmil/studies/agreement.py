"""Agreement of maps with the known truth of the instances, of every model, bag and class.

The truth is (n), of the second of two classes, or (n, k), of every class: 1 for the class, -1 against it, 0 neither, UNKNOWN left
out. r models, b bags, n instances, k classes; c = 1 or k columns of truth.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from carmil.bags.bags import Bags
from carmil.evidence import EXPLAINERS, explain, explainers_of
from carmil.evidence.agreement import agreement_by_bag
from carmil.evidence.localisation import auroc, ndcg
from carmil.models.contract import BagModel
from carmil.models.pooling import Offsets
from carmil.runs.compute_once import compute_once
from carmil.runs.run import Run, weights_key
from carmil.studies.subjects import open_run_store, own_subjects, validation_places
from carmil.training.population import Population
from carmil.truth import UNKNOWN

MEASURES = {"auprc_plus": "AUPRC+", "auprc_both": "AUPRC±", "auroc": "AUROC", "ndcg": "NDCG"}
MAPS = ("attention", "rollout", "path")  # whose agreement `carmil train` tells
AT_ONCE = 2**17  # instances


@dataclass(frozen=True, eq=False)
class MapAgreement:
    """Agreement of the maps of one explainer, negative evidence scored by one of NEGATIVE_RULES.

    measures: each of MEASURES, (r, b, c); NaN where a bag has none, or nothing but, of the instances to be found. AUROC is
    the mean over the positive and the negative instances, as AUPRC± is, where both exist. NDCG's gain is the truth + 1, or 1 for
    a positive instance where no truth is negative.
    """

    explainer: str
    rule: str
    measures: Mapping[str, Tensor]


def agreement(models: Sequence[BagModel], bags: Bags, chosen: Tensor, explainers: Sequence[str]) -> list[MapAgreement]:
    """Agreement of the models' maps on the chosen bags (positions, b of them), by each of the explainers that fits the models.

    Empty where no truth is known, or where a single truth meets more than two classes. Every map is computed once; attention has
    one result per negative rule where the truth is signed.
    """
    truth, classes = bags.instance_labels, models[0].classes
    if truth is None or len(chosen) == 0 or (truth.ndim == 1 and classes != 2):
        return []
    signed = truth.ndim == 2 or bool(((truth < 0) & (truth != UNKNOWN)).any())
    rules = [
        rule for name in explainers if EXPLAINERS[name].fits(models[0]) for rule in _rules(name, models[0], signed)
    ]
    device = next(models[0].parameters()).device
    measurable = torch.tensor([_measurable(bags, place) for place in chosen.tolist()])  # nothing else is explained
    shape = (len(models), len(chosen), 1 if truth.ndim == 1 else truth.shape[1])
    found = [
        MapAgreement(name, rule, {measure: torch.full(shape, torch.nan, dtype=torch.float64) for measure in MEASURES})
        for name, rule, _ in rules
    ]
    if not measurable.any():
        return found
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
    for one, values in zip(found, parts, strict=True):
        for measure, tensor in one.measures.items():
            tensor[:, measurable] = torch.cat([part[measure] for part in values], 1)
    return found


def _measurable(bags: Bags, place: int) -> bool:
    """Whether some but not all known instances of a bag are positive, or negative, for any class."""
    assert bags.instance_labels is not None
    truth = bags.instance_labels[int(bags.offsets[place]) : int(bags.offsets[place + 1])]
    truth = truth.reshape(len(truth), -1)
    truth = truth[(truth != UNKNOWN).all(-1)]
    counts = torch.stack([(truth > 0).sum(0), (truth < 0).sum(0)])
    return bool(((counts > 0) & (counts < len(truth))).any())


def map_figures(
    population: Population, rows: Sequence[int], bags: Bags, chosen: Tensor
) -> dict[str, NDArray[np.float64]]:
    """AUPRC+ of the maps of MAPS on each chosen bag, (b): the mean over the models at `rows`, and over classes if the truth is
    of several."""
    models = [population.member(row) for row in rows]
    found = agreement(models, bags, chosen, MAPS)
    return {
        f"auprc_{one.explainer}": one.measures["auprc_plus"].mean(0).nanmean(-1).numpy()
        for one in found
        if one.rule == "mirror"
    }


def run_agreement(
    run: Run, explainers: Sequence[str] = (), *, bags: Literal["test", "validation"] = "test", device: str = "cpu"
) -> list[MapAgreement]:
    """Agreement of the maps of a run, every model on its own test or validation bags; NaN on all others of the run's store.

    explainers: some that fit the run's model; all if none is named. What was measured is kept in the run's folder.
    """
    store, population = open_run_store(run), run.population(device)
    models = [population.member(row) for row in range(len(population))]
    if bags == "validation":
        places = validation_places(run, store)
    else:
        subjects = own_subjects(run, store)
        places = [sorted(subject.place for subject in subjects if row in subject.models) for row in range(len(models))]
    found: list[MapAgreement] = []
    for name in explainers or explainers_of(models[0]):

        def measure(name: str = name) -> list[Any]:
            return _by_model(models, store.bags(), places, name)

        request = {"run": run.key, "weights": weights_key(run), "explainer": name, "measures": [*MEASURES]}
        path = run.folder / "agreement" / f"{bags}-{name}.json"
        kept, _ = compute_once(path, request, measure, device=device)
        found += [_whole(one, name, places, len(store.ids)) for one in kept]
    return found


def _by_model(models: Sequence[BagModel], bags: Bags, places: Sequence[Sequence[int]], name: str) -> list[Any]:
    """One entry per rule: of every measure and model the values of its own bags. Models with the same bags go together."""
    together: dict[tuple[int, ...], list[int]] = {}
    for row, own in enumerate(places):
        together.setdefault(tuple(own), []).append(row)
    rules: dict[str, dict[str, list[Any]]] = {}
    for own, rows in together.items():
        for one in agreement([models[row] for row in rows], bags, torch.tensor(own), [name]):
            values = rules.setdefault(one.rule, {measure: [[] for _ in models] for measure in MEASURES})
            for measure, tensor in one.measures.items():
                for row, of_model in zip(rows, tensor.tolist(), strict=True):
                    values[measure][row] = of_model
    return [{"rule": rule, "measures": values} for rule, values in rules.items()]


def _whole(kept: Any, name: str, places: Sequence[Sequence[int]], bags: int) -> MapAgreement:
    """Values of each model's own bags as (r, b, c); JSON has None for NaN."""
    measures = {}
    for measure, by_model in kept["measures"].items():
        rows = [torch.from_numpy(np.array(values, dtype=np.float64)) for values in by_model]
        measures[measure] = torch.full((len(rows), bags, rows[0].shape[-1]), torch.nan, dtype=torch.float64)
        for row, (own, values) in enumerate(zip(places, rows, strict=True)):
            measures[measure][row, list(own)] = values
    return MapAgreement(name, kept["rule"], measures)


def _rules(name: str, model: BagModel, signed: bool) -> list[tuple[str, str, str]]:
    """(explainer, negative rule, the map that scores negatives); the mirror rule takes the map itself with its sign changed."""
    rules = [(name, "mirror", name)]
    if signed and name == "attention":
        rules.append((name, "self", name))
        if EXPLAINERS["counterfactual_attention"].fits(model):
            rules.append((name, "counterfactual", "counterfactual_attention"))
    return rules


def _measured(supporting: Tensor, refuting: Tensor, bags: Bags, signed: bool) -> dict[str, Tensor]:
    """Every measure (r, b, c) of maps (r, n, c); every bag has known instances."""
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
    """Which instances (n) of truth (n) or (n, k) are known, and how these lie in bags, starts (b+1); bags without any are
    left out."""
    known = truth != UNKNOWN
    known = known.all(-1) if known.ndim == 2 else known
    before = torch.cat([starts.new_zeros(1), known.long().cumsum(0).cpu()])[starts]
    return known, Offsets(before.unique_consecutive(), truth.device)


def second_class(truth: Tensor) -> Tensor:
    """(n) the truth of the second class: truth (n) itself, or its column of truth (n, k)."""
    return truth if truth.ndim == 1 else truth[:, 1]
