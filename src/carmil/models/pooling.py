"""Softmax, sums, means, maxima and top-k over ragged bags.

n instances of all bags together, b bags, d features, h heads (attention maps). The instance axis is the second to
last; axes before it, such as the models of a population, are carried through. Only `Offsets` represents the positions
of bags; a model that needs another layout derives it from `Offsets` and caches it with `planned`.
"""

from collections.abc import Callable, Hashable
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor

Plan = TypeVar("Plan")


class Offsets:
    """Positions of the bags among the instances, with cached values for pooling.

    starts (b+1): bag i is instances starts[i]:starts[i+1].
    """

    def __init__(self, starts: Tensor, device: torch.device | str | None = None) -> None:
        self.lengths: list[int] = starts.diff().tolist()  # instances per bag, as Python integers
        self.bags = len(self.lengths)
        self.instances = sum(self.lengths)
        # The number of instances per bag if all bags have the same number.
        self.size = self.lengths[0] if len(set(self.lengths)) == 1 else None
        self.starts = starts.to(device if device is not None else starts.device)
        self._plans: dict[Hashable, Any] = {}

    @classmethod
    def of(cls, offsets: "Tensor | Offsets", device: torch.device | str | None = None) -> "Offsets":
        return offsets if isinstance(offsets, Offsets) else cls(offsets, device)

    @cached_property
    def bag_of(self) -> Tensor:
        """Return the index of each instance's bag, (n)."""
        positions = torch.arange(self.instances, device=self.starts.device)
        return torch.searchsorted(self.starts, positions, right=True) - 1

    @cached_property
    def sizes(self) -> Tensor:
        """Return the number of instances in each bag, (b)."""
        return self.starts.diff()

    def planned(self, key: Hashable, plan: Callable[[], Plan]) -> Plan:
        """Return the layout that `plan` computes for these bags; cached, so that layers and steps share it."""
        if key not in self._plans:
            self._plans[key] = plan()
        return self._plans[key]

    def split(self, x: Tensor) -> Tensor:
        """Return a view of (..., n, c) as (..., b, size, c), for bags of one common size."""
        return x.unflatten(-2, (self.bags, self.size or 0))


def bag_softmax(scores: Tensor, offsets: Offsets) -> Tensor:
    """Compute a_j = exp(u_j) / sum over the same bag. scores (..., n, h) -> (..., n, h)."""
    if offsets.size is not None:
        return offsets.split(scores).softmax(dim=-2).flatten(-3, -2)
    top = bag_max(scores.detach(), offsets).index_select(-2, offsets.bag_of)
    weights = (scores - top).exp()
    return weights / bag_sum(weights, offsets).index_select(-2, offsets.bag_of)


def bag_sum(x: Tensor, offsets: Offsets) -> Tensor:
    """Sum over each bag, in float32 or higher precision. (..., n, c) -> (..., b, c)."""
    x = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    if offsets.size is not None:
        return offsets.split(x).sum(dim=-2)
    zeros = x.new_zeros(*x.shape[:-2], offsets.bags, x.shape[-1])
    return zeros.index_add(-2, offsets.bag_of, x)


def bag_mean(x: Tensor, offsets: Offsets) -> Tensor:
    """Average over each bag. (..., n, c) -> (..., b, c)."""
    return bag_sum(x, offsets) / offsets.sizes.unsqueeze(-1)


def bag_max(x: Tensor, offsets: Offsets) -> Tensor:
    """Return the largest value in each bag. (..., n, c) -> (..., b, c)."""
    if offsets.size is not None:
        return offsets.split(x).amax(dim=-2)
    lowest = x.new_full((*x.shape[:-2], offsets.bags, x.shape[-1]), float("-inf"))
    index = offsets.bag_of.unsqueeze(-1).expand(x.shape)
    return lowest.scatter_reduce(-2, index, x, "amax", include_self=False)


def bag_argmax(x: Tensor, offsets: Offsets) -> Tensor:
    """Return the row of each bag's largest value, the first among ties. (..., n, c) -> (..., b, c)."""
    if offsets.size is not None:
        return offsets.split(x).argmax(dim=-2) + offsets.starts[:-1, None]
    x = x.detach()
    best = bag_max(x, offsets).index_select(-2, offsets.bag_of)
    rows = torch.arange(offsets.instances, device=x.device).unsqueeze(-1)
    places = torch.where(x == best, rows, offsets.instances)
    beyond = places.new_full((*x.shape[:-2], offsets.bags, x.shape[-1]), offsets.instances)
    return beyond.scatter_reduce(-2, offsets.bag_of.unsqueeze(-1).expand(x.shape), places, "amin")


def bag_weighted_sum(weights: Tensor, x: Tensor, offsets: Offsets) -> Tensor:
    """Compute Z = sum_j a_j z_j, one per head. weights (..., n, h), x (..., n, d) -> (..., b, h, d)."""
    if offsets.size is not None:
        return offsets.split(weights).mT @ offsets.split(x)
    products = weights.unsqueeze(-1) * x.unsqueeze(-2)
    return bag_sum(products.flatten(-2), offsets).unflatten(-1, products.shape[-2:])


def bag_project(x: Tensor, directions: Tensor, offsets: Offsets) -> Tensor:
    """Project each instance onto the directions of its bag. x (..., n, d), directions (..., b, c, d) -> (..., n, c)."""
    if offsets.size is not None:
        return (offsets.split(x) @ directions.mT).flatten(-3, -2)
    rows = max(1, 2**22 // directions[..., 0, :, :].numel())  # bounds the memory of the gathered directions
    parts = [
        torch.einsum("...nd,...ncd->...nc", part, directions.index_select(-3, bag))
        for part, bag in zip(x.split(rows, dim=-2), offsets.bag_of.split(rows), strict=True)
    ]
    return torch.cat(parts, dim=-2)


def bag_ranking(scores: Tensor, offsets: Offsets) -> Tensor:
    """Rank the instances of each bag by decreasing score; ties keep their order. scores (..., n, h) -> rows (..., n, h).

    Entry starts[i] + r of the result is the row of bag i's r-th best instance, counted from 0.
    """
    if offsets.size is not None:
        own = offsets.split(scores).argsort(dim=-2, descending=True, stable=True)
        return (own + offsets.starts[:-1, None, None]).flatten(-3, -2)
    by_score = scores.argsort(dim=-2, descending=True, stable=True)
    by_bag = offsets.bag_of[by_score].argsort(dim=-2, stable=True)
    return by_score.gather(-2, by_bag)


def bag_topk(scores: Tensor, offsets: Offsets, k: int) -> tuple[Tensor, Tensor]:
    """Return the values and rows of the k best instances of each bag. scores (..., n, h) -> two of (..., b, k, h).

    A bag of fewer than k instances is padded with values of -inf and repetitions of its last row.
    """
    ranking = bag_ranking(scores, offsets)
    places = torch.arange(k, device=scores.device)
    own = offsets.starts[:-1, None] + torch.minimum(places, offsets.sizes[:, None] - 1)
    rows = ranking.index_select(-2, own.flatten())
    values = scores.gather(-2, rows)
    missing = (places >= offsets.sizes[:, None]).flatten().unsqueeze(-1)
    values = values.masked_fill(missing, float("-inf"))
    return values.unflatten(-2, (offsets.bags, k)), rows.unflatten(-2, (offsets.bags, k))
