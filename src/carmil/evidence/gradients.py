"""Gradients with respect to the features: of any model, by autograd.

    input x gradient         e_cj = x_j . dF_c/dx_j
    integrated gradients     e_cj = x_j . mean over t in (0, 1) of dF_c/dx_j at t x          sum_j e_cj = F_c(x) - F_c(0)

With all features of instance j multiplied by s_j, x_j . dF_c/dx_j is dF_c/ds_j: one number, and no gradient as large as the
features. Bags do not see each other, so that one pass serves all of them.

n instances, b bags, k classes.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from carmil.bags.bags import rows_of
from carmil.models.contract import BagModel
from carmil.models.pooling import Offsets, bag_sum

FIRST_CUTS = 16
ROUNDS = 32


def input_x_gradient(model: BagModel, features: Tensor, offsets: Offsets | Tensor) -> Tensor:
    """x_j . dF_c/dx_j, (n, k)."""
    return _slopes(model, features, Offsets.of(offsets, features.device), 1.0)[1]


def integrated_gradients(
    model: BagModel, features: Tensor, offsets: Offsets | Tensor, *, tolerance: float = 5e-4
) -> Tensor:
    """(n, k), from features of zero. The sum over a bag is F(x) - F(0), to `tolerance` of max(1, |difference|).

    Midpoint rule on pieces of the way. While a bag's sum is not met, those of its pieces are halved over which the logits
    do least what the midpoint promises. No gradient sees a jump, and some models jump: DSMIL where another instance becomes
    critical, RRT where instances cease to be all alike. `carmil.evidence.residual` tells.
    """
    offsets = Offsets.of(offsets, features.device)
    change = feature_change(model, features, offsets)
    allowed = tolerance * change.abs().clamp_min(1.0)
    way = Way(model, features, offsets)
    pieces = way.first_pieces()
    for _ in range(ROUNDS):
        total = torch.stack([piece.integral for piece in pieces]).sum(0)
        unmet = ((change - bag_sum(total, offsets)).abs() > allowed).any(1)
        errors = torch.stack([(piece.error / allowed).amax(1) for piece in pieces])  # (pieces, b)
        worst = unmet & (errors > 0) & (errors >= errors.amax(0) / 2)
        if not worst.any():
            break
        for piece, bags in zip(list(pieces), worst, strict=True):
            if bags.any():
                pieces += way.halves(piece, bags)
                piece.integral[bags[offsets.bag_of]], piece.error[bags] = 0.0, 0.0
    return torch.stack([piece.integral for piece in pieces]).sum(0)


def feature_change(model: BagModel, features: Tensor, offsets: Offsets | Tensor) -> Tensor:
    """F(x) - F(0), (b, k): what integrated gradients sum to."""
    return class_logits(model, features, offsets) - class_logits(model, torch.zeros_like(features), offsets)


def class_logits(model: BagModel, features: Tensor, offsets: Offsets | Tensor) -> Tensor:
    """F, (b, k)."""
    with torch.no_grad():
        return model(features, offsets).logits


@dataclass(frozen=True)
class Piece:
    """Of the way, t from left to left + width: F before, in the middle and after it (b, k), the integral (n, k), and how far
    the integral's sums are from F after - F before, (b, k). Zeros for bags that it is not about."""

    left: float
    width: float
    before: Tensor
    middle: Tensor
    after: Tensor
    integral: Tensor
    error: Tensor


@dataclass(frozen=True)
class Way:
    """From features of zero to the bags as they are."""

    model: BagModel
    features: Tensor
    offsets: Offsets

    def first_pieces(self) -> list[Piece]:
        everyone = torch.ones(self.offsets.bags, dtype=torch.bool, device=self.features.device)
        cuts = [cut / FIRST_CUTS for cut in range(FIRST_CUTS + 1)]
        F = [class_logits(self.model, self.features * t, self.offsets) for t in cuts]
        return [self.piece(everyone, cuts[i], 1 / FIRST_CUTS, F[i], F[i + 1]) for i in range(FIRST_CUTS)]

    def halves(self, piece: Piece, bags: Tensor) -> list[Piece]:
        width = piece.width / 2
        return [
            self.piece(bags, piece.left, width, piece.before, piece.middle),
            self.piece(bags, piece.left + width, width, piece.middle, piece.after),
        ]

    def piece(self, bags: Tensor, left: float, width: float, before: Tensor, after: Tensor) -> Piece:
        """For the bags of a mask (b) only."""
        device = self.features.device
        starts, rows = rows_of(self.offsets.starts.cpu(), bags.nonzero().flatten().cpu())
        rows, own = rows.to(device), Offsets(starts, device)
        logits, slopes = _slopes(self.model, self.features[rows], own, left + width / 2)
        rise = after[bags] - before[bags]
        rounding = 32 * torch.finfo(rise.dtype).eps * (after[bags].abs() + before[bags].abs())
        integral = slopes.new_zeros(self.offsets.instances, self.model.classes)
        middle, error = torch.zeros_like(before), torch.zeros_like(before)
        integral[rows], middle[bags] = width * slopes, logits
        error[bags] = ((rise - width * bag_sum(slopes, own)).abs() - rounding).clamp_min(0.0)
        return Piece(left, width, before, middle, after, integral, error)


def _slopes(model: BagModel, features: Tensor, offsets: Offsets, t: float) -> tuple[Tensor, Tensor]:
    """F (b, k) and x_j . dF_c/dx_j (n, k) at t x."""
    model.begin("validation", 0)  # a method that learns in phases answers as a whole
    with torch.enable_grad():
        s = features.new_full((len(features), 1), t).requires_grad_()
        logits = model(features * s, offsets).logits
        columns = [
            torch.autograd.grad(logits[:, c].sum(), s, retain_graph=c + 1 < model.classes)[0]
            for c in range(model.classes)
        ]
    return logits.detach(), torch.cat(columns, dim=1)
