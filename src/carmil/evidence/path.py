"""Path evidence: how much each instance moves each class logit on the way from what the model ignores to what it attends.

    a = softmax(u), Z = sum_j a_j z_j          Z_ref: the same with the reversed attention softmax(-u)
    G_c  = mean over t in (0, 1) of dF_c/dZ at Z_ref + t (Z - Z_ref)
    e_cj = a_j G_c . (z_j - Z_ref)             sum_j e_cj = F_c(Z) - F_c(Z_ref)

n instances, b bags, d features, h heads, k classes. Only the three verbs of a model are used.
"""

import copy

import torch
from torch import Tensor

from carmil.models.contract import AttendingModel
from carmil.models.pooling import Offsets, bag_project, bag_softmax, bag_weighted_sum

FIRST_CUTS = 8
DEEPEST = 18


def path_evidence(
    model: AttendingModel, features: Tensor, offsets: Offsets | Tensor, *, tolerance: float = 5e-4
) -> Tensor:
    """Signed evidence (n, k). Its sum over a bag is F(Z) - F(Z_ref), to `tolerance` of max(1, |difference|)."""
    offsets = Offsets.of(offsets, features.device)
    with torch.no_grad():
        z = model.embed(features, offsets)
        u = model.attend(z, offsets)
        attention = bag_softmax(u, offsets)
        end = bag_weighted_sum(attention, z, offsets)
        start = bag_weighted_sum(bag_softmax(-u, offsets), z, offsets)
    gradient = mean_gradient(model, start, end, tolerance=tolerance)
    with torch.no_grad():
        # e_cj = sum_h a_jh (G_ch . z_j - G_ch . Z_ref,h): one (n, d) x (d, k h) product.
        along = bag_project(z, gradient.flatten(1, 2), offsets).unflatten(1, gradient.shape[1:3])
        base = torch.einsum("bkhd,bhd->bkh", gradient, start).index_select(0, offsets.bag_of)
        return ((along - base) * attention.unsqueeze(1)).sum(-1)


def mean_gradient(model: AttendingModel, start: Tensor, end: Tensor, *, tolerance: float) -> Tensor:
    """G (b, k, h, d): the mean of dF_c/dZ on the straight line from start to end (b, h, d).

    Midpoint rule on pieces of the line; a piece is halved while what its midpoint promises differs from what the logits
    really do over it. A linear classifier needs no halving, a ReLU layer only around its kinks. In double precision, so that
    the difference is never rounding.
    """
    dtype, model = start.dtype, copy.deepcopy(model).double()
    start, end = start.double(), end.double()
    bags = len(start)
    total = start.new_zeros(bags, model.classes, *start.shape[1:])
    with torch.no_grad():
        scale = (model.classify(end) - model.classify(start)).abs().clamp_min(1.0)  # (b, k)
    bag = torch.arange(bags, device=start.device).repeat_interleave(FIRST_CUTS)
    left = torch.arange(FIRST_CUTS, device=start.device, dtype=start.dtype).repeat(bags) / FIRST_CUTS
    width = 1.0 / FIRST_CUTS
    for depth in range(DEEPEST):
        slope = _gradient(model, _point(start, end, bag, left + width / 2))
        with torch.no_grad():
            rise = model.classify(_point(start, end, bag, left + width)) - model.classify(_point(start, end, bag, left))
            promised = width * torch.einsum("pkhd,phd->pk", slope, (end - start)[bag])
            # Some tens of pieces (the first cuts, then one a kink) share the tolerance.
            rough = ((rise - promised).abs() > tolerance / 64 * scale[bag]).any(1)
            if depth == DEEPEST - 1:
                rough[:] = False
            total.index_add_(0, bag[~rough], slope[~rough] * width)
            if not rough.any():
                break
            bag, left = bag[rough].repeat(2), torch.cat([left[rough], left[rough] + width / 2])
            width /= 2
    return total.to(dtype)


def _point(start: Tensor, end: Tensor, bag: Tensor, t: Tensor) -> Tensor:
    return torch.lerp(start[bag], end[bag], t[:, None, None])


def _gradient(model: AttendingModel, points: Tensor) -> Tensor:
    """dF_c/dZ for every point and class: (p, h, d) -> (p, k, h, d)."""
    with torch.enable_grad():
        points = points.detach().requires_grad_()
        logits = model.classify(points)
        rows = [
            torch.autograd.grad(logits[:, c].sum(), points, retain_graph=c + 1 < model.classes)[0]
            for c in range(model.classes)
        ]
    return torch.stack(rows, dim=1)
