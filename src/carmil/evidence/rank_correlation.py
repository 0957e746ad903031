"""Ranks of instances within ragged bags, and correlations of two maps.

n instances of all bags together, b bags, c columns (classes, heads). Leading axes are carried through.
"""

import torch
from torch import Tensor

from carmil.models.pooling import Offsets, bag_max, bag_mean, bag_ranking, bag_sum


def tie_bounds(ranked: Tensor, offsets: Offsets) -> tuple[Tensor, Tensor]:
    """Return the first and last position of each group of equal neighbours of a bag.

    ranked (..., n, c), sorted within bags -> the same shape, twice.
    """
    n = offsets.instances
    place = torch.arange(n, device=ranked.device).unsqueeze(-1)
    begins = torch.ones_like(ranked, dtype=torch.bool)
    begins[..., 1:, :] = (ranked[..., 1:, :] != ranked[..., :-1, :]) | (offsets.bag_of.diff() != 0).unsqueeze(-1)
    ends = torch.ones_like(begins)
    ends[..., :-1, :] = begins[..., 1:, :]
    first = torch.where(begins, place, 0).cummax(-2).values
    last = torch.where(ends, place, n).flip(-2).cummin(-2).values.flip(-2)
    return first, last


def bag_places(x: Tensor, offsets: Offsets) -> Tensor:
    """Return the position of each instance in its bag by falling x, from 0; ties in their own order. (..., n, c) -> (..., n, c)."""
    places = torch.arange(offsets.instances, device=x.device) - offsets.starts[offsets.bag_of]
    order = bag_ranking(x, offsets)
    return torch.empty_like(order).scatter_(-2, order, places.unsqueeze(-1).expand_as(order))


def bag_ranks(x: Tensor, offsets: Offsets) -> Tensor:
    """Return the rank of each instance in its bag, 1 the smallest, ties with their mean rank. (..., n, c) -> (...,
    n, c), float64.
    """
    order = bag_ranking(-x, offsets)
    first, last = tie_bounds(x.gather(-2, order), offsets)
    rank = (first + last).double() / 2 - offsets.starts[offsets.bag_of].unsqueeze(-1) + 1
    return torch.empty_like(rank).scatter_(-2, order, rank)


def pearson(x: Tensor, y: Tensor, offsets: Offsets) -> Tensor:
    """Return the correlation of two maps in each bag. x, y (..., n, c) -> (..., b, c); NaN if one of them is constant."""
    x, y = _centred(x.double(), offsets), _centred(y.double(), offsets)
    return bag_sum(x * y, offsets) / (bag_sum(x * x, offsets) * bag_sum(y * y, offsets)).sqrt()


def spearman(x: Tensor, y: Tensor, offsets: Offsets) -> Tensor:
    """Return the correlation of the ranks in each bag. x, y (..., n, c) -> (..., b, c); NaN if one of them is constant."""
    return pearson(bag_ranks(x, offsets), bag_ranks(y, offsets), offsets)


def top_overlap(x: Tensor, y: Tensor, offsets: Offsets, *, count: int) -> Tensor:
    """Return the share of the top `count` instances (all, in a smaller bag) common to two maps; ties in their own
    order.

    x, y (..., n, c) -> (..., b, c).
    """
    both = (bag_places(x, offsets) < count) & (bag_places(y, offsets) < count)
    return bag_sum(both.double(), offsets) / offsets.sizes.clamp_max(count).unsqueeze(-1)


def _centred(x: Tensor, offsets: Offsets) -> Tensor:
    """Return x minus the mean of its bag; exactly zero if all values of the bag are equal, despite the rounding of the mean."""
    constant = bag_max(x, offsets) == -bag_max(-x, offsets)
    centred = x - bag_mean(x, offsets).index_select(-2, offsets.bag_of)
    return centred.masked_fill(constant.index_select(-2, offsets.bag_of), 0.0)
