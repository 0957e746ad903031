"""Path evidence: the contribution of each instance to the change of each class logit from a reference to the
attended pool.

    a = softmax(u), Z = sum_j a_j z_j          Z_ref: the same with the reversed attention softmax(-u), or another reference
    G_c  = mean over t in (0, 1) of dF_c/dZ at Z_ref + t (Z - Z_ref)
    e_cj = a_j G_c . (z_j - Z_ref)             sum_j e_cj = F_c(Z) - F_c(Z_ref)

n instances, b bags, d features, h heads, k outputs, such as classes. Only the three verbs of a model are used.
"""

import torch
from torch import Tensor

from carmil.errors import CarmilError, unknown
from carmil.evidence.pooling_pass import PoolingPass, classifier_gradient, in_double, pooling_pass
from carmil.models.contract import BagModel
from carmil.models.pooling import Offsets, bag_sum

REFERENCES = {
    "reversed": "softmax(-u): what the model attends least",
    "uniform": "the mean of the bag's instances",
    "zero": "no instance at all: Z_ref = 0",
    "counterfactual": "softmax(u_cf): what CAR's branch attends",
}

FIRST_CUTS = 8
DEEPEST = 18


def path_evidence(
    model: BagModel,
    features: Tensor,
    offsets: Offsets | Tensor,
    *,
    reference: str = "reversed",
    tolerance: float = 1e-4,
) -> Tensor:
    """Return signed evidence (n, k) from one of REFERENCES.

    Its sum over a bag is F(Z) - F(Z_ref), to `tolerance` of max(1, |difference|)."""
    state = pooling_pass(model, features, offsets, "path evidence")
    start = reference_pool(state, reference)
    gradient = mean_gradient(model, start, state.pool, tolerance=tolerance)
    return state.shared(gradient, start)


def path_change(model: BagModel, features: Tensor, offsets: Offsets | Tensor, *, reference: str = "reversed") -> Tensor:
    """Return F(Z) - F(Z_ref), (b, k): the sum of path evidence."""
    state = pooling_pass(model, features, offsets, "path evidence")
    return _change(in_double(model), reference_pool(state, reference), state.pool).to(state.pool.dtype)


def relative_residual(evidence: Tensor, total: Tensor, offsets: Offsets) -> Tensor:
    """Return |sum_j e_cj - total_c| / max(1, |total_c|). evidence (n, k), total (b, k) -> (b, k)."""
    return (bag_sum(evidence, offsets) - total).abs() / total.abs().clamp_min(1.0)


def reference_pool(state: PoolingPass, reference: str) -> Tensor:
    """Return Z_ref (b, h, d)."""
    match reference:
        case "reversed":
            return state.pool_by(-state.scores)
        case "uniform":
            return state.pool_by(torch.zeros_like(state.scores))
        case "zero":
            return torch.zeros_like(state.pool)
        case "counterfactual":
            u_cf = state.counterfactual
            if u_cf is None or u_cf.shape[-2] != 1:
                raise CarmilError("a counterfactual reference needs a model with CAR's branch, such as 'car/abmil'")
            return state.pool_by(u_cf.squeeze(-2))
    raise CarmilError(unknown("reference", reference, REFERENCES))


def mean_gradient(model: BagModel, start: Tensor, end: Tensor, *, tolerance: float) -> Tensor:
    """Return G (b, k, h, d): the mean of dF_c/dZ on the straight line from start to end (b, h, d).

    Midpoint rule on pieces of the line; a piece is halved while the change predicted at its midpoint differs from
    that of the logits. A linear classifier needs no halving, a ReLU layer only around its kinks. In double precision,
    so that the difference never consists of rounding errors.
    """
    dtype, model = start.dtype, in_double(model)
    start, end = start.double(), end.double()
    bags = len(start)
    total = start.new_zeros(bags, model.classes, *start.shape[1:])
    scale = _change(model, start, end).abs().clamp_min(1.0)  # (b, k)
    bag = torch.arange(bags, device=start.device).repeat_interleave(FIRST_CUTS)
    left = torch.arange(FIRST_CUTS, device=start.device, dtype=start.dtype).repeat(bags) / FIRST_CUTS
    width = 1.0 / FIRST_CUTS
    for depth in range(DEEPEST):
        slope = classifier_gradient(model, _point(start, end, bag, left + width / 2))
        with torch.no_grad():
            rise = _change(model, _point(start, end, bag, left), _point(start, end, bag, left + width))
            promised = width * torch.einsum("pkhd,phd->pk", slope, (end - start)[bag])
            # Some tens of pieces (the first cuts, then one per kink) share the tolerance.
            rough = ((rise - promised).abs() > tolerance / 64 * scale[bag]).any(1)
            if depth == DEEPEST - 1:
                rough[:] = False
            total.index_add_(0, bag[~rough], slope[~rough] * width)
            if not rough.any():
                break
            bag, left = bag[rough].repeat(2), torch.cat([left[rough], left[rough] + width / 2])
            width /= 2
    return total.to(dtype)


@torch.no_grad()
def _change(model: BagModel, start: Tensor, end: Tensor) -> Tensor:
    """Return F(end) - F(start), (b, k), of a model in double precision."""
    return model.classify(end.double()) - model.classify(start.double())


def _point(start: Tensor, end: Tensor, bag: Tensor, t: Tensor) -> Tensor:
    return torch.lerp(start[bag], end[bag], t[:, None, None])
