"""The terms of the counterfactual objective, for each bag.

L = CE(F(u), y) + alpha CE(F(u) - F(u_cf), y) + lambda D(u, u_cf)        D: mean |u - u_cf|, or 1 - cos(u, u_cf)

b bags, n instances, k classes, h heads, m counterfactual maps.
"""

import math

from torch import Tensor

from carmil.errors import CarmilError
from carmil.models.contract import cross_entropy
from carmil.models.pooling import Offsets, bag_mean, bag_sum

DISTANCES = ("l1", "cosine")


def evidence_differential_loss(factual: Tensor, counterfactual: Tensor, labels: Tensor) -> Tensor:
    """L_diff = CE(softmax(F(u) - F(u_cf)), y). Logits (..., b, k) and (..., b, m, k) -> (..., b), the mean over the maps."""
    difference = factual.unsqueeze(-2) - counterfactual
    return cross_entropy(difference, labels.unsqueeze(-1)).mean(-1)


def l1_distance(u: Tensor, u_cf: Tensor, offsets: Offsets) -> Tensor:
    """D = 1/N sum_j |u_j - u_cf_j|. u (..., n, h), u_cf (..., n, m, h) -> (..., b), the mean over maps and heads."""
    return bag_mean((u.unsqueeze(-2) - u_cf).abs().mean((-2, -1)).unsqueeze(-1), offsets).squeeze(-1)


def cosine_distance(u: Tensor, u_cf: Tensor, offsets: Offsets) -> Tensor:
    """D = 1 - u.u_cf / (|u| |u_cf|) over the bag. u (..., n, h), u_cf (..., n, m, h) -> (..., b)."""
    u = u.unsqueeze(-2).expand_as(u_cf)
    products = [bag_sum((x * y).flatten(-2), offsets) for x, y in ((u, u_cf), (u, u), (u_cf, u_cf))]
    inner, norm, norm_cf = products
    return (1 - inner / (norm * norm_cf).clamp_min(1e-16).sqrt()).mean(-1)


def checked_weights(alpha: float, lambda_: float, distance: str) -> None:
    """alpha and lambda are not negative, the distance is one we have."""
    for name, value in (("alpha", alpha), ("lambda", lambda_)):
        if not 0 <= value < math.inf:
            raise CarmilError(f"{name} is {value}: expected a number >= 0")
    if distance not in DISTANCES:
        raise CarmilError(f"unknown distance {distance!r}: expected one of {', '.join(DISTANCES)}")
