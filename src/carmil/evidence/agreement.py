"""Agreement of evidence with the known truth about instances.

n instances of all bags together, b bags, k outputs, such as classes. Leading axes, such as that of a population's
models, are carried through.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from carmil.evidence.rank_correlation import tie_bounds
from carmil.models.pooling import Offsets, bag_ranking, bag_sum

NEGATIVE_RULES = {
    "mirror": "negative evidence scored by -s: the honest rule for a signed map",
    "counterfactual": "negative evidence scored by +u_cf: the paper's rule for CAR-MIL",
    "self": "negative evidence scored by +s: the control",
}

Measure = Callable[[Tensor, Tensor, Offsets], Tensor]  # scores, targets, offsets -> (..., b, k)


@dataclass(frozen=True)
class Agreement:
    """AUPRC+ and AUPRC±, (...), and the number of (bag, class) pairs in each mean."""

    positive: Tensor
    both: Tensor
    positive_pairs: Tensor
    both_pairs: Tensor


def average_precision(scores: Tensor, targets: Tensor, offsets: Offsets) -> Tensor:
    """Return the step-wise area under the precision-recall curve of each bag and column; ties share a threshold, as
    in scikit-learn.

    scores (..., n, k), targets (n, k) or (..., n, k) bool -> (..., b, k); NaN for a bag without targets.
    """
    offsets = Offsets.of(offsets, scores.device)
    order = bag_ranking(scores, offsets)
    ranked = scores.gather(-2, order)
    hits = targets.expand(scores.shape).gather(-2, order).double()
    place = torch.arange(offsets.instances, device=scores.device).unsqueeze(-1)
    first = offsets.starts[offsets.bag_of].unsqueeze(-1)
    retrieved = hits.cumsum(-2)
    before = torch.cat([torch.zeros_like(retrieved[..., :1, :]), retrieved], dim=-2).gather(
        -2, first.expand(scores.shape)
    )
    precision = (retrieved - before) / (place - first + 1)
    # The precision of a hit is that at the end of its group of equal scores.
    _, end = tie_bounds(ranked, offsets)
    return bag_sum(hits * precision.gather(-2, end), offsets) / bag_sum(hits, offsets)


def evidence_agreement(supporting: Tensor, refuting: Tensor, truth: Tensor, offsets: Offsets | Tensor) -> Agreement:
    """Return AUPRC+ and AUPRC± over all (bag, class) pairs, correctly predicted or not.

    supporting (..., n, k) should be high where truth (n, k) is +1, refuting where it is -1. A pair is omitted from a
    measure if none or all of its instances are targets; AUPRC± is the mean over pairs of AP+ and AP-, or of the one
    that is defined.
    """
    positive, both = agreement_by_bag(supporting, refuting, truth, offsets)
    return Agreement(
        positive=positive.nanmean((-2, -1)),
        both=both.nanmean((-2, -1)),
        positive_pairs=(~positive.isnan()).sum((-2, -1)),
        both_pairs=(~both.isnan()).sum((-2, -1)),
    )


def agreement_by_bag(
    supporting: Tensor, refuting: Tensor, truth: Tensor, offsets: Offsets | Tensor, measure: Measure = average_precision
) -> tuple[Tensor, Tensor]:
    """Return AP+, and the mean of AP+ and AP- (or of the one that is defined), of each bag and class: (..., b, k)
    both, NaN if undefined.

    measure: another measure of scores against targets, such as `localisation.auroc`.
    """
    offsets = Offsets.of(offsets, supporting.device)
    positive = _pairwise(measure, supporting, truth > 0, offsets)
    negative = _pairwise(measure, refuting, truth < 0, offsets)
    return positive, torch.stack([positive, negative]).nanmean(0)


def _pairwise(measure: Measure, scores: Tensor, targets: Tensor, offsets: Offsets) -> Tensor:
    """Return the measure (..., b, k), NaN if none or all instances are targets."""
    counts = bag_sum(targets.double(), offsets)
    measurable = (counts > 0) & (counts < offsets.sizes.unsqueeze(-1))
    return measure(scores, targets, offsets).where(measurable, torch.nan)
