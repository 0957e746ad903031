"""Whether the maps that were written find the instances that are known to matter. Two classes; the map is that of the second.

n instances of all slides together. One number per instance is kept in memory, never features.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import compress
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from carmil.bags.bags import Bags
from carmil.evidence.agreement import agreement_by_bag
from carmil.evidence.explainers import explain
from carmil.evidence.localisation import auroc, dice, dice_threshold, froc_interval, ndcg
from carmil.models.contract import BagModel
from carmil.runs.facts import SlideMean
from carmil.runs.slide_evidence import read_column
from carmil.studies.agreement import known_instances, second_class
from carmil.studies.figures import mean_interval
from carmil.studies.subjects import Subject
from carmil.truth import UNKNOWN

AT_ONCE = 2**17  # instances in memory


def dice_thresholds(
    members: Sequence[BagModel],
    bags: Bags,
    validated: Sequence[Sequence[int]],
    methods: Sequence[str],
    on_model: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, list[float]]:
    """For each method, the threshold of every model's map with the best Dice on the model's own validation bags.

    validated: the positions of these bags, by model. NaN where they have no target; empty where no truth is known.
    """
    if bags.instance_labels is None or members[0].classes != 2:
        return {}
    found: dict[str, list[float]] = {method: [] for method in methods}
    for done, (model, places) in enumerate(zip(members, validated, strict=True), 1):
        chosen = torch.tensor(places, dtype=torch.long)
        truth = torch.cat([bag_truth(bags, place) for place in places])
        known, offsets = known_instances(truth, torch.cat([chosen.new_zeros(1), bags.sizes[chosen].cumsum(0)]))
        targets = truth[known] > 0
        for method in methods:
            scores = torch.cat([explain(model, part, method)[:, 1] for part in bags.parts(AT_ONCE, chosen)])
            found[method].append(dice_threshold(scores[known], targets, offsets) if targets.any() else float("nan"))
        on_model(done, len(members))
    return found


def localisation_figures(
    bags: Bags,
    subjects: Sequence[Subject],
    files: Sequence[Path],
    columns: dict[str, str],
    thresholds: Mapping[str, Sequence[float]],
) -> dict[str, dict[str, SlideMean]]:
    """Agreement with the truth of each method's map, with intervals over patients. columns: that of the second class, by
    method.

    AUPRC+, AUROC and NDCG are over slides with both kinds of instances, Dice over slides with targets, FROC over all;
    instances of
    unknown truth are left out.
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
    found = {}
    for method, column in columns.items():
        maps = [torch.from_numpy(read_column(path, column)) for path in files]
        measured: dict[str, list[float]] = {}
        for subject, s, t in zip(subjects, maps, truths, strict=True):
            at = [thresholds[method][row] for row in subject.models] if method in thresholds else []
            for name, value in _slide_figures(s, t, two_sided, float(np.mean(at)) if at else None).items():
                measured.setdefault(name, []).append(value)
        found[method] = {name: mean_interval(values, patients) for name, values in measured.items()}
        froc = froc_interval(torch.cat(maps)[known], truth > 0, offsets, groups=patients)
        found[method]["froc"] = SlideMean(froc.value, froc.low, froc.high, len(maps))
    return found


def bag_truth(bags: Bags, place: int) -> Tensor:
    """(n) the truth of one bag; its features are not read."""
    assert bags.instance_labels is not None
    return second_class(bags.instance_labels[int(bags.offsets[place]) : int(bags.offsets[place + 1])])


def _slide_figures(scores: Tensor, truth: Tensor, two_sided: bool, threshold: float | None) -> dict[str, float]:
    known, whole = known_instances(truth, torch.tensor([0, len(truth)]))
    scores, truth = scores[known], truth[known]
    s, t = scores.unsqueeze(-1), truth.unsqueeze(-1)
    hits = t > 0
    mixed = 0 < int(hits.sum()) < len(truth)
    positive, both = agreement_by_bag(s, -s, t, whole)
    gains = t.sign() + 1 if two_sided else hits.long()
    found = {
        "auprc_plus": float(positive),
        "auroc": float(auroc(s, hits, whole)),
        "ndcg": float(ndcg(s, gains, whole)) if mixed else float("nan"),
    }
    if two_sided:
        found["auprc_both_mirror"] = float(both)
    if threshold is not None:
        found["dice"] = float(dice(s, hits, whole, threshold=threshold)) if threshold == threshold else float("nan")
    return found
