"""Measure how well stored maps locate the instances that are known to be positive, with intervals over patients."""

from collections.abc import Callable, Mapping, Sequence
from itertools import compress
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from carmil.bags.bags import Bags
from carmil.evidence import explain
from carmil.evidence.agreement import agreement_by_bag
from carmil.evidence.explainers import predicts_classes
from carmil.evidence.localisation import auroc, dice, dice_threshold, froc_interval, ndcg
from carmil.evidence.map_agreement import AT_ONCE, bag_truth, known_instances
from carmil.models.contract import BagModel
from carmil.runs.facts import SlideMean
from carmil.runs.slide_evidence import read_column
from carmil.studies.figures import mean_interval
from carmil.studies.subjects import Subject
from carmil.truth import UNKNOWN


def dice_thresholds(
    members: Sequence[BagModel],
    bags: Bags,
    validated: Sequence[Sequence[int]],
    methods: Sequence[str],
    on_model: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, list[float]]:
    """Return, for each method, the threshold of every model's map that gives the best Dice on the model's own
    validation bags.

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
