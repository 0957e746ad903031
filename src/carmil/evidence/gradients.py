"""Gradients with respect to the features, of any differentiable model, by autograd.

    input x gradient         e_cj = (x_j - x_0) . dF_c/dx_j
    integrated gradients     e_cj = (x_j - x_0) . mean over t in (0, 1) of dF_c/dx_j at x_0 + t (x - x_0)
                             sum_j e_cj = F_c(x) - F_c(x_0)

x_0 is the model's baseline (`BagModel.reference`): the mean training instance where features are scaled, otherwise zeros.
With x_j = x_0 + s_j (x_j - x_0), the product above is dF_c/ds_j: one number per instance instead of a gradient as large as the
features. Bags are independent, so that one pass serves all of them.

n instances, b bags, k outputs, such as classes.
"""

import torch
from torch import Tensor

from carmil.bags.bags import rows_of, runs_of
from carmil.models.contract import BagModel
from carmil.models.pooling import Offsets

FIRST_CUTS = 16
DEEPEST = 40
ROWS = 2**15  # instances per pass


def input_x_gradient(model: BagModel, features: Tensor, offsets: Offsets | Tensor) -> Tensor:
    """Return (x_j - x_0) . dF_c/dx_j, (n, k)."""
    return _slopes(model, features, Offsets.of(offsets, features.device), features.new_ones(len(features), 1))[1]


def integrated_gradients(
    model: BagModel, features: Tensor, offsets: Offsets | Tensor, *, tolerance: float = 1e-4
) -> Tensor:
    """Return integrated gradients (n, k) from instances x_0. The sum over a bag is F(x) - F(x_0), to `tolerance` of
    max(1, |difference|).

    Midpoint rule on pieces of the path. While the error of a bag's sum is too large, a piece is halved if the change of
    the logits over it differs from the change predicted at its midpoint. A gradient does not register jumps, and some
    models have them: DSMIL where another instance becomes critical, RRT where instances cease to be equal.
    `carmil.evidence.residual` measures the error.
    """
    offsets = Offsets.of(offsets, features.device)
    device, bags = features.device, torch.arange(offsets.bags, device=features.device)
    cuts = torch.linspace(0, 1, FIRST_CUTS + 1).tolist()
    at_cuts = torch.stack(
        [class_logits(model, _interpolate(model, features, t), offsets) for t in cuts], dim=1
    )  # (b, cuts, k)
    change = at_cuts[:, -1] - at_cuts[:, 0]
    allowed = tolerance * change.abs().clamp_min(1.0)
    integral, met = features.new_zeros(len(features), model.classes), torch.zeros_like(change)
    # The p current pieces: their bags, their starting points, and F at both ends (p, k).
    bag, left, width = (
        bags.repeat_interleave(FIRST_CUTS),
        torch.tensor(cuts[:-1] * offsets.bags, device=device),
        1.0 / FIRST_CUTS,
    )
    before, after = at_cuts[:, :-1].flatten(0, 1), at_cuts[:, 1:].flatten(0, 1)
    for depth in range(DEEPEST):
        middle, slopes, rows, piece_of = _midpoints(model, features, offsets, bag, left + width / 2)
        promised = torch.zeros_like(before).index_add_(0, piece_of, width * slopes)
        rounding = 32 * torch.finfo(before.dtype).eps * (after.abs() + before.abs())
        error = (after - before - promised).abs() - rounding
        unmet = ((change - met).index_add(0, bag, promised, alpha=-1).abs() > allowed).any(1)
        # Some tens of pieces share the tolerance.
        rough = unmet[bag] & (error > allowed[bag] / 64).any(1) & (depth < DEEPEST - 1)
        done = ~rough
        integral.index_add_(0, rows[done[piece_of]], width * slopes[done[piece_of]])
        met.index_add_(0, bag[done], promised[done])
        if not rough.any():
            break
        bag, left = bag[rough].repeat(2), torch.cat([left[rough], left[rough] + width / 2])
        before, after = torch.cat([before[rough], middle[rough]]), torch.cat([middle[rough], after[rough]])
        width /= 2
    return integral


def _midpoints(
    model: BagModel, features: Tensor, offsets: Offsets, bag: Tensor, t: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return F (p, k) of each piece's bag at t_i of its path, and gradients of its instances.

    For all m instances of all pieces, concatenated: dF_c/dt_j (m, k), the row of the instance (m), and its piece (m)."""
    device = features.device
    starts, rows = rows_of(offsets.starts.cpu(), bag.cpu())
    rows, piece_of = rows.to(device), torch.repeat_interleave(starts.diff()).to(device)
    logits, slopes = [], []
    for first, last in runs_of(starts.diff().tolist(), ROWS):
        part = slice(int(starts[first]), int(starts[last]))
        own = Offsets(starts[first : last + 1] - starts[first], device)
        some = _slopes(model, features[rows[part]], own, t[piece_of[part]].unsqueeze(-1))
        logits.append(some[0])
        slopes.append(some[1])
    return torch.cat(logits), torch.cat(slopes), rows, piece_of


def feature_change(model: BagModel, features: Tensor, offsets: Offsets | Tensor) -> Tensor:
    """Return F(x) - F(x_0), (b, k): the sum of integrated gradients."""
    return class_logits(model, features, offsets) - class_logits(model, _interpolate(model, features, 0.0), offsets)


def class_logits(model: BagModel, features: Tensor, offsets: Offsets | Tensor) -> Tensor:
    """Return the logits F, (b, k)."""
    with torch.no_grad():
        return model(features, offsets).logits


def _slopes(model: BagModel, features: Tensor, offsets: Offsets, t: Tensor) -> tuple[Tensor, Tensor]:
    """Return F (b, k) and dF_c/dt_j (n, k) at t of the path; t (n, 1)."""
    model.begin("validation", 0)  # a method with several phases is differentiated as a whole
    with torch.enable_grad():
        s = t.to(features.dtype, copy=True).requires_grad_()
        logits = model(_interpolate(model, features, s), offsets).logits
        columns = [
            torch.autograd.grad(logits[:, c].sum(), s, retain_graph=c + 1 < model.classes)[0]
            for c in range(model.classes)
        ]
    return logits.detach(), torch.cat(columns, dim=1)


def _interpolate(model: BagModel, features: Tensor, t: Tensor | float) -> Tensor:
    """Return x_0 + t (x - x_0), (n, d); t is a number or (n, 1)."""
    start = model.reference(features)
    return start + t * (features - start)
