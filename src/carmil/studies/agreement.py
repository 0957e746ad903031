"""Agreement of maps with the known truth of the instances, for every model, bag and class, and for maps already
written.

The truth is (n), of the second of two classes, or (n, k), of every output: 1 for the class, -1 against it, 0 neither (of
a risk, 1 raises it and -1 lowers it); UNKNOWN instances are left out. r models, b bags, n instances, k outputs; c = 1 or
k columns of truth.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import compress
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from carmil.bags.bags import Bags
from carmil.evidence import EXPLAINERS, explain, explainers_of
from carmil.evidence.agreement import agreement_by_bag
from carmil.evidence.explainers import predicts_classes
from carmil.evidence.localisation import auroc, dice, dice_threshold, froc_interval, ndcg
from carmil.models.contract import BagModel
from carmil.models.pooling import Offsets
from carmil.runs.compute_once import compute_once
from carmil.runs.facts import SlideMean
from carmil.runs.run import Run, weights_key
from carmil.runs.slide_evidence import read_column
from carmil.studies.figures import mean_interval
from carmil.studies.subjects import Subject, open_run_store, own_subjects, validation_places
from carmil.training.population import Population
from carmil.truth import UNKNOWN

MEASURES = {"auprc_plus": "AUPRC+", "auprc_both": "AUPRC±", "auroc": "AUROC", "ndcg": "NDCG"}
MAPS = ("attention", "rollout", "path")  # maps whose agreement `carmil train` reports
AT_ONCE = 2**17  # instances per pass


@dataclass(frozen=True, eq=False)
class MapAgreement:
    """Agreement of the maps of one explainer, with negative evidence scored by one of NEGATIVE_RULES.

    measures: each of MEASURES, (r, b, c); NaN for a bag that has no target instances, or only target instances, among
    those whose truth is known. AUROC is the mean over the positive and the negative instances, as AUPRC± is, if both
    exist. The gain of NDCG is the truth + 1, or 1 for a positive instance if no truth is negative.
    """

    explainer: str
    rule: str
    measures: Mapping[str, Tensor]


def agreement(models: Sequence[BagModel], bags: Bags, chosen: Tensor, explainers: Sequence[str]) -> list[MapAgreement]:
    """Return the agreement of the models' maps on the chosen bags (positions, b of them), for each explainer that
    fits the models.

    The list is empty if no truth is known, or if truth without columns of its own is not about the second of two classes.
    Every map is computed once; attention has one result per negative rule if the truth is signed.
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


def map_figures(
    population: Population, rows: Sequence[int], bags: Bags, chosen: Tensor
) -> dict[str, NDArray[np.float64]]:
    """Return AUPRC+ of the maps of MAPS on each chosen bag, (b), and for a single output AUPRC± by the mirror rule.

    Each value is the mean over the models at `rows`, and over the outputs if the truth has several columns. The columns
    of two classes cover both signs, as evidence against one is evidence for the other; what lowers a risk is only found
    by the negative side of its map.
    """
    models = [population.member(row) for row in rows]
    agreements = [one for one in agreement(models, bags, chosen, MAPS) if one.rule == "mirror"]
    measures = {"auprc": "auprc_plus"} | ({"auprc_both": "auprc_both"} if models[0].classes == 1 else {})
    return {
        f"{name}_{one.explainer}": one.measures[measure].mean(0).nanmean(-1).numpy()
        for name, measure in measures.items()
        for one in agreements
    }


def run_agreement(
    run: Run, explainers: Sequence[str] = (), *, bags: Literal["test", "validation"] = "test", device: str = "cpu"
) -> list[MapAgreement]:
    """Return the agreement of the maps of a run, each model on its own test or validation bags; NaN on all other
    bags of the store.

    explainers: those to use, which must fit the run's model; by default all that fit. The results are cached in
    the run's folder.
    """
    store, population = open_run_store(run), run.population(device)
    models = [population.member(row) for row in range(len(population))]
    if bags == "validation":
        places = validation_places(run, store)
    else:
        subjects = own_subjects(run, store)
        places = [sorted(subject.place for subject in subjects if row in subject.models) for row in range(len(models))]
    results: list[MapAgreement] = []
    for name in explainers or explainers_of(models[0]):
        measure = partial(_by_model, models, store.bags(), places, name)
        request = {"run": run.key, "weights": weights_key(run), "explainer": name, "measures": [*MEASURES]}
        path = run.folder / "agreement" / f"{bags}-{name}.json"
        kept, _ = compute_once(path, request, measure, device=device)
        results += [_expand(one, name, places, len(store.ids)) for one in kept]
    return results


def _by_model(models: Sequence[BagModel], bags: Bags, places: Sequence[Sequence[int]], name: str) -> list[Any]:
    """Return one entry per rule, with the values of every measure for every model on its own bags.

    Models with the same bags are computed together.
    """
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


