"""Measures of how well a map finds the known target instances, in addition to the average precision of `agreement`.

For each bag: AUROC, NDCG, Dice at a threshold. Over all bags: FROC. The threshold is chosen on validation bags.
n instances of all bags together, b bags, k outputs, such as classes. Leading axes, such as that of a population's
models, are carried through.
"""

import math

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from carmil.errors import CarmilError
from carmil.evidence.rank_correlation import bag_ranks, tie_bounds
from carmil.models.pooling import Offsets, bag_ranking, bag_sum
from carmil.statistics.bootstrap import Interval, draws, percentiles

FALSE_ALARMS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)


def auroc(scores: Tensor, targets: Tensor, offsets: Offsets | Tensor) -> Tensor:
    """Return the probability that a target scores above a non-target of its bag; ties count half.

    scores (..., n, k), targets (n, k) or (..., n, k) bool -> (..., b, k); NaN if none or all instances are targets.
    """
    offsets = Offsets.of(offsets, scores.device)
    hits = targets.expand(scores.shape).double()
    targets_per_bag = bag_sum(hits, offsets)
    won = bag_sum(bag_ranks(scores, offsets) * hits, offsets) - targets_per_bag * (targets_per_bag + 1) / 2
    return won / (targets_per_bag * (offsets.sizes.unsqueeze(-1) - targets_per_bag))


def ndcg(scores: Tensor, gains: Tensor, offsets: Offsets | Tensor) -> Tensor:
    """Return DCG = sum_j gain_j / log2(1 + rank_j) divided by that of the best order; equal scores share the mean of
    their discounts.

    scores (..., n, k), gains (n, k) or (..., n, k), none negative (xMIL: evidence + 1) -> (..., b, k); NaN if all
    gains are 0.
    """
    offsets = Offsets.of(offsets, scores.device)
    if (gains < 0).any():
        raise CarmilError("a gain is negative: expected gains from 0, such as evidence + 1")
    gains = gains.expand(scores.shape).double()
    best = gains.gather(-2, bag_ranking(gains, offsets))
    rank = torch.arange(offsets.instances, device=scores.device) - offsets.starts[offsets.bag_of] + 1
    discount = 1 / (rank.double() + 1).log2()
    order = bag_ranking(scores, offsets)
    first, last = tie_bounds(scores.gather(-2, order), offsets)
    so_far = torch.cat([discount.new_zeros(1), discount.cumsum(0)])
    shared = (so_far[last + 1] - so_far[first]) / (last + 1 - first)
    return bag_sum(gains.gather(-2, order) * shared, offsets) / bag_sum(best * discount.unsqueeze(-1), offsets)


def dice(scores: Tensor, targets: Tensor, offsets: Offsets | Tensor, *, threshold: float) -> Tensor:
    """Return 2 TP / (2 TP + FP + FN) of the instances with a score of at least `threshold`, which is chosen on
    validation bags.

    scores (..., n, k), targets (n, k) or (..., n, k) bool -> (..., b, k); NaN for a bag without targets, whose
    false positives count in FROC.
    """
    offsets = Offsets.of(offsets, scores.device)
    marked, hits = (scores.double() >= threshold).double(), targets.expand(scores.shape).double()
    targets_per_bag = bag_sum(hits, offsets)
    both = bag_sum(marked * hits, offsets)
    return (2 * both / (bag_sum(marked, offsets) + targets_per_bag)).where(targets_per_bag > 0, torch.nan)


def dice_threshold(scores: Tensor, targets: Tensor, offsets: Offsets | Tensor) -> float:
    """Return the threshold with the best mean Dice over validation bags with targets, halfway to the next lower score.

    scores (n), targets (n) bool. All thresholds are evaluated: along a bag's ranking, Dice after its r-th instance is
    2 TP_r / (r + P). The increments of all bags, accumulated in the order of falling scores, are the curve of the
    mean.
    """
    offsets = Offsets.of(offsets, scores.device)
    hits = targets.double().unsqueeze(-1)
    targets_per_bag = bag_sum(hits, offsets)
    if not (targets_per_bag > 0).any():
        raise CarmilError("no bag has a target: expected validation bags with some, to choose a threshold by")
    order = bag_ranking(scores.unsqueeze(-1), offsets)
    first = offsets.starts[offsets.bag_of]
    rank = (torch.arange(offsets.instances, device=scores.device) - first + 1).unsqueeze(-1)
    so_far = torch.cat([hits.new_zeros(1, 1), hits.gather(0, order).cumsum(0)])
    own = 2 * (so_far[1:] - so_far[first]) / (rank + targets_per_bag[offsets.bag_of])
    before = torch.cat([own.new_zeros(1, 1), own[:-1]]).masked_fill(rank == 1, 0.0)
    gained = torch.where(targets_per_bag[offsets.bag_of] > 0, own - before, 0.0).squeeze(-1)
    ranked, down = scores[order.squeeze(-1)].sort(descending=True)
    curve = gained[down].cumsum(0)
    ends = torch.cat([ranked[1:] != ranked[:-1], ranked.new_ones(1, dtype=torch.bool)])
    best = int(curve.where(ends, -torch.inf).argmax())
    return float((ranked[best].double() + ranked[min(best + 1, len(ranked) - 1)].double()) / 2)


def froc_interval(
    scores: Tensor,
    targets: Tensor,
    offsets: Offsets | Tensor,
    *,
    groups: ArrayLike | None = None,
    repeats: int = 200,
    level: float = 0.95,
    seed: int = 0,
) -> Interval:
    """Return the FROC score of scores (n) with a percentile interval over resampled bags, or groups of bags (b) such
    as patients.

    The score is the mean sensitivity over all target instances where at most FALSE_ALARMS false positives per bag, those without
    targets included, are allowed on average. All bags have one threshold, so that scores must be comparable between bags; equal
    scores share it. NaN if there is no target at all.

    Groups with targets are resampled separately, so that every resample has some. NaN if there is only one group.
    Scores are sorted once; a resample is a weighting.
    """
    offsets = Offsets.of(offsets, scores.device)
    order = scores.argsort(descending=True, stable=True)
    ranked, bag = scores[order].cpu(), offsets.bag_of[order].cpu().numpy()
    hits = targets[order].cpu().numpy().astype(np.float64)
    ends = np.flatnonzero(np.append((ranked[1:] != ranked[:-1]).numpy(), True))
    allowed = np.array(FALSE_ALARMS) * offsets.bags

    def score(counts: NDArray[np.int64]) -> float:
        weights = counts[bag]
        has_target, wrong = (weights * hits).cumsum()[ends], (weights * (1 - hits)).cumsum()[ends]
        place = np.searchsorted(wrong, allowed, side="right")  # number of thresholds within the limit
        return float(np.append(0.0, has_target)[place].mean() / has_target[-1]) if has_target[-1] else math.nan

    has_target = np.bincount(bag, weights=hits, minlength=offsets.bags) > 0
    drawn = draws(offsets.bags, groups, strata=has_target, repeats=repeats, seed=seed)
    values = np.array([score(counts) for some in drawn for counts in some])
    return percentiles(score(np.ones(offsets.bags, dtype=np.int64)), values, level)
