"""Terms of the counterfactual objective, per bag.

L = l(F(u), y) + alpha l(F(u) - F(u_cf), y) + lambda D(u, u_cf)

l is the loss of the target (`carmil.targets.links`), for classes the cross-entropy CE.

    l1        D = mean |u - u_cf|                       the paper's
    cosine    D = 1 - cos(u, u_cf)                      the paper's
    relative  D = mean |u - u_cf| / deviation of u      in units of the factual score, so that lambda is comparable between cohorts

b bags, n instances, k classes, h heads, m counterfactual maps.
"""

import math
from collections.abc import Callable

from torch import Tensor

from carmil.errors import CarmilError
from carmil.models.pooling import Offsets, bag_mean, bag_sum
from carmil.targets.links import cross_entropy

BagLoss = Callable[[Tensor, Tensor], Tensor]  # logits (..., b, k), labels -> (..., b)
SMALLEST_SPREAD = 1e-3  # lower bound of the deviation of scores, which is 0 if all scores are equal
DISTANCES = ("l1", "cosine", "relative")
DEFAULT_DISTANCE = "relative"
# Default alpha and lambda of each distance: the paper's, and ours, chosen on validation bags (docs/choosing.md).
WEIGHTS = {"l1": (0.2, 1.0), "cosine": (0.2, 1.0), "relative": (0.05, 0.02)}


def evidence_differential_loss(
    factual: Tensor, counterfactual: Tensor, labels: Tensor, bag_loss: BagLoss = cross_entropy
) -> Tensor:
    """Return L_diff = l(F(u) - F(u_cf), y): for classes CE(softmax(F(u) - F(u_cf)), y).

    Outputs (..., b, k) and (..., b, m, k) -> (..., b), the mean over the maps. Only outputs are subtracted: cut points and
    baselines of the target's link belong to l.
    """
    difference = (factual.unsqueeze(-2) - counterfactual).transpose(-3, -2)  # (..., m, b, k)
    return bag_loss(difference, labels).mean(-2)


def l1_distance(u: Tensor, u_cf: Tensor, offsets: Offsets) -> Tensor:
    """Return D = 1/N sum_j |u_j - u_cf_j|. u (..., n, h), u_cf (..., n, m, h) -> (..., b), the mean over maps and heads."""
    return bag_mean((u.unsqueeze(-2) - u_cf).abs().mean((-2, -1)).unsqueeze(-1), offsets).squeeze(-1)


def cosine_distance(u: Tensor, u_cf: Tensor, offsets: Offsets) -> Tensor:
    """Return D = 1 - u.u_cf / (|u| |u_cf|) over the bag. u (..., n, h), u_cf (..., n, m, h) -> (..., b)."""
    u = u.unsqueeze(-2).expand_as(u_cf)
    products = [bag_sum((x * y).flatten(-2), offsets) for x, y in ((u, u_cf), (u, u), (u_cf, u_cf))]
    inner, norm, norm_cf = products
    return (1 - inner / (norm * norm_cf).clamp_min(1e-16).sqrt()).mean(-1)


def relative_distance(u: Tensor, u_cf: Tensor, offsets: Offsets) -> Tensor:
    """Return D = 1/N sum_j |u_j - u_cf_j| / s, s the deviation of u in its bag. u (..., n, h), u_cf (..., n, m, h)
    -> (..., b).

    The spread of the scores differs between cohorts by orders of magnitude and grows during training; dividing by
    s removes it. s is only a unit of measurement: no gradient flows through it.
    """
    spread = bag_deviation(u.detach(), offsets).clamp_min(SMALLEST_SPREAD)  # (..., b, h)
    change = bag_mean((u.unsqueeze(-2) - u_cf).abs().mean(-2), offsets)  # (..., b, h)
    return (change / spread).mean(-1)


def bag_deviation(x: Tensor, offsets: Offsets) -> Tensor:
    """Return the standard deviation of x (..., n, h) in each bag, (..., b, h)."""
    mean = bag_mean(x, offsets)
    return bag_mean((x - mean.index_select(-2, offsets.bag_of)).square(), offsets).sqrt()


def checked_weights(alpha: float, lambda_: float, distance: str) -> None:
    """Raise an error for a negative or infinite alpha or lambda, or an unknown distance."""
    for name, value in (("alpha", alpha), ("lambda", lambda_)):
        if not 0 <= value < math.inf:
            raise CarmilError(f"{name} is {value}: expected a number >= 0")
    if distance not in DISTANCES:
        raise CarmilError(f"unknown distance {distance!r}: expected one of {', '.join(DISTANCES)}")