def _expand(kept: Any, name: str, places: Sequence[Sequence[int]], bags: int) -> MapAgreement:
    """Expand the values of each model's own bags to (r, b, c); None in the JSON is NaN."""
    measures = {}
    for measure, by_model in kept["measures"].items():
        rows = [torch.from_numpy(np.array(values, dtype=np.float64)) for values in by_model]
        measures[measure] = torch.full((len(rows), bags, rows[0].shape[-1]), torch.nan, dtype=torch.float64)
        for row, (own, values) in enumerate(zip(places, rows, strict=True)):
            measures[measure][row, list(own)] = values
    return MapAgreement(name, kept["rule"], measures)


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


def dice_thresholds(
    members: Sequence[BagModel],
    bags: Bags,
    validated: Sequence[Sequence[int]],
    methods: Sequence[str],
    on_model: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, list[float]]:
    """Return, for each method, the threshold of every model's map with the best Dice on the model's own validation
    bags.

    validated: the positions of these bags, by model. NaN if they have no target instances; empty if no truth is
    known.
    """
    truth, outputs = bags.instance_labels, 2 if predicts_classes(members[0]) else 1
    if truth is None or members[0].classes != outputs or (outputs == 1 and truth.ndim == 1):
        return {}
    thresholds: dict[str, list[float]] = {method: [] for method in methods}
    for done, (model, places) in enumerate(zip(members, validated, strict=True), 1):
        chosen = torch.tensor(places, dtype=torch.long)
        marks = torch.cat([bag_truth(bags, place) for place in places])
        known, offsets = known_instances(marks, torch.cat([chosen.new_zeros(1), bags.sizes[chosen].cumsum(0)]))
        targets = marks[known] > 0
        for method in methods:
            scores = torch.cat([explain(model, part, method)[:, -1] for part in bags.parts(AT_ONCE, chosen)])
            thresholds[method].append(
                dice_threshold(scores[known], targets, offsets) if targets.any() else float("nan")
            )
        on_model(done, len(members))
    return thresholds


def localisation_figures(
    bags: Bags,
    subjects: Sequence[Subject],
    files: Sequence[Path],
    columns: dict[str, str],
    thresholds: Mapping[str, Sequence[float]],
) -> dict[str, dict[str, SlideMean]]:
    """Return the agreement of each method's map with the truth, with intervals over patients.

    columns: the column of evidence for the second class, or for the single output, by method. AUPRC+, AUROC and NDCG are
    over slides with both kinds of instances, Dice over slides with targets, FROC over all; instances of unknown truth are
    left out.
    """
    known_somewhere = [bool((bag_truth(bags, subject.place) != UNKNOWN).any()) for subject in subjects]
    subjects, files = list(compress(subjects, known_somewhere)), list(compress(files, known_somewhere))
    if not subjects:
        return {}
    patients = [subject.patient if subject.patient is not None else subject.slide for subject in subjects]
    truths = [bag_truth(bags, subject.place) for subject in subjects]
    truth = torch.cat(truths)
    known, offsets = known_instances(truth, torch.tensor([0, *np.cumsum([len(one) for one in truths])]))
    truth = truth[known]
    two_sided = bool((truth < 0).any())
    figures = {}
    for method, column in columns.items():
        maps = [torch.from_numpy(read_column(path, column)) for path in files]
        measured: dict[str, list[float]] = {}
        for subject, s, t in zip(subjects, maps, truths, strict=True):
            at = [thresholds[method][row] for row in subject.models] if method in thresholds else []
            for name, value in _slide_figures(s, t, two_sided, float(np.mean(at)) if at else None).items():
                measured.setdefault(name, []).append(value)
        figures[method] = {name: mean_interval(values, patients) for name, values in measured.items()}
        froc = froc_interval(torch.cat(maps)[known], truth > 0, offsets, groups=patients)
        figures[method]["froc"] = SlideMean(froc.value, froc.low, froc.high, len(maps))
    return figures


def bag_truth(bags: Bags, place: int) -> Tensor:
    """Return the truth (n) of one bag, that of the last class if there are several columns; features are not read."""
    assert bags.instance_labels is not None
    truth = bags.instance_labels[int(bags.offsets[place]) : int(bags.offsets[place + 1])]
    return truth if truth.ndim == 1 else truth[:, -1]


def _slide_figures(scores: Tensor, truth: Tensor, two_sided: bool, threshold: float | None) -> dict[str, float]:
    known, one_bag = known_instances(truth, torch.tensor([0, len(truth)]))
    scores, truth = scores[known], truth[known]
    s, t = scores.unsqueeze(-1), truth.unsqueeze(-1)
    hits = t > 0
    mixed = 0 < int(hits.sum()) < len(truth)
    positive, both = agreement_by_bag(s, -s, t, one_bag)
    gains = t.sign() + 1 if two_sided else hits.long()
    figures = {
        "auprc_plus": float(positive),
        "auroc": float(auroc(s, hits, one_bag)),
        "ndcg": float(ndcg(s, gains, one_bag)) if mixed else float("nan"),
    }
    if two_sided:
        figures["auprc_both_mirror"] = float(both)
    if threshold is not None:
        figures["dice"] = float(dice(s, hits, one_bag, threshold=threshold)) if threshold == threshold else float("nan")
    return figures
